"""What we export, read by transformers and peft, and what peft writes, read by us: the logits are the same."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER
from runs import SMALL, TEXT, mesh

import jaxtp
from jaxtp.hf.families import FAMILIES
from jaxtp.hf.peft import open_peft, with_peft
from jaxtp.layers.lora import TARGETS, LoraConfig
from jaxtp.models.config import adapter_targets
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train.__main__ import main as train

torch, transformers, peft = map(pytest.importorskip, ("torch", "transformers", "peft"))
pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]  # of libraries that are not ours
SOURCES = sorted(path.parent for path in FOLDER.glob("*/config.json"))
FUSED = {
    "phi3": TARGETS[3:4] + TARGETS[6:],
    "gpt2": ("o_proj", "up_proj", "down_proj"),
    "granitemoehybrid": TARGETS[:4] + TARGETS[6:],
}
"""Targets that are a tensor of their own in the file, where not all are."""
PLAIN = jaxtp.ModelConfig(vocab_size=256, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=24)
IDS = (np.arange(16).reshape(2, 8) * 5 % 37).astype(np.int32)
FULL = "model.layers.{}.self_attn.{}_proj"
KINDS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rslora of all": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
    "in some layers": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]},
    "by an expression": {"r": 2, "lora_alpha": 5, "target_modules": r".*\.1\.mlp\.(gate|up)_proj"},
    "but for one": {"r": 2, "target_modules": ["q_proj", "v_proj"], "exclude_modules": [FULL.format(0, "q")]},
    "dropped out": {"r": 2, "target_modules": ["k_proj"], "lora_dropout": 0.1, "init_lora_weights": "gaussian"},
}


def loaded(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[amiss] for amiss in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def theirs(folder, ids, adapters=None):
    """Logits of a folder in transformers, with adapters in peft."""
    model = loaded(folder)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapters))
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids.astype(np.int64)), use_cache=False).logits.numpy()


def ours(model, ids):
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))(state, ids))


def test_every_family_is_a_reference():
    assert {json.loads((source / "config.json").read_text())["model_type"] for source in SOURCES} == FAMILIES.keys()


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_what_we_export(source, tmp_path):
    """The model, and it with adapters: merged, and beside it in peft; experts in both layouts."""
    family = json.loads((source / "config.json").read_text())["model_type"]
    with np.load(source / "reference.npz") as reference:
        ids = reference["input_ids"].astype(np.int32)
    with jax.set_mesh(jaxtp.make_mesh(1, 2, 2)):
        model = jaxtp.load_hf(source)
        targets = FUSED.get(family, TARGETS)
        can = adapter_targets(jaxtp.ModelConfig(**{**vars(model.config), "lora": LoraConfig(targets=targets)}))
        adapted = jaxtp.add_adapters(model, LoraConfig(rank=2, rslora=True, targets=can))
        nnx.update(adapted, jax.tree.map(lambda array: array + 0.02, nnx.state(adapted, nnx.LoRAParam)))
        for layout in ("separate", "stacked") if model.config.most_experts else ("separate",):
            jaxtp.save_hf(model, tmp_path / layout, family=family, experts=layout)
            np.testing.assert_allclose(theirs(tmp_path / layout, ids), ours(model, ids), atol=1e-4)
        jaxtp.save_hf(jaxtp.merge_adapters(adapted), tmp_path / "merged", family=family)
        jaxtp.save_peft(adapted, tmp_path / "adapters", family=family)
        expected = ours(adapted, ids)
    np.testing.assert_allclose(theirs(tmp_path / "merged", ids), expected, atol=1e-4)
    np.testing.assert_allclose(theirs(tmp_path / "separate", ids, tmp_path / "adapters"), expected, atol=1e-4)


def by_peft(base, folder, **settings):
    """Adapters of peft's, of which B is random; returns the logits."""
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded(base), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(torch.from_numpy(IDS.astype(np.int64)), use_cache=False).logits.numpy()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers") / "base"
    jaxtp.save_hf(jaxtp.Decoder(PLAIN, rngs=nnx.Rngs(3)), folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_made(kind, base, tmp_path):
    """Read on a mesh, trained further, written back, and read by peft; merged by the command."""
    begun = by_peft(base, tmp_path / "theirs", **KINDS[kind])
    assert convert(["export", str(base), str(tmp_path / "merged"), "--adapters", str(tmp_path / "theirs")]) == 0
    np.testing.assert_allclose(theirs(tmp_path / "merged", IDS), begun, atol=1e-4)
    with jax.set_mesh(jaxtp.make_mesh(1, 2, 4)):
        model = jaxtp.load_hf(base)
        adapted = with_peft(model, open_peft(tmp_path / "theirs", model.config), jax.sharding.get_mesh())
        np.testing.assert_allclose(ours(adapted, IDS), begun, atol=1e-4)
    (tmp_path / "text.txt").write_text(TEXT)
    run, flags = str(tmp_path / "run"), SMALL[SMALL.index("--data.sequence-length") :]
    beginning = ["--model.from-hf", str(base), "--model.lora.from", str(tmp_path / "theirs"), *mesh(1, 2, 2)]
    steps = ["--train.steps", "2", "--optimizer.learning-rate", "0.01", "--optimizer.warmup-steps", "0"]
    data = ["--data.path", str(tmp_path / "text.txt")]
    code = train([*flags, *data, *beginning, *steps, "--eval.every", "0", "--run.dir", run])
    assert code == 0
    assert convert(["export", run, str(tmp_path / "ours")]) == 0
    trained = theirs(base, IDS, tmp_path / "ours")
    np.testing.assert_allclose(ours(jaxtp.load_run(run), IDS), trained, atol=1e-4)
    assert np.abs(trained - begun).max() > 1e-3
    config = json.loads((tmp_path / "ours/adapter_config.json").read_text())
    assert config["use_rslora"] == KINDS[kind].get("use_rslora", False)


@pytest.mark.parametrize(("name", "targets"), [("gpt2", ["c_attn", "c_proj"]), ("phi3", ["qkv_proj", "down_proj"])])
def test_what_peft_made_of_projections_in_one(name, targets, tmp_path):
    """Of such adapters we make a whole model: PEFT has one A for several projections, we have one for each."""
    begun = by_peft(FOLDER / name, tmp_path / "theirs", r=2, target_modules=targets)
    model = jaxtp.load_hf(FOLDER / name)
    found = open_peft(tmp_path / "theirs", model.config, name)
    assert "fuses several projections" in found.untrainable
    merged = jaxtp.merge_adapters(with_peft(model, found, None))
    np.testing.assert_allclose(ours(merged, IDS), begun, atol=1e-4)
