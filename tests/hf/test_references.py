"""Every family against float64 references: logits, losses, gradients of every tensor, greedy tokens, on every mesh."""

import itertools

import hf_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_reference import COPIED, EXPERTS, FOLDER, GRAD_NORM, GRADIENT, LOGITS, LOSS, MADE, NEWER, TRAINED, model_types
from support import cached_and_whole, relative_error, sizes_of, sweep
from updates import shifted, updated

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.hf.config_json import family_of, model_config
from jaxtp.hf.families import FAMILIES, REFUSED, WRAPPERS
from jaxtp.hf.model_folder import read_attributes
from jaxtp.hf.save import gather_tensors
from jaxtp.hf.tensor_map import group_by_tensor, tensor_parts

ONE = ((1, 1, 1), False)
MIXED = [((1, 2, 2), True), ((1, 1, 8), False)]
TP = [((1, 1, 2), True), *(((1, 1, tp), split) for tp in (4, 8) for split in (True, False))]
EACH = (ONE, TP[0], TP[1], TP[4])  # tp 1, 2, 4 and 8
CASES = [(name, *case) for name in COPIED for case in EACH] + [(name, *case) for name in MADE for case in MIXED]
CASES += [(name, *case) for name in [*TRAINED, *EXPERTS] for case in (ONE, *TP[:3])]
READ = {*FAMILIES, *WRAPPERS}
UNREAD = [name for name in NEWER if not model_types(name) <= READ]
"""Models of families that are refused."""
MESHES = [((1, 1, 2), True), ((1, 1, 3), True), ((1, 1, 4), False), ((1, 1, 8), True), ((1, 2, 2), True)]
MESHES += [((1, 1, 2, 1), None)]  # cp
CASES += [(name, *case) for name in NEWER for case in (ONE, *MESHES) if name not in UNREAD]
CASES += [("gpt_oss", (1, 1, 4, 1), None), ("gpt_oss", (1, 1, 2, 4), True)]
ROTATED = [(name, *case) for name, case in zip(NEWER, itertools.cycle(MESHES), strict=False) if name not in UNREAD]
NEWER = [name for name in NEWER if name not in UNREAD]
LATENT = ["deepseek_v2", "deepseek_v3_yarn", "mistral4"]
CASES += [(name, sizes, None) for name in LATENT for sizes in ((1, 1, 4, 1), (1, 1, 2, 4))]
ALIKE = ["deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "mistral3_mistral4"]
ALIKE += ["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_mm"]
ALIKE += ["cohere_qk_norm", "dots1_window", "ernie4_5_bias", "ernie4_5_moe_bias", "exaone4_full", "gemma4_12b"]
ALIKE += ["gemma4_31b", "gemma4_unified_mm", "glm4_moe_qk_norm", "gpt_neox_sequential", "gpt_oss_mxfp4", "granitemoe"]
ALIKE += ["mistral3_ministral3", "phi4_mini_long", "phi_qk_norm", "qwen2_moe_dense", "stablelm_12b"]
"""Like one of `LATENT`, like qwen3_next and qwen3_5_mm, or another form of a family that the others have."""
FIRST = [("qwen3", (1, 1, 4), True)]
"""Norms of heads, windows with soft caps; experts are in tests/tools/evaluate, biases and tied tables beside plain
mathematics in models. The newer models have their logits alone, each on one mesh."""


IN_MEMORY = {
    "embed_out.": "lm_head.",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.": "block_sparse_moe.router.",
}
"""Parts of names in files, and in transformers."""


def by_their_names(state, config, name):
    """Trained arrays of a state like the model's, as transformers has them in memory."""
    family = family_of(read_attributes(FOLDER / name), name)
    variables = {path: each for path, each in named_variables(state).items() if isinstance(each, nnx.Param)}
    tensors = group_by_tensor(tensor_parts(variables, config, family, "stacked"))
    names = [in_memory(theirs, family) for theirs in tensors]
    return dict(zip(names, gather_tensors(variables, tensors, "float32"), strict=True))


def in_memory(theirs, family):
    """The name in transformers of a tensor in a file."""
    if family.wrapper is not None and theirs.startswith(family.prefix):
        theirs = f"model.language_model.{theirs.removeprefix(family.prefix)}"
    for stored, loaded in IN_MEMORY.items():
        theirs = theirs.replace(stored, loaded)
    return theirs


@pytest.mark.parametrize("case", sweep(CASES, *FIRST), ids=str)
def test_logits_losses_and_gradients(case):
    name, sizes, split = case
    reference, mesh = hf_reference.load(name), jaxtp.make_mesh(**sizes_of(sizes))
    ids = reference["input_ids"].astype(np.int32)
    with jax.set_mesh(mesh):
        model = jaxtp.load_hf(FOLDER / name, sequence_parallel=split, loss_chunk=16)
        graph, state = nnx.split(model)

        def mean_loss(state, labels):
            merged = nnx.merge(graph, state)
            total, count = merged.loss(ids, labels)
            return total / count, merged(ids)

        run = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
        (loss, logits), grads = run(state, shifted(reference["input_ids"]))
        (masked, _), masked_grads = run(state, shifted(reference["labels_masked"]))
    assert np.abs(np.asarray(logits) - reference["logits"]).max() < LOGITS
    assert abs(loss - reference["loss64"]) < LOSS
    assert abs(masked - reference["loss_masked64"]) < LOSS
    grads, masked_grads = (by_their_names(g, model.config, name) for g in (grads, masked_grads))
    for found, norm in ((grads, "grad_norm64"), (masked_grads, "grad_norm_masked64")):
        total = np.sqrt(sum(np.sum(np.float64(grad) ** 2) for grad in found.values()))
        assert total == pytest.approx(float(reference[norm]), rel=hf_reference.ILL_CONDITIONED.get(name, GRAD_NORM))
    errors = hf_reference.sketched_errors(grads, reference, "grad")
    assert max(errors.values()) < GRADIENT, errors


@pytest.mark.parametrize("case", sweep(ROTATED, *(case for case in ROTATED if case[0] not in ALIKE)), ids=str)
def test_logits(case):
    name, sizes, split = case
    reference, mesh = hf_reference.load(name), jaxtp.make_mesh(**sizes_of(sizes))
    with jax.set_mesh(mesh):
        graph, state = nnx.split(jaxtp.load_hf(FOLDER / name, sequence_parallel=split))
        run = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))
        logits = run(state, reference["input_ids"].astype(np.int32))
    assert np.abs(np.asarray(logits) - reference["logits"]).max() < LOGITS


