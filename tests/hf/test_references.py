"""Every family against float64 references: logits, losses and gradients of every tensor, on
rotating meshes.
"""

import itertools

import hf_reference
import jax
import numpy as np
import pytest
from flax import nnx
from hf_folders import move_adapters, reference_attributes, values
from hf_reference import COPIED, FOLDER, GRAD_NORM, GRADIENT, LOGITS, LOSS, MADE, NEWER, model_types
from numpy.random import default_rng
from numpy.testing import assert_allclose
from small_generators import greedy_ids
from support import cached_and_whole, outputs_of, relative_error, sizes_of, swept, use_mesh
from updates import shifted, updated

import jaxtp
from jaxtp import hf
from jaxtp.checkpoint.logical import named_variables
from jaxtp.hf.config_json import family_of, model_config
from jaxtp.hf.families import ALIASES, FAMILIES, REFUSED, WRAPPERS
from jaxtp.hf.model_folder import read_attributes
from jaxtp.hf.saving import gather_tensors
from jaxtp.hf.tensor_map import group_by_tensor, tensor_parts

UNREAD = [name for name in NEWER if not model_types(name) <= {*FAMILIES, *WRAPPERS, *ALIASES}]
"""Models of families that are refused."""
NAMES = [name for name in COPIED + MADE + NEWER if name not in UNREAD]
MESHES = [
    ((1, 1, 2), True),
    ((1, 1, 3), True),
    ((1, 1, 4), False),
    ((1, 1, 8), True),
    ((1, 2, 2), True),
    ((1, 1, 2, 1), None),
    ((1, 1, 2, 4), True),
]
"""Sizes of (dp, fsdp, tp) or (dp, fsdp, cp, tp), and `sequence_parallel`."""
ROTATED = [(name, *case) for name, case in zip(NAMES, itertools.cycle(MESHES), strict=False)]
HEADS = [
    "llama_gqa",
    "llama_kv2",
    "gpt2",
    "olmo2",
    "phi3",
    "mixtral",
    "gpt_oss",
    "gpt_bigcode",
    "deepseek_v3_yarn",
    "gemma4_26b",
    "qwen3_5",
    "qwen3_next",
]
"""Models that differ in numbers of heads, kv heads, experts or DeltaNet's heads, and so in how
they are split.
"""
SPLIT = [((1, 1, 4), True), ((1, 1, 8), False)]
CASES = ROTATED + [
    (name, *case) for name in HEADS for case in SPLIT if (name, *case) not in ROTATED
]
DIFFERENT = {
    "gpt2": "biases, learned positions, a tied table",
    "gpt_oss": "sinks, and experts with biases",
    "qwen3_next": "Gated DeltaNet, gates, a shared expert",
}
"""Models of the default suite, and their mechanisms."""
IN_MEMORY = {
    "embed_out.": "lm_head.",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.": "block_sparse_moe.router.",
}
"""Parts of names in files, and in transformers."""


def by_their_names(state, config, name):
    """Returns trained arrays of a state like the model's, as transformers has them in memory."""
    family = family_of(read_attributes(FOLDER / name), name)
    variables = {
        path: each for path, each in named_variables(state).items() if isinstance(each, nnx.Param)
    }
    tensors = group_by_tensor(tensor_parts(variables, config, family, "stacked"))
    names = [name_in_memory(theirs, family) for theirs in tensors]
    return dict(zip(names, gather_tensors(variables, tensors, "float32"), strict=True))


def name_in_memory(theirs, family):
    """Returns the name in transformers of a tensor in a file."""
    if family.wrapper is not None and theirs.startswith(family.prefix):
        theirs = family.wrapper.in_memory + theirs.removeprefix(family.prefix)
    for stored, loaded in (IN_MEMORY | family.renamed).items():
        theirs = theirs.replace(stored, loaded)
    return theirs


def assert_logits(found, expected):
    assert np.abs(np.asarray(found) - expected).max() < LOGITS


