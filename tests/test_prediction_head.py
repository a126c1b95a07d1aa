"""A prediction head that an example trains for a frozen model, and its export: against plain
formulas, from the tensors of its file.
"""

import importlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_folders import random_model, read_tensors, reference_attributes, write_model
from runs import TEXT, records
from support import assert_refused, use_mesh

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.hf.config_json import model_config
from jaxtp.tools.convert.__main__ import main as convert

FOLDER = Path(__file__).parent.parent / "scripts" / "examples"
SIZES = {"vocab_size": 256, "num_hidden_layers": 2}
CASES = {
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v3": {},
}
OF_QWEN = {
    "model.layers.1.": "mtp.layers.0.",
    "model.norm.": "mtp.norm.",
    "fc": "mtp.fc.weight",
    "embedded": "mtp.pre_fc_norm_embedding.weight",
    "hidden": "mtp.pre_fc_norm_hidden.weight",
}
OF_DEEPSEEK = {
    "model.layers.1.": "model.layers.2.",
    "model.norm.": "model.layers.2.shared_head.norm.",
    "model.embed_tokens.": "model.layers.2.embed_tokens.",
    "lm_head.": "model.layers.2.shared_head.head.",
    "fc": "model.layers.2.eh_proj.weight",
    "embedded": "model.layers.2.enorm.weight",
    "hidden": "model.layers.2.hnorm.weight",
}
NAMES = {"qwen3_5": OF_QWEN, "deepseek_v3": OF_DEEPSEEK}
STEPS = 6


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("prediction_head")


def folder_with_head(folder, name):
    """Writes a small model, with a head of zeros; returns the shapes of the head's tensors."""
    attributes = reference_attributes(name) | SIZES | CASES[name]
    model = random_model(model_config(attributes, "it"))
    jaxtp.hf.save(model, folder, family=attributes["model_type"])
    stored = read_tensors(folder)
    names = NAMES[name]
    width = attributes["hidden_size"]
    shapes = {names["fc"]: (width, 2 * width)}
    shapes |= dict.fromkeys((names["embedded"], names["hidden"]), (width,))
    for tensor, array in stored.items():
        for begin, new in names.items():
            if begin.endswith(".") and tensor.startswith(begin):
                shapes[tensor.replace(begin, new)] = array.shape
    zeros = {tensor: np.zeros(shape, np.float32) for tensor, shape in shapes.items()}
    write_model(folder, attributes, stored | zeros)
    return shapes


def trained(example, base, folder, mesh, run):
    """Returns the values of the model after training, and writes the head."""
    example.main(base, folder, run.with_name("text.txt"), mesh=mesh, steps=STEPS, run=run)
    return records(run)


def rms(x, weight, attributes):
    mean = (x * x).mean(-1, keepdims=True)
    added = attributes["model_type"].startswith("qwen3")
    return x / np.sqrt(mean + attributes["rms_norm_eps"]) * (weight + added)


def reference_loss(folder, name, head, batch, tmp_path):
    """Returns the mean loss of a head on a batch: all but its block in plain NumPy.

    The block is the last one of a model of one layer with the head's tensors.
    """
    attributes = reference_attributes(name) | SIZES | CASES[name]
    names = NAMES[name]
    last_alone = {"layer_types": ["full_attention"], "first_k_dense_replace": 0}
    one = {key: last_alone.get(key, value) for key, value in attributes.items()}
    one["num_hidden_layers"] = 1
    block = {
        tensor.replace(names["model.layers.1."], "model.layers.0."): array
        for tensor, array in head.items()
        if tensor.startswith(names["model.layers.1."])
    }
    expected = read_tensors(folder)
    around = {tensor: array for tensor, array in expected.items() if "layers" not in tensor}
    around = {tensor: array for tensor, array in around.items() if "mtp" not in tensor}
    extra = ("norm.weight", "eh_proj", "embed_tokens", "shared_head")
    block = {
        tensor: array
        for tensor, array in block.items()
        if not tensor.removeprefix("model.layers.0.").startswith(("enorm", "hnorm", *extra))
    }
    write_model(tmp_path / "one", one, around | block)
    with use_mesh():
        model = jaxtp.hf.load(folder)
        last = next(jaxtp.hf.load(tmp_path / "one").in_order())
        hidden = np.asarray(nnx.jit(lambda model, ids: model.hidden(ids))(model, batch["inputs"]))
    table = expected["model.embed_tokens.weight"]
    next_ids = np.roll(batch["inputs"], -1, axis=1)
    next_ids[:, -1] = batch["labels"][:, -1]
    both = np.concatenate(
        [
            rms(table[next_ids], head[names["embedded"]], attributes),
            rms(hidden, head[names["hidden"]], attributes),
        ],
        axis=-1,
    )
    with use_mesh():
        x = jnp.asarray(both @ head[names["fc"]].T)
        x = np.asarray(nnx.jit(lambda block, x: block(x))(last, x))
    x = rms(x, head[f"{names['model.norm.']}weight"], attributes)
    logits = np.float64(x @ expected.get("lm_head.weight", table).T)[:, :-1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = batch["labels"][:, 1:]
    return -np.take_along_axis(logprobs, labels[..., None], axis=-1).mean()


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_a_head_is_trained_for_a_frozen_model_and_exported(name, example, tmp_path, capsys):
    folder = tmp_path / "model"
    shapes = folder_with_head(folder, name)
    (tmp_path / "text.txt").write_text(TEXT)
    base = tmp_path / "base"
    assert convert(["import", str(folder), str(base)]) == 0
    run = tmp_path / "run"
    losses = trained(example, base, folder, "fsdp=2,tp=2", run)
    one = trained(example, base, folder, "dp=1", tmp_path / "one_device")
    assert losses == pytest.approx(one, rel=1e-5)
    assert losses[STEPS] < losses[1]

    head = read_tensors(run.with_suffix(".safetensors"))
    assert {tensor: array.shape for tensor, array in head.items()} == shapes
    with use_mesh():
        model = jaxtp.load_run(run, build=example.builder(folder))
        before = named_variables(nnx.state(jaxtp.hf.load(folder)))
    after = named_variables(nnx.state(model))
    for path, variable in before.items():
        np.testing.assert_array_equal(after[path][...], variable[...], err_msg=path)

    ids = np.random.default_rng(0).integers(256, size=(2, 13)).astype(np.int32)
    batch = {"inputs": ids[:, :-1], "labels": ids[:, 1:]}
    expected = reference_loss(folder, name, head, batch, tmp_path)
    with use_mesh():
        total, count = nnx.jit(example.loss)(model, batch, None)
    assert total / count == pytest.approx(expected, rel=1e-5)

    capsys.readouterr()
    file = run.with_suffix(".safetensors")
    out = tmp_path / "out"
    assert convert(["export", str(base), str(out), "--heads", str(file)]) == 0
    assert "predict further tokens" not in capsys.readouterr().err
    exported = read_tensors(out)
    source = read_tensors(folder)
    assert exported.keys() == source.keys()
    for tensor, array in exported.items():
        np.testing.assert_array_equal(array, (source | head)[tensor], err_msg=tensor)
    write_model(tmp_path / "wrong", {}, {f"{next(iter(head))}s": np.zeros(2, np.float32)})
    wrong = ["--heads", str(tmp_path / "wrong/model.safetensors")]
    message = f"did you mean {next(iter(head))}?"
    assert_refused(convert, ["export", str(base), str(tmp_path / "no"), *wrong], message, capsys)