def test_every_reference_is_read():
    assert not [name for name in UNREAD if not model_types(name) & REFUSED.keys()]


@pytest.mark.wide
@pytest.mark.parametrize("name", NEWER)
def test_packed_is_alone(name):
    """The beginnings of two sequences in one row."""
    reference, cut = hf_reference.load(name), 10
    first, second = reference["input_ids"].astype(np.int32)
    rest, segments = len(first) - cut, (np.arange(len(first)) >= cut)[None] + 1
    with jax.set_mesh(jaxtp.make_mesh(tp=2)):
        graph, state = nnx.split(jaxtp.load_hf(FOLDER / name))
        run = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids, segments.astype(np.int32)))
        logits = run(state, np.concatenate([first[:cut], second[:rest]])[None])
    alone = np.concatenate([reference["logits"][0, :cut], reference["logits"][1, :rest]])
    assert np.abs(np.asarray(logits[0]) - alone).max() < LOGITS


@pytest.mark.wide
@pytest.mark.parametrize("name", NEWER)
def test_a_cache_is_the_whole(name):
    ids = hf_reference.load(name)["input_ids"].astype(np.int32)
    with jax.set_mesh(jaxtp.make_mesh(tp=4)):
        graph, state = nnx.split(jaxtp.load_hf(FOLDER / name))
        cached, whole = cached_and_whole(graph, state, ids, 11)
    assert relative_error(cached, whole) < 2e-6