@swept("case", CASES)
def test_logits_losses_and_gradients(case):
    name, sizes, split = case
    reference = hf_reference.load(name)
    ids = reference["input_ids"].astype(np.int32)
    with use_mesh(**sizes_of(sizes)):
        model = hf.load(FOLDER / name, sequence_parallel=split, loss_chunk=16)
        graph, state = nnx.split(model)

        def mean_loss(state, labels):
            merged = nnx.merge(graph, state)
            # Loss and logits of one forward pass, which is traced once.
            sequences = merged.sequences(ids)
            hidden = merged.hidden(ids, sequences=sequences)
            total, count = merged.loss_of_hidden(hidden, sequences.local_tokens(labels))
            return total / count, merged.logits_of_hidden(sequences.natural(hidden))

        run = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
        (loss, logits), grads = run(state, shifted(reference["input_ids"]))
        (masked, _), masked_grads = run(state, shifted(reference["labels_masked"]))
    assert_logits(logits, reference["logits"])
    assert abs(loss - reference["loss64"]) < LOSS
    assert abs(masked - reference["loss_masked64"]) < LOSS
    grads = by_their_names(grads, model.config, name)
    masked_grads = by_their_names(masked_grads, model.config, name)
    for found, norm in ((grads, "grad_norm64"), (masked_grads, "grad_norm_masked64")):
        total = np.sqrt(sum(np.sum(np.float64(grad) ** 2) for grad in found.values()))
        assert total == pytest.approx(float(reference[norm]), rel=GRAD_NORM)
    errors = hf_reference.sketched_errors(grads, reference, "grad")
    assert max(errors.values()) < GRADIENT, errors


FIRST = [
    pytest.param(case, marks=pytest.mark.heavy if case[0] == "qwen3_next" else ())
    for case in ROTATED
    if case[0] in DIFFERENT
]


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_logits(case):
    name, sizes, split = case
    reference = hf_reference.load(name)
    with use_mesh(**sizes_of(sizes)):
        model = hf.load(FOLDER / name, sequence_parallel=split)
        logits = outputs_of(model, reference["input_ids"].astype(np.int32))
    assert_logits(logits, reference["logits"])


def test_references_that_are_not_read_are_of_refused_families():
    assert not [name for name in UNREAD if not model_types(name) & REFUSED.keys()]


BLOCKS = [
    "qwen3_moe_dense",
    "gemma3",
    "gemma4_26b",
    "ministral3",
    "olmoe",
    "granite4_moe",
    "exaone4",
    "apertus",
    "stablelm",
    "gpt_neo",
    "gpt_oss",
    "deepseek_v2",
    "qwen3_5_moe",
    "muse_glimmer",
    "phi4_mini_long",
    "lfm2",
    "lfm2_moe",
]
"""Models of one kind of block each: a kind of attention, norms, rotation or experts."""


@swept("name", BLOCKS)
def test_sequences_in_a_row_are_as_alone_and_a_cache_is_as_the_whole(name):
    """Rows begin with `cut` tokens of one sequence, and go on with the other."""
    reference = hf_reference.load(name)
    cut = 11
    ids = reference["input_ids"].astype(np.int32)
    rows, expected = (
        np.concatenate([a[:, :cut], a[::-1, :-cut]], axis=1) for a in (ids, reference["logits"])
    )
    segments = np.broadcast_to(1 + (np.arange(ids.shape[1]) >= cut), ids.shape).astype(np.int32)
    with use_mesh(fsdp=2, tp=2):
        model = hf.load(FOLDER / name)
        packed = outputs_of(model, rows, segments=segments)
        cached, whole = cached_and_whole(*nnx.split(model), ids, cut)
    assert_logits(packed, expected)
    assert relative_error(cached, whole) < 2e-6


ADAPTED = ["gemma4_26b", "stablelm", "gpt_neox", "gpt_oss", "deepseek_v2", "qwen3_5_moe", "lfm2"]
"""Models that differ in the projections that have adapters."""


