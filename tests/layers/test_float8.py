"""A frozen base in 8 or 4 bits: its error, the same numbers on every mesh, and what a compiled
step holds of it.
"""

import re
from dataclasses import replace
from functools import cache

import accounts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose
from support import (
    assert_close,
    by_name,
    decoder,
    random_weights,
    relative_error,
    sizes_of,
    state_on_mesh,
    swept,
    without_mesh,
)
from tables import read_table
from variants import variant, variants

import jaxtp
from jaxtp.checkpoint.logical import named_variables, replace_arrays
from jaxtp.config.schema import ConfigError
from jaxtp.data.loader import abstract_batch
from jaxtp.layers.float8 import Float8
from jaxtp.layers.forms import FORMS, MXFP4
from jaxtp.layers.lora import LoraConfig, freeze_as, stored_kernels
from jaxtp.mesh import mesh_of
from jaxtp.models.config import violations
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.memory import costs_of_step, memory_per_device

TABLE = read_table(__file__)
CONFIG = variant(jaxtp.ModelConfig(), TABLE["base"])
MODELS = variants(CONFIG, TABLE["models"])
IN_BLOCKS = variants(variant(CONFIG, TABLE["in blocks"]), TABLE["models in blocks"])
LORA = LoraConfig(rank=2, base="float8")
LORA4 = LoraConfig(rank=2, base="mxfp4")
IDS = jax.random.randint(jax.random.key(1), (4, 8), 0, CONFIG.vocab_size)


@cache
def weights(name, lora):
    """Graph and state of a model with a full base, then with one in a form; and the settings of
    the second.
    """
    model = (MODELS if lora == LORA else IN_BLOCKS)[name]
    full, config = (replace(model, lora=each) for each in (LoraConfig(rank=2), lora))
    graph, state = without_mesh(decoder(full), random_weights(decoder(full), scale=0.05))
    in_form, abstract = nnx.split(nnx.eval_shape(decoder(config)))
    return (graph, state), (in_form, freeze_as(state, abstract)), config


def arrays_of(state):
    return {path: variable[...] for path, variable in named_variables(state).items()}


@cache
def on_one_device(name, lora):
    """Returns the numbers of a base in a form, those of its rounded kernels in float32, and the
    logits of the original.
    """
    (graph, full), (_, stored), _ = weights(name, lora)
    arrays = arrays_of(stored)
    rounded = {
        k: form(arrays[f"{k}.bits"], arrays[f"{k}.scale"]).astype("float32")
        for k, form in stored_kernels(stored).items()
    }
    kernels = {path for path in named_variables(full) if ".kernel" in path and "head" not in path}
    if lora == LORA4 and "experts" in name:
        kernels = {path for path in named_variables(full) if path.startswith("blocks.mlp.")}
        kernels = {path for path in kernels if path.split(".")[-1] in ("gate", "up", "down")}
        assert rounded.keys() == kernels
    assert kernels <= rounded.keys()
    assert set(stored_kernels(stored).values()) == {FORMS[lora.base]}
    of = jax.jit(lambda state: nnx.merge(graph, state)(IDS))
    plain = numbers(graph, replace_arrays(full, arrays_of(full) | rounded))
    return numbers(*weights(name, lora)[1]), plain, of(full)


