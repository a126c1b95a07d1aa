"""`jaxtp check`: passes on every configuration, and catches and names what is broken."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hf_reference import FOLDER, TRAINED
from jax.sharding import PartitionSpec as P
from runs import smol_lm

import jaxtp
from jaxtp.collectives import axis_size, leave_parallel, vary
from jaxtp.config.schema import from_yaml, replace_nested
from jaxtp.hf.config_json import model_config
from jaxtp.hf.model_folder import read_attributes
from jaxtp.layers import context, linear
from jaxtp.mesh import AXES, batch_parts, mesh_shape
from jaxtp.models import config as models
from jaxtp.tools.check import parity
from jaxtp.tools.check.__main__ import VIRTUAL, CheckConfig, Verdict, dtypes, main
from jaxtp.tools.check.parity import TOLERANCES
from jaxtp.tools.check.shrink import Case, cases_of, default_cases, plan, shrink
from jaxtp.train.config import MeshConfig
from jaxtp.train.defaults import resolve_defaults

ONE = MeshConfig(dp=1, fsdp=1, tp=1)
ROOT = Path(__file__).parent.parent.parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ONE_MESH = ("--config", str(ROOT / "configs/tiny.yaml"), "--mesh", "fsdp=2,tp=4", "--model.mlp-bias")
IN_FLOAT8 = "--model.precision.matmul float8 --model.precision.matmul-least 16"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.journey if path.stem == "tiny" else pytest.mark.slow) for path in CONFIGS],
    ids=lambda path: path.stem,
)
def test_every_config_passes_on_its_own_mesh(path, tmp_path, capsys):
    config = from_yaml(CheckConfig, path)
    file = tmp_path / "sub" / "check.json"
    own, split = (f"tp={config.mesh.tp}", {True, False}) if config.mesh.tp > 1 else ("fsdp=8", {False})
    # In 16 bits the few elements of a q norm's scale show rounding beyond the tolerance.
    compute = config.model.precision.compute if config.model.qk_norm == "none" else "float32"
    coarse = ["--model.precision.compute", compute] if compute != "float32" else []
    assert main(["--config", str(path), "--mesh", own, "--json", str(file), *coarse]) == 0
    record = json.loads(file.read_text())
    precisions = {"float32", compute, config.model.precision.matmul} - {"compute"}
    assert record["passed"]
    accumulated = 1 if config.train.loss is None else 2  # a loss that is named is also summed over micro-batches
    assert len(record["cases"]) == accumulated * len(split) * len(precisions)
    assert {case["dtype"] for case in record["cases"]} == precisions
    assert {case["sequence_parallel"] for case in record["cases"]} == split
    assert all(case["errors"]["gradient"] > 0 for case in record["cases"]), "something was compared"
    assert f"all {len(record['cases'])} equal one device" in capsys.readouterr().out


@pytest.mark.journey
def test_a_model_of_hugging_face_is_checked_with_its_own_sizes(tmp_path, capsys):
    file = tmp_path / "check.json"
    assert main(["--model.from-hf", str(FOLDER / "qwen3"), "--mesh", "tp=2", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["config"]["model"]["qk_norm"] == "head"
    assert record["config"]["model"]["vocab_size"] == model_config(read_attributes(FOLDER / "qwen3"), "it").vocab_size
    assert main(["--model.from-hf", str(tmp_path), "--mesh", "tp=2"]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_family_passes(name):
    quick = ("--data.sequence-length", "16", "--model.precision.compute", "float32")
    assert main(["--model.from-hf", str(FOLDER / name), "--mesh", "fsdp=2,tp=4", *quick]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "llama3_70b"])
def test_a_config_passes_on_all_default_meshes(name):
    assert main(["--config", str(ROOT / f"configs/{name}.yaml")]) == 0


@pytest.mark.wide
@pytest.mark.parametrize(
    ("flags", "dtypes", "cases"),
    [
        ("--model.precision.param bfloat16", "float32 and bfloat16", 4),
        ("--model.precision.reduce bfloat16", "float32 and bfloat16", 4),
        (f"--model.precision.compute bfloat16 {IN_FLOAT8}", "float32 and float8 and bfloat16", 6),
    ],
    ids=["param", "reduce", "compute and float8"],
)
def test_every_part_of_the_precision_is_checked(flags, dtypes, cases, capsys):
    assert main([*ONE_MESH, *flags.split(), "--model.num-layers", "2"]) == 0
    out = capsys.readouterr().out
    assert f"{dtypes};" in out
    assert f"all {cases} equal one device" in out


@pytest.mark.wide
def test_without_a_flag_numbers_are_compared_in_float32(tmp_path, capsys):
    config = tmp_path / "coarse.yaml"
    config.write_text("model:\n  num_layers: 1\n  precision: {param: bfloat16}\n")
    assert main(["--config", str(config), "--mesh", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert re.findall("default model.precision.*", out) == [
        "default model.precision=float32: --model.precision.compute bfloat16 also compares in bfloat16"
    ]
    assert "all 2 equal one device" in out


def run_broken(capsys, *flags):
    assert main([*ONE_MESH, *flags]) == 1
    return capsys.readouterr().out


def test_a_dropped_reduction_is_named(monkeypatch, capsys):
    monkeypatch.setattr(linear, "leave_parallel", lambda x, sequence: x)
    out = run_broken(capsys)
    assert "blocks.0.attention.out" in out
    assert "row_parallel_linear: out_specs declares its result equal along tp, but it differs" in out
    assert "a reduction (leave_parallel, all_reduce) is missing" in out


@pytest.mark.parametrize(
    ("matmul", "name", "layers"),
    [
        ("float8", "llama3_8b", "*.mlp.*|*.qkv"),
        ("mxfp8", "llama3_8b", "*.mlp.*|*.qkv"),
        ("mxfp8", "glm47_flash", "*.attention.*"),
        ("mxfp8", "qwen35_27b", "*.mlp.*|*.out"),
    ],
)
def test_the_small_model_has_the_same_layers_in_8_bits(matmul, name, layers):
    changes = {f"model.precision.matmul{part}": each for part, each in (("", matmul), ("_layers", layers))}
    config = from_yaml(CheckConfig, ROOT / f"configs/{name}.yaml")
    config = replace_nested(config, changes | {"model.precision.matmul_least": 512})
    small, cases = plan(config)
    assert models.matmul_layers(small.model) == models.matmul_layers(config.model)
    assert not [problem for case in cases for problem in models.violations(small.model, case.sizes)]


@pytest.mark.wide
def test_a_scale_of_one_devices_features_is_named(monkeypatch, capsys):
    """It only rounds otherwise, which no loss shows."""
    quantised = linear.tokens_in_float8
    monkeypatch.setattr(linear, "tokens_in_float8", lambda x, *axes: quantised(x))
    out = run_broken(capsys, *IN_FLOAT8.split(), "--model.num-layers", "1")
    assert out.count("first difference: blocks.0.attention.out: its output is off by") == 2
    assert "2 of 4 differ" in out, "in float32 products nothing differs"


@pytest.mark.wide
def test_a_doubled_bias_is_named(monkeypatch, capsys):
    def before_the_reduction(self, sequence, x, weights):
        y = x @ self.precision.load(weights["kernel"], 1)
        if self.bias is not None:
            y += vary(self.precision.load(weights["bias"], 0), jaxtp.TP)
        return leave_parallel(y, sequence)

    monkeypatch.setattr(linear.RowParallelLinear, "_project", before_the_reduction)
    out = run_broken(capsys)
    assert out.count("first difference: blocks.0.mlp.down: its output is off by") == 2
    assert "worst gradient blocks.mlp.down.bias" in out
    assert "2 of 2 differ" in out


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


@pytest.mark.wide
def test_a_gradient_counted_twice_is_named(monkeypatch, capsys):
    project = linear.ColumnParallelLinear.project

    def counted_twice(self, sequence, x, *weights):
        return project(self, sequence, doubled_gradient(x) if axis_size(jaxtp.TP) > 1 else x, *weights)

    monkeypatch.setattr(linear.ColumnParallelLinear, "project", counted_twice)
    assert "first difference: blocks.1.mlp.gate_up: its backward pass is off by 1.0e+00" in run_broken(capsys)


@pytest.fixture
def row_kernel_gradient_counted_twice(monkeypatch):
    project = linear.RowParallelLinear._project

    def counted_twice(self, sequence, x, weights):
        kernel = doubled_gradient(weights["kernel"]) if axis_size(jaxtp.TP) > 1 else weights["kernel"]
        return project(self, sequence, x, {**weights, "kernel": kernel})

    monkeypatch.setattr(linear.RowParallelLinear, "_project", counted_twice)


@pytest.mark.wide
@pytest.mark.usefixtures("row_kernel_gradient_counted_twice")
def test_a_weight_gradient_counted_twice_is_named(capsys):
    assert "kernel: its own gradient, while outputs and their gradients agree" in run_broken(capsys)


class Gathering(jaxtp.MLP):
    """An MLP that gathers its hidden features: right numbers, more communication."""

    def __call__(self, x, sequences=context.Sequences()):
        gate, up = self.gate_up(x)
        return self.down(jax.lax.with_sharding_constraint(jax.nn.silu(gate) * up, P()))


@pytest.mark.wide
@pytest.mark.usefixtures("row_kernel_gradient_counted_twice")
def test_shared_kv_heads_are_not_taken_for_a_difference(capsys):
    """Their outputs have other shapes on other meshes; dropout draws the same masks while the difference is sought."""
    out = run_broken(capsys, "--model.num-kv-heads", "2", "--model.dropout", "0.1", "--train.accumulation", "2")
    assert "kernel: its own gradient, while outputs and their gradients agree" in out


@pytest.mark.wide
def test_a_needless_gather_is_named(monkeypatch, capsys):
    monkeypatch.setattr(models, "MLP", Gathering)
    out = run_broken(capsys)
    assert "first difference" not in out, "the numbers are right"
    assert "test_command.py:" in out, "the line of the gather"
    assert "no module asked for it" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh fsdp=3", "model.d_model=128 is not divisible by mesh.fsdp=3; fsdp can be 1, 2, 4, 8"),
        ("--mesh pp=2", "'pp' is not an axis; they are dp, fsdp, cp, tp, as in fsdp=2,tp=4"),
        ("--mesh tp=0", "tp=0 is not a number of devices"),
        ("--mesh fsdp=-1,tp=2", "fsdp=-1 is not a number of devices"),
        ("--mesh tp=2,tp=4", "tp is given twice"),
        ("--mesh tp=1", "meshes are compared with one device; name a larger one"),
        ("--mesh tp=2 --json /proc/nothing/check.json", "--json /proc/nothing/check.json: No such file"),
        ("--mesh dp=8,fsdp=8", "is 64 devices, and a check runs on at most 16 virtual ones"),
        ("--mesh.tp 3 --mesh.no-allow-padding", "mesh.tp=3 pads 8 query heads to 9"),
        ("--mesh tp=3 --mesh.no-allow-padding", "--mesh tp=3:\n  mesh.tp=3 pads 8 query heads to 9"),
        ("--config nothing.yaml", "nothing.yaml: No such file"),
        ("--mesh cp=3", "--mesh cp=3:\n  model.d_model=128 is not divisible by mesh.cp=3; cp can be 1, 2, 4"),
        (
            "--mesh cp=2 --data.sequence-length 33",
            "--mesh cp=2:\n  data.sequence_length=33 is not divisible by mesh.cp=2",
        ),
        ("--mesh cp=4,tp=4 --mesh.context ulysses", "mesh.cp=4 does not divide the 2 query heads of a device"),
        ("--mesh cp=0", "cp=0 is not a number of devices"),
    ],
)
def test_mistakes(flags, message, capsys):
    assert main(flags.split()) == 2
    assert message in capsys.readouterr().err


def test_shrinking_keeps_what_divides_what():
    for path in CONFIGS:
        config = from_yaml(CheckConfig, path)
        small, cases = plan(config)
        assert (small.model.num_heads, small.model.num_kv_heads) == (config.model.num_heads, config.model.num_kv_heads)
        for case in cases:
            tp = case.sizes["tp"]
            assert (small.model.vocab_size % tp == 0) == (config.model.vocab_size % tp == 0)
            for chunks in (tp, case.sizes["cp"] * tp, 2 * case.sizes["cp"]):
                assert (small.data.sequence_length % chunks == 0) == (config.data.sequence_length % chunks == 0)
            assert small.data.global_batch_size % (batch_parts(case.sizes) * small.train.accumulation) == 0


def meshes_of(cases):
    return {tuple(case.sizes.values()) for case in cases}


def fitted(model, *meshes):
    """What a command with nothing but `--model.from-hf` and `--mesh` checks."""
    return plan(resolve_defaults(CheckConfig(model=jaxtp.ModelConfig(from_hf=model)), set(), VIRTUAL)[0], meshes)


def test_with_a_mesh_of_its_own_a_check_does_not_ask_for_that_of_the_configuration(tmp_path):
    model = jaxtp.ModelConfig(num_heads=9, num_kv_heads=3)
    small, cases = plan(CheckConfig(model=model), ("tp=3",))
    assert meshes_of(cases) == {(1, 1, 1, 3)}
    assert dtypes(small) == ["float32"]
    small, cases = fitted(smol_lm(tmp_path / "model"), "tp=3", "fsdp=2,tp=3")
    assert meshes_of(cases) == {(1, 1, 1, 3), (1, 2, 1, 3)}
    assert dtypes(small) == ["float32", "bfloat16"], "the model's own dtype too"
    adapted = jaxtp.ModelConfig(lora=jaxtp.LoraConfig(rank=2), precision=jaxtp.Precision(param="float16"))
    assert dtypes(plan(CheckConfig(model=adapted), ("tp=2",))[0]) == ["float32", "float16"]
    assert set(parity.TOLERANCES) == {"float32", "float16", "bfloat16", "float8", "mxfp8"}


def test_default_meshes_are_those_that_a_model_of_hugging_face_fits(tmp_path):
    _, cases = fitted(smol_lm(tmp_path / "model"))
    alone = {(1, 1, 1, 3), (1, 2, 1, 3), (2, 2, 1, 3), (2, 1, 1, 3), (1, 8, 1, 1), (8, 1, 1, 1)}
    assert alone | {(1, 1, 2, 3), (1, 1, 8, 1)} <= meshes_of(cases)
    _, cases = plan(CheckConfig(model=jaxtp.ModelConfig(num_heads=11, num_kv_heads=11, d_ff=88), mesh=ONE))
    alone = {(1, 1, 1, 11), (1, 8, 1, 1), (8, 1, 1, 1), (1, 1, 1, 2), (1, 1, 8, 1)}
    assert meshes_of(cases) == alone, "22 devices are too many for tp 11 beside cp"
    assert {case.context for case in cases} == {"auto", "gather"}, "8 does not divide 11 heads"


def test_default_meshes_cover_the_axes():
    cases = default_cases(CheckConfig(), mesh_shape(dp=4, fsdp=16, tp=8))
    assert cases[0] == Case(mesh_shape(fsdp=2, tp=8), True), "its own mesh first, scaled down"
    assert Case(mesh_shape(fsdp=2, tp=8), False) in cases
    for axis in AXES:
        assert any(case.sizes == mesh_shape(**{axis: 8}) for case in cases), "each axis alone"
    assert any(min(case.sizes.values()) == 2 for case in cases), "and all together"


def test_default_meshes_keep_cp_and_its_method():
    cases = default_cases(CheckConfig(), mesh_shape(dp=4, cp=4, tp=2))
    assert cases[0] == Case(mesh_shape(dp=2, cp=4, tp=2), True, "ulysses"), "its own, by the method that auto takes"
    assert cases[1] == Case(mesh_shape(dp=2, cp=4, tp=2), False, "ulysses")
    assert {case.context for case in cases if case.sizes["cp"] > 1} == {"ulysses", "gather"}
    few = replace_nested(CheckConfig(), {"model.num_kv_heads": 1})
    assert default_cases(few, mesh_shape(cp=2, tp=2))[0].context == "gather"
    asked = replace_nested(few, {"mesh.context": "ulysses"})
    assert {case.context for case in default_cases(asked, mesh_shape(cp=2, tp=2)) if case.sizes["cp"] > 1} == {
        "ulysses"
    }
    assert default_cases(CheckConfig(), mesh_shape(cp=64, tp=8))[0].sizes == mesh_shape(cp=2, tp=8)
    odd = replace_nested(CheckConfig(), {"data.sequence_length": 129})
    assert {case.sizes["cp"] for case in default_cases(odd, mesh_shape(tp=2))} == {1}, (
        "what cp does not divide is left out"
    )


def test_a_window_stays_as_long_beside_a_chunk():
    config = replace_nested(CheckConfig(), {"data.sequence_length": 4096, "mesh.dp": 1, "mesh.fsdp": 1})
    for window in (500, 1500, 3000):
        small, _ = plan(replace_nested(config, {"model.sliding_window": window}))
        assert small.model.sliding_window / small.data.sequence_length == pytest.approx(window / 4096, abs=0.04)


def test_a_verdict_shows_the_method():
    tolerance = TOLERANCES["float32"]
    verdict = Verdict(Case(mesh_shape(cp=2, tp=2), True, "gather"), "float32", tolerance, None, ("no reason",))
    assert "cp 2 x tp 2, sequence-parallel, gather" in verdict.lines()[0]
    assert verdict.record()["context"] == "gather"
    assert str(Case(mesh_shape(tp=2), False)) == "tp 2"


@pytest.mark.wide
def test_a_mesh_with_cp_passes_by_each_method(capsys, tmp_path):
    file = tmp_path / "check.json"
    flags = ["--config", str(ROOT / "configs/tiny.yaml"), "--mesh", "cp=2,tp=2", "--json", str(file)]
    assert main([*flags, "--model.num-kv-heads", "2"]) == 0
    assert "ok    cp 2 x tp 2, sequence-parallel, gather" in capsys.readouterr().out
    cases = json.loads(file.read_text())["cases"]
    assert [case["context"] for case in cases] == ["gather", "gather", "ulysses"]


@pytest.mark.wide
def test_keys_that_never_came_over_cp_are_named(monkeypatch, capsys):
    monkeypatch.setattr(context, "all_gather", lambda x, axis, dim: jnp.concatenate([x] * 2, axis=dim))
    over_cp = ("--config", str(ROOT / "configs/tiny.yaml"), "--mesh", "cp=2", "--mesh.context", "gather")
    assert main([*over_cp, "--model.num-layers", "1"]) == 1
    assert "first difference: blocks.0.attention" in capsys.readouterr().out


def test_a_mesh_of_sixteen_with_eight_kv_heads():
    config = CheckConfig(model=jaxtp.ModelConfig(num_heads=32, num_kv_heads=8, vocab_size=128256))
    (case, other) = cases_of(config, mesh_shape(tp=16))
    small = shrink(config, [case, other])
    assert small.model.head_dim * 8 % 16 == 0