@pytest.mark.wide
@pytest.mark.parametrize("name", NEWER)
def test_one_step_of_adapters(name, tmp_path):
    """It changes the adapters alone, and PEFT's format has them."""
    ids, labels = (hf_reference.load(name)[key].astype(np.int32) for key in ("input_ids", "labels_masked"))
    with jax.set_mesh(jaxtp.make_mesh(1, 2, 2)):
        model = jaxtp.load_hf(FOLDER / name)
        family = family_of(read_attributes(FOLDER / name), name)
        adapted = jaxtp.add_adapters(model, jaxtp.LoraConfig(rank=2))
        adapters = nnx.state(adapted, nnx.LoRAParam)
        nnx.update(adapted, jax.tree.map(lambda array: array + 0.02, adapters))
        before, (_, trained, _) = adapted(ids), nnx.split(adapted, nnx.Param, ...)
        grads = nnx.jit(nnx.grad(lambda model: model.loss(ids, labels)[0]))(adapted)
        assert all(np.abs(grad).max() > 0 for grad in jax.tree.leaves(grads))
        nnx.update(adapted, jax.tree.map(lambda array, grad: array - 0.01 * grad, trained, grads))
        jaxtp.save_peft(adapted, tmp_path / "adapters", family=family.model_type)
        again = jaxtp.load_peft(model, tmp_path / "adapters", family=family.model_type)
        after = adapted(ids)
    assert np.abs(np.asarray(after) - before).max() > 1e-3
    np.testing.assert_allclose(again(ids), after, atol=1e-4)


@pytest.mark.parametrize("name", COPIED + MADE + NEWER)
def test_both_spellings_are_the_same_model(name):
    newer, older = (model_config(read_attributes_of(name, file), file) for file in ("config.json", "config_v4.json"))
    assert newer == older


def read_attributes_of(name, file):
    return (
        read_attributes(FOLDER / name)
        if file == "config.json"
        else jaxtp.hf.model_folder.read_json(FOLDER / name, file)
    )


@pytest.mark.parametrize("name", sweep(COPIED + MADE + NEWER, MADE[0]))
def test_greedy_tokens(name):
    reference, mesh = hf_reference.load(name), jaxtp.make_mesh(tp=4)
    prompt, expected = reference["gen_prompt"], reference["gen_tokens"][0]
    ids = np.zeros((1, prompt.shape[1] + len(expected)), np.int32)
    ids[:, : prompt.shape[1]] = prompt
    with jax.set_mesh(mesh):
        graph, state = nnx.split(jaxtp.load_hf(FOLDER / name))
        best = jax.jit(lambda state, ids: jnp.argmax(nnx.merge(graph, state)(ids), axis=-1))
        for position in range(prompt.shape[1], ids.shape[1]):  # what follows is not seen
            ids[0, position] = best(state, ids)[0, position - 1]
    assert list(ids[0, prompt.shape[1] :]) == list(expected)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama_gqa", *TRAINED])
def test_updates_of_adamw(name):
    reference, mesh = hf_reference.load(f"{name}_adamw"), jaxtp.make_mesh(1, 2, 2)
    model, losses, norms = updated(FOLDER / name, mesh, reference["batches"], eps=float(reference.get("eps", 1e-8)))
    np.testing.assert_allclose(losses, reference["losses64"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(norms, reference["grad_norms64"], rtol=5e-6)
    final = by_their_names(nnx.state(model), model.config, name)
    errors = hf_reference.sketched_errors(final, reference, "final")
    assert max(errors.values()) < 5e-5, errors


def test_a_sketch_has_the_norm_of_what_it_is_of():
    """Also of an error in one element, which a random projection could miss."""
    one = np.zeros((96, 192))
    one[5, 7] = 1e-3
    dense = np.random.default_rng(0).standard_normal((96, 192))
    for error in (one, dense):
        assert np.linalg.norm(hf_reference.sketch("a", error)) == pytest.approx(np.linalg.norm(error), rel=0.2)


SIXTEEN = [("float16", "auto", 0.004), ("float16", "blockwise", 0.004), ("bfloat16", "auto", 0.03)]


@pytest.mark.wide
@pytest.mark.parametrize("case", SIXTEEN, ids=str)
def test_sixteen_bit_compute_stays_near(case):
    dtype, attention, bound = case
    reference, precision = hf_reference.load("llama_gqa"), jaxtp.Precision(param=dtype, compute=dtype)
    with jax.set_mesh(jaxtp.make_mesh(tp=2)):
        model = jaxtp.load_hf(FOLDER / "llama_gqa", precision=precision, attention=attention)
        logits = model(reference["input_ids"].astype(np.int32))
    error = np.asarray(logits, np.float64) - reference["logits"]
    assert np.linalg.norm(error) < bound * np.linalg.norm(reference["logits"])