def numbers(graph, state):
    """Logits and the gradients of the adapters."""

    @jax.jit
    def run(state):
        trained, frozen = nnx.split_state(state, nnx.Param, ...)

        def loss(trained):
            model = nnx.merge(graph, trained, frozen, copy=True)
            return model.loss(IDS, IDS)[0], model(IDS)

        grads, logits = jax.grad(loss, has_aux=True)(trained)
        return grads, logits

    return run(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_error_of_each_number_is_bounded(dtype):
    magnitudes = jnp.array([1e-36, 1e-4, 1.0, 3e8, 0.0])
    kernel = (jax.random.normal(jax.random.key(0), (3, 64, 5)) ** 3 * magnitudes).astype(dtype)
    stored = Float8.of(kernel)
    assert (stored.bits.dtype, stored.scale.shape, stored.shape) == (
        jnp.uint8,
        (3, 1, 5),
        kernel.shape,
    )
    exact, found = (np.asarray(each.astype(jnp.float32)) for each in (kernel, stored))
    bound = np.maximum(np.abs(exact) / 16, np.asarray(stored.scale) / 1024)
    assert (np.abs(found - exact) <= bound * (1 + 1e-5)).all()
    assert not found[..., 4].any()
    largest = np.abs(exact).max(1)
    assert_allclose(np.abs(found).max(1)[:, 1:], largest[:, 1:], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_error_of_a_number_in_4_bits_is_bounded_and_twice_is_once(dtype):
    magnitudes = jnp.array([1e-30, 1e-4, 1.0, 3e8, 0.0])
    kernel = (jax.random.normal(jax.random.key(0), (3, 64, 5)) ** 3 * magnitudes).astype(dtype)
    stored = jax.eval_shape(MXFP4.of, kernel)
    assert stored.shape == kernel.shape
    rounded = jax.jit(lambda kernel: MXFP4.of(kernel).astype(dtype))
    found = rounded(kernel)
    blocks, error = (jnp.abs(x).reshape(3, 2, 32, 5) for x in (kernel, found - kernel))
    assert (error <= blocks.max(2, keepdims=True) / 4).all()
    assert (rounded(found) == found).all()
    numbers = jnp.array([0, 0.2, 0.25, 0.3, 0.75, 1.25, 2.5, 3.5, 5, 7.9, -5.1, *[0] * 21])
    assert rounded(numbers[:, None])[:11, 0].tolist() == [0, 0, 0, 0.5, 1, 1, 2, 4, 4, 6, -6]


CASES = [(name, tuple(mesh), LORA) for name, mesh in TABLE["cases"]]
CASES += [(name, tuple(mesh), LORA4) for name, mesh in TABLE["cases in blocks"]]


@swept("case", CASES)
def test_every_mesh_gives_the_numbers_of_one_device_and_these_are_of_rounded_kernels(case):
    name, mesh, lora = case
    (grads, logits), (grads_of_rounded, rounded), exact = on_one_device(name, lora)
    assert relative_error(logits, rounded) < 1e-6
    assert_close(arrays_of(grads), arrays_of(grads_of_rounded))
    assert 1e-3 < relative_error(logits, exact) < 0.4
    _, (_, stored), config = weights(name, lora)
    mesh = mesh_of(sizes_of(mesh))
    graph, state = state_on_mesh(decoder(config), arrays_of(stored), mesh)
    with jax.set_mesh(mesh):
        found = numbers(graph, state)
    assert_close(
        {"logits": found[1], **by_name(found[0], mesh)}, {"logits": logits, **arrays_of(grads)}
    )


@swept("name", ["llama", "experts"])
def test_a_step_gathers_8_bits_and_never_has_all_kernels_in_more(name):
    low = jaxtp.Precision(param="bfloat16", compute="bfloat16")
    config = replace(MODELS[name], lora=LORA, precision=low, num_layers=5)
    mesh = mesh_of(sizes_of((1, 2, 1)))
    step, plan = accounts.step_of(config, mesh, 1)
    kernels = stored_kernels(plan.abstract)
    with jax.set_mesh(mesh):
        # Kernels of experts are gathered: in 8 bits they are fewer bytes than these tokens.
        text = step.lower(plan.sharded, abstract_batch(mesh, 4, 16)).compile().as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", text)
    assert len([dtype for dtype, _ in gathered if dtype == "u8"]) == 2 * len(kernels), (
        "forward, and backward again"
    )
    bits = {v.shape for path, v in nnx.to_flat_state(plan.abstract) if path[-1] == "bits"}
    held = set(re.findall(r"(\w+)\[5,([\d,]+)\]", text))
    shards = {
        ",".join(map(str, (*s[1:at], s[at] // 2, *s[at + 1 :])))
        for s in bits
        for at in range(1, len(s))
    }
    whole = {",".join(map(str, s[1:])) for s in bits}
    assert {dtype for dtype, shape in held if shape in shards | whole} == {"u8"}


def test_a_base_in_8_bits_is_refused_without_adapters_and_they_are_not_merged_into_it():
    with pytest.raises(ConfigError, match=r"model.lora.base=float8 has no effect without"):
        nnx.eval_shape(decoder(replace(CONFIG, lora=LoraConfig(base="float8"))))
    with pytest.raises(ConfigError, match="merged into the original kernels"):
        nnx.eval_shape(lambda: jaxtp.merge_adapters(jaxtp.add_adapters(decoder(CONFIG)(), LORA)))


def test_70b_in_8_and_4_bits_take_a_half_and_a_quarter_of_the_traffic_of_bfloat16():
    """Llama 3 70B over fsdp 8: 18.2 GB of parameters on each device in bfloat16."""
    sizes = sizes_of((1, 8, 1))
    gigabytes = []
    sent = []
    for base in ("full", "float8", "mxfp4"):
        run = large("70b", base, 8)
        gigabytes.append(round(memory_per_device(run, sizes).parameters / 1e9, 1))
        traffic = costs_of_step(run, sizes).traffic
        sent.append(
            sum(c.bytes_sent * times for c, times in traffic.items() if c.axes == ("fsdp",))
        )
    assert gigabytes == [18.2, 9.7, 5.6]
    assert sent[1] < 0.52 * sent[0]
    assert sent[2] < 0.29 * sent[0]


def large(name, base, rows):
    changes = {"lora": {"rank": 16, "base": base}, "remat": "full", "loss_chunk": 1024}
    data = DataConfig(sequence_length=2048, global_batch_size=rows)
    return TrainConfig(model=variant(jaxtp.ModelConfig(), TABLE[name] | changes), data=data)


def test_a_base_in_4_bits_fits_few_gpus():
    """70B on one GPU of 80 GB and on two of 48, gpt-oss 120B on two of 80; 0.75 is for JAX."""
    for name, fsdp, limit in TABLE["fits"]:
        run = large(name, "mxfp4", fsdp)
        total = memory_per_device(run, sizes_of((1, fsdp, 1)), platform="cuda 9.0").total
        assert total < limit * 1e9


def test_blocks_that_no_device_has_whole_are_refused():
    llama = replace(IN_BLOCKS["llama"], lora=LORA4)
    for changes, sizes, words in TABLE["no whole blocks"]:
        problems = " ".join(violations(variant(llama, changes), sizes_of(sizes)))
        assert words in problems
