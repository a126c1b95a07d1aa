"""Latent attention against plain mathematics in float64, on every mesh: loss and every gradient."""

import dataclasses
from functools import cache

import jax
import pytest
from flax import nnx
from packed_reference import D, V, batch, loss_and_gradients
from support import TOLERANCE, by_name, random_weights, relative_error, sizes_of, state_on_mesh
from variants import variant, variants

import jaxtp
from jaxtp.config.schema import to_plain
from jaxtp.layers.lora import TARGETS
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.models.config import upgrade_settings, violations

CONFIG = jaxtp.ModelConfig(
    vocab_size=V,
    d_model=D,
    num_layers=1,
    num_heads=6,
    num_kv_heads=6,
    kv_rank=16,
    query_rank=8,
    head_dim=12,
    rope_head_dim=4,
    value_head_dim=10,
    d_ff=24,
    norm_eps=1e-3,
    rope_theta=20.0,
    loss_chunk=8,
)
CONFIGS = variants(
    CONFIG,
    {
        "queries from a latent": {"num_layers": 2},
        "queries from the input": {"query_rank": 0, "query_scale": 0.4},
        "windows": {
            "num_layers": 2,
            "pattern": [{"sliding_window": 5, "query_temperature": 0.5}, {}],
            "rope_scaling": {"original_length": 3},
        },
        "adapters": {"lora": {"rank": 3, "alpha": 5.0}},
        "adapters, queries from the input": {"query_rank": 0, "lora": {"rank": 3}},
    },
)
WHOLE = {"sequence_parallel": False}
CASES = [
    ("queries from a latent", (1, 1, 1, 8), "auto", {}),
    ("queries from a latent", (1, 1, 1, 3), "auto", {**WHOLE, "scan_layers": False}),
    ("queries from a latent", (1, 1, 4, 1), "gather", {"attention": "blockwise"}),
    ("queries from the input", (2, 2, 1, 2), "auto", {"remat": "save_dots"}),
    ("queries from the input", (1, 2, 1, 3), "auto", WHOLE),
    ("windows", (1, 2, 1, 2), "auto", {"remat": "none"}),
    ("windows", (1, 2, 2, 1), "ulysses", {}),
    ("windows", (1, 1, 4, 2), "gather", {"remat": "save_reduced"}),
    ("adapters", (1, 2, 2, 2), "gather", {"remat": "save_gathered"}),
    ("adapters", (1, 1, 1, 4), "auto", {"overlap": "ring"}),
    ("adapters, queries from the input", (1, 2, 1, 3), "auto", {"remat": "save_dots"}),
    ("adapters, queries from the input", (1, 1, 1, 4), "auto", {"attention": "blockwise", "overlap": "ring"}),
]
"""Models, meshes, methods over cp and settings that change no number."""
HEAVY = ("adapters", (1, 2, 2, 2))


@cache
def expected(name):
    """Returns weights in float32; and loss and gradients in float64."""
    weights = random_weights(lambda: jaxtp.Decoder(CONFIGS[name], rngs=nnx.Rngs(0)))
    return weights, *loss_and_gradients(weights, CONFIGS[name])


@pytest.mark.parametrize(
    ("name", "mesh", "context", "changes"),
    [pytest.param(*case, marks=pytest.mark.heavy if case[:2] == HEAVY else pytest.mark.wide) for case in CASES],
    ids=str,
)
def test_loss_and_gradients_equal_the_plain_mathematics(name, mesh, context, changes):
    ids, labels, segments = batch()
    weights, expected_loss, expected_grads = expected(name)
    config = dataclasses.replace(CONFIGS[name], **changes)
    on = mesh_of(sizes_of(mesh))
    graph, state = state_on_mesh(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)), weights, on)
    trained = nnx.LoRAParam if config.lora.rank else nnx.Param

    def loss(params, others):
        model = nnx.merge(graph, params, others, copy=True)
        return model.loss(ids, labels, segments_BT=segments, context=context)[0]

    with jax.set_mesh(on):
        total, grads = jax.jit(jax.value_and_grad(loss))(*nnx.split_state(state, trained, ...))
        found = by_name(grads, on)
    errors = {name: relative_error(grad, expected_grads[name]) for name, grad in found.items()}
    errors["loss"] = abs(float(total) / float(expected_loss) - 1)
    worst = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not worst, worst


UNFIT = {
    "model.rope_head_dim=0 is not an even number from 2 to below model.head_dim=12": {"rope_head_dim": 0},
    "model.value_head_dim=0, but latent attention needs a width; 8 is usual": {"value_head_dim": 0},
    "model.num_kv_heads=3 differs from model.num_heads=6: with model.kv_rank each head": {"num_kv_heads": 3},
    "model.attention_gate=True has no meaning with model.kv_rank": {"attention_gate": True},
    "model.attention_sinks=True has no meaning with model.kv_rank": {"attention_sinks": True},
    "model.query_rank=8 needs latent attention; set model.kv_rank": {
        "kv_rank": 0,
        "rope_head_dim": 0,
        "value_head_dim": 0,
    },
    "model.kv_rank=17 is not divisible by mesh.fsdp=2; fsdp can be 1, or kv_rank 16 or 18": {"kv_rank": 17},
}


def test_settings_that_do_not_fit_are_named():
    found = {text: violations(variant(CONFIG, changes), mesh_shape(fsdp=2, tp=2)) for text, changes in UNFIT.items()}
    assert {text: [problem[: len(text)] for problem in problems] for text, problems in found.items()} == {
        text: [text] for text in UNFIT
    }


def test_a_checkpoint_of_adapters_keeps_its_default_targets():
    """Before latents there were fewer."""
    plain = to_plain(variant(CONFIG, {"kv_rank": 0, "lora": {"rank": 2}}))
    old = {name: value for name, value in plain.items() if name != "kv_rank"}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    old["lora"] = {**old["lora"], "targets": targets}
    assert [*upgrade_settings(old)["lora"]["targets"]] == [*TARGETS]
    assert upgrade_settings(plain) == plain