@swept("name", ADAPTED)
def test_adapters_are_trained_and_kept_in_the_format_of_peft(name, tmp_path):
    ids, labels = (
        hf_reference.load(name)[key].astype(np.int32) for key in ("input_ids", "labels_masked")
    )
    family = family_of(read_attributes(FOLDER / name), name).model_type
    with use_mesh(fsdp=2, tp=2):
        model = hf.load(FOLDER / name)
        adapted = move_adapters(jaxtp.add_adapters(model, jaxtp.LoraConfig(rank=2)))
        graph, trained, others = nnx.split(adapted, nnx.LoRAParam, ...)

        @jax.jit
        @jax.value_and_grad
        def loss_of(trained, others):
            # Flax wants variables that were made within the transform that uses them.
            merged = nnx.merge(graph, trained, jax.tree.map(lambda array: array, others))
            return merged.loss(ids, labels)[0]

        loss, grads = loss_of(trained, others)
        without, _ = loss_of(jax.tree.map(lambda array: 0 * array, trained), others)
        assert all(np.abs(np.asarray(grad)).max() > 0 for grad in jax.tree.leaves(grads))
        hf.save_adapters(adapted, tmp_path / "adapters", family=family)
        again = hf.load_adapters(model, tmp_path / "adapters", family=family)
        read_back, _ = loss_of(nnx.state(again, nnx.LoRAParam), others)
    assert abs(loss - without) > 1e-3
    assert abs(read_back - loss) < 1e-4
    assert values(again, nnx.LoRAParam).keys() == values(adapted, nnx.LoRAParam).keys()


def test_both_spellings_of_a_configuration_are_the_same_model():
    """As transformers 5 and as older versions write it."""
    older = {name: reference_attributes(name, "config_v4.json") for name in NAMES}
    newer = {name: read_attributes(FOLDER / name) for name in NAMES}
    assert not [
        name for name in NAMES if model_config(newer[name], name) != model_config(older[name], name)
    ]


@pytest.mark.wide
def test_greedy_tokens():
    reference = hf_reference.load("llama_kv2")
    (prompt,) = reference["gen_prompt"]
    (expected,) = reference["gen_tokens"].tolist()
    model = hf.load(FOLDER / "llama_kv2")
    logits = lambda ids: outputs_of(model, ids[None])[0]
    length = len(prompt) + len(expected)
    assert [*greedy_ids(logits, prompt, len(expected), length, num_ids=None)] == expected


@swept("name", ["llama_gqa", "gemma3", "gpt2"])
def test_updates_of_adamw(name):
    reference = hf_reference.load(f"{name}_adamw")
    mesh = jaxtp.make_mesh(fsdp=2, tp=2)
    model, losses, norms = updated(
        FOLDER / name, mesh, reference["batches"], eps=float(reference.get("eps", 1e-8))
    )
    assert_allclose(losses, reference["losses64"], atol=1e-5, rtol=0)
    assert_allclose(norms, reference["grad_norms64"], rtol=5e-6)
    final = by_their_names(nnx.state(model), model.config, name)
    errors = hf_reference.sketched_errors(final, reference, "final")
    assert max(errors.values()) < 5e-5, errors


def test_a_sketch_has_the_norm_of_its_array():
    """Also of an error in one element, which a random projection could miss."""
    one = np.zeros((96, 192))
    one[5, 7] = 1e-3
    dense = default_rng(0).standard_normal((96, 192))
    for error in (one, dense):
        assert np.linalg.norm(hf_reference.sketch("a", error)) == pytest.approx(
            np.linalg.norm(error), rel=0.2
        )


SIXTEEN = [("float16", "auto", 0.004), ("float16", "blockwise", 0.004), ("bfloat16", "auto", 0.03)]


@swept("case", SIXTEEN)
def test_sixteen_bit_compute_stays_near(case):
    dtype, attention, bound = case
    reference = hf_reference.load("llama_gqa")
    precision = jaxtp.Precision(param=dtype, compute=dtype)
    with use_mesh(tp=2):
        model = hf.load(FOLDER / "llama_gqa", precision=precision, attention=attention)
        logits = outputs_of(model, reference["input_ids"].astype(np.int32))
    error = np.asarray(logits, np.float64) - reference["logits"]
    assert np.linalg.norm(error) < bound * np.linalg.norm(reference["logits"])
