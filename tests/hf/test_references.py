"""Every family against float64 references: logits, losses and gradients of every tensor, on
rotating meshes.
"""

import functools
import itertools

import hf_reference
import jax
import numpy as np
import pytest
from flax import nnx
from hf_folders import reference_attributes
from hf_reference import COPIED, FOLDER, GRAD_NORM, GRADIENT, LOGITS, LOSS, MADE, NEWER, model_types
from numpy.random import default_rng
from numpy.testing import assert_allclose
from support import cached_and_whole, outputs_of, relative_error, sizes_of, swept, use_mesh
from tables import read_table
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
TABLE = read_table(__file__)
MESHES = TABLE["meshes"]
ROTATED = [(name, *case) for name, case in zip(NAMES, itertools.cycle(MESHES), strict=False)]
HEADS = TABLE["heads"]
SPLIT = TABLE["split"]
CASES = ROTATED + [
    case
    for case in ((name, *split) for name, split in zip(HEADS, itertools.cycle(SPLIT), strict=False))
    if case not in ROTATED
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


@functools.cache
def with_gradients():
    """Returns the first model of each family, and those that differ in how they are split. The
    settings of the others have gradients in `tests/models`.
    """
    found = {}
    for name in NAMES:
        found.setdefault(family_of(read_attributes(FOLDER / name), name).model_type, name)
    return {*found.values(), *HEADS}


@swept("case", CASES)
def test_logits_losses_and_gradients(case):
    """Gradients once for each family and numbers of heads: they take two thirds of the time."""
    name, sizes, split = case
    has_gradients = name in with_gradients()
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

        if has_gradients:
            run = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
        else:
            run = jax.jit(lambda *given: (mean_loss(*given), None))
        (loss, logits), grads = run(state, shifted(reference["input_ids"]))
        (masked, _), masked_grads = run(state, shifted(reference["labels_masked"]))
    assert_logits(logits, reference["logits"])
    assert abs(loss - reference["loss64"]) < LOSS
    assert abs(masked - reference["loss_masked64"]) < LOSS
    if not has_gradients:
        return
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
    "falcon_h1",
    "nemotron_h_latent",
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


def test_both_spellings_of_a_configuration_are_the_same_model():
    """As transformers 5 and as older versions write it."""
    older = {name: reference_attributes(name, "config_v4.json") for name in NAMES}
    newer = {name: read_attributes(FOLDER / name) for name in NAMES}
    assert not [
        name for name in NAMES if model_config(newer[name], name) != model_config(older[name], name)
    ]


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


@swept("case", TABLE["sixteen bits"])
def test_sixteen_bit_compute_stays_near(case):
    dtype, attention, bound = case
    reference = hf_reference.load("llama_gqa")
    precision = jaxtp.Precision(param=dtype, compute=dtype)
    with use_mesh(tp=2):
        model = hf.load(FOLDER / "llama_gqa", precision=precision, attention=attention)
        logits = outputs_of(model, reference["input_ids"].astype(np.int32))
    error = np.asarray(logits, np.float64) - reference["logits"]
    assert np.linalg.norm(error) < bound * np.linalg.norm(reference["logits"])
