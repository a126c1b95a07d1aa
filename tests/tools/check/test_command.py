"""`jaxtp check`: passes on configurations, and catches and names what is broken."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hf_reference import FOLDER
from jax.sharding import PartitionSpec as P
from pages import checked_meshes
from runs import smol_lm
from support import assert_refused, journeys
from tables import read_table

import jaxtp
from jaxtp.collectives import axis_size
from jaxtp.config import console
from jaxtp.config.schema import from_yaml, replace_nested
from jaxtp.layers import context, linear, transport
from jaxtp.mesh import AXES, batch_parts, mesh_shape
from jaxtp.models import config as models
from jaxtp.models.config import OriginConfig
from jaxtp.tools.check.__main__ import VIRTUAL, CheckConfig, dtypes, main
from jaxtp.tools.check.shrink import Case, default_cases, plan
from jaxtp.train.config import MeshConfig
from jaxtp.train.defaults import decide

ROOT = Path(__file__).parents[3]
MESHES = checked_meshes()
CONFIGS = sorted({*MESHES, "tiny", "llama3_405b", "llama3_8b_tp16", "mixtral_8x7b"})
"""Those that pages check, and those whose sizes or dtypes are in no other one."""
TINY = ("--config", str(ROOT / "configs/tiny.yaml"))
OVER_TP = (*TINY, "--mesh", "tp=2", "--model.num-layers", "1")
WHOLE = ("--data.sequence-length", "33")
"""tp does not divide this length, so the sequence is whole on each device, and a mesh is one
case.
"""
IN_FLOAT8 = ("--model.precision.matmul", "float8", "--model.precision.matmul-least", "16")
IN_16_BITS = {"llama3_405b", "llama3_8b_float8", "mixtral_8x7b"}
"""Configurations that are also compared in the 16 bits that all of them compute in."""


def read(name):
    return from_yaml(CheckConfig, ROOT / f"configs/{name}.yaml")


def checked(tmp_path, *flags):
    """Returns the record of a check that passes."""
    file = tmp_path / "sub" / "check.json"
    assert main([*map(str, flags), "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", journeys(CONFIGS, "tiny", "finetune_llama31_8b"))
def test_a_configuration_passes_on_the_mesh_of_a_page(name, tmp_path, capsys):
    """A configuration that no page checks, on its own mesh of tp."""
    config = read(name)
    own_mesh = f"tp={config.mesh.tp}" if config.mesh.tp > 1 else "fsdp=8"
    mesh = MESHES.get(name, own_mesh)
    compute = config.model.precision.compute if name in IN_16_BITS else "float32"
    flags = ["--mesh", mesh]
    if name in IN_16_BITS:
        flags += ["--model.precision.compute", compute]
    record = checked(tmp_path, "--config", ROOT / f"configs/{name}.yaml", *flags)
    cases = record["cases"]
    precisions = {"float32", compute, config.model.precision.matmul} - {"compute"}
    split = {case["sequence_parallel"] for case in cases}
    assert split == ({True, False} if "tp" in mesh else {False})
    assert {case["dtype"] for case in cases} == precisions
    # A loss that is named is also summed over micro-batches.
    accumulated = 1 if config.train.loss is None else 2
    assert record["passed"]
    methods = {case["context"] for case in cases}
    assert len(cases) == accumulated * len(split) * len(methods) * len(precisions)
    for case in cases:
        assert max(case["errors"]["gradients"].values()) > 0, "something was compared"
    assert f"all {len(cases)} equal one device" in capsys.readouterr().out


@pytest.mark.journey
def test_a_model_of_hugging_face_is_checked_with_its_own_sizes(tmp_path, capsys):
    model = checked(tmp_path, "--model.from-hf", FOLDER / "qwen3", "--mesh", "tp=2")["config"][
        "model"
    ]
    own = jaxtp.hf.read_config(FOLDER / "qwen3")
    assert (model["qk_norm"], model["vocab_size"]) == ("head", own.vocab_size)
    assert_refused(
        main, ["--model.from-hf", str(tmp_path), "--mesh", "tp=2"], "config.json", capsys
    )


@pytest.mark.slow
def test_a_configuration_passes_on_all_default_meshes():
    assert main(["--config", str(ROOT / "configs/llama3_70b.yaml")]) == 0


def test_every_part_of_the_precision_is_checked():
    in_float8 = replace_nested(CheckConfig(), {"model.precision.matmul": "float8"})
    for part in ("param", "compute", "reduce"):
        config = replace_nested(in_float8, {f"model.precision.{part}": "bfloat16"})
        assert dtypes(config) == ["float32", "float8", "bfloat16"], part


@pytest.mark.wide
def test_without_a_flag_numbers_are_compared_in_float32(tmp_path, capsys):
    config = tmp_path / "coarse.yaml"
    config.write_text("model: {num_layers: 1, precision: {param: bfloat16}}")
    assert main(["--config", str(config), "--mesh", "tp=2", *WHOLE]) == 0
    out = capsys.readouterr().out
    (note,) = re.findall("default model.precision.*", out)
    assert "--model.precision.compute bfloat16" in note


def run_broken(capsys, *flags):
    assert main([*OVER_TP, *flags]) == 1
    return capsys.readouterr().out


@pytest.mark.heavy
def test_a_dropped_reduction_is_named(monkeypatch, capsys):
    monkeypatch.setattr(transport, "leave_parallel", lambda x, sequence: x)
    out = run_broken(capsys, *WHOLE, "--model.remat", "none")
    assert "blocks.0.attention.out" in out
    assert "row_parallel_linear" in out
    assert "a reduction (leave_parallel, all_reduce) is missing" in out


@pytest.mark.wide
def test_a_terminal_shows_how_many_cases_are_done(monkeypatch, capsys):
    monkeypatch.setattr(console, "is_terminal", lambda stream: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([*OVER_TP, *WHOLE]) == 0
    out = capsys.readouterr().out
    assert out.index("case 0/1") < out.index("ok    tp 2") < out.index("case 1/1")


@pytest.mark.wide
def test_a_scale_of_the_features_of_one_device_is_named(monkeypatch, capsys):
    """It only rounds otherwise, which no loss shows."""
    quantised = linear.tokens_in_float8
    monkeypatch.setattr(linear, "tokens_in_float8", lambda x, *axes: quantised(x))
    out = run_broken(capsys, *WHOLE, *IN_FLOAT8)
    assert "first difference: blocks.0.attention.out: its output is off by" in out
    assert "1 of 2 differ" in out, "in float32 products nothing differs"


def doubled_over_tp(x):
    """Returns the same numbers, whose gradient is counted twice on several devices."""
    return 2 * x - jax.lax.stop_gradient(x) if axis_size("tp") > 1 else x


@pytest.mark.wide
def test_a_gradient_counted_twice_is_named(monkeypatch, capsys):
    project = linear.ColumnParallelLinear.project

    def counted_twice(self, sequence, x, *weights):
        return project(self, sequence, doubled_over_tp(x), *weights)

    monkeypatch.setattr(linear.ColumnParallelLinear, "project", counted_twice)
    out = run_broken(capsys, *WHOLE)
    assert "first difference: blocks.0.mlp.gate_up: its backward pass is off by 1.0e+00" in out


@pytest.mark.wide
def test_a_gradient_of_a_weight_counted_twice_is_named(monkeypatch, capsys):
    """Where kv heads are shared, so that outputs have other shapes on other meshes, and with
    dropout.
    """
    with_specs = linear.params_and_specs

    def counted_twice(layer):
        weights, specs = with_specs(layer)
        if isinstance(layer, linear.RowParallelLinear):
            weights = {**weights, "kernel": doubled_over_tp(weights["kernel"])}
        return weights, specs

    monkeypatch.setattr(linear, "params_and_specs", counted_twice)
    flags = ("--model.num-kv-heads", "1", "--model.dropout", "0.1", "--train.accumulation", "2")
    out = run_broken(capsys, *WHOLE, *flags)
    assert "kernel: its own gradient, while outputs and their gradients agree" in out


class Gathering(jaxtp.MLP):
    """An MLP that gathers its hidden features: right numbers, more communication."""

    def __call__(self, x, sequences=context.Sequences()):
        gate, up = self.gate_up(x)
        return self.down(jax.lax.with_sharding_constraint(jax.nn.silu(gate) * up, P()))


@pytest.mark.wide
def test_a_needless_gather_is_named(monkeypatch, capsys):
    monkeypatch.setattr(models, "MLP", Gathering)
    out = run_broken(capsys, *WHOLE)
    assert "first difference" not in out, "the numbers are right"
    assert "test_command.py:" in out, "the line of the gather"
    assert "no module asked for it" in out


REFUSED = read_table(__file__)


@pytest.mark.parametrize("flags", REFUSED)
def test_a_mistake_is_refused(flags, capsys):
    assert_refused(main, flags.split(), REFUSED[flags], capsys)


def test_shrinking_keeps_what_divides_what():
    """Of the smallest and the oddest configurations."""
    for name in ("tiny", "gemma3_12b_32k", "llama3_8b_tp16", "lora_glm45_air", "qwen35_27b"):
        config = read(name)
        small, cases = plan(config)
        for case in cases:
            tp = case.sizes["tp"]
            cp = case.sizes["cp"]
            rows = batch_parts(case.sizes) * small.train.accumulation
            assert small.data.global_batch_size % rows == 0
            for parts in (tp, cp * tp, 2 * cp):
                assert (small.data.sequence_length % parts == 0) == (
                    config.data.sequence_length % parts == 0
                )
            assert (small.model.vocab_size % tp == 0) == (config.model.vocab_size % tp == 0)
        assert small.model.num_heads == config.model.num_heads
        assert small.model.num_kv_heads == config.model.num_kv_heads


def meshes_of(cases):
    return {tuple(case.sizes.values()) for case in cases}


def numbers(text):
    """Returns the meshes of a text, a digit for each axis."""
    return {tuple(map(int, mesh)) for mesh in text.split()}


def fitted(model, *meshes):
    """What a command with nothing but `--model.from-hf` and `--mesh` checks."""
    config = CheckConfig(origin=OriginConfig(from_hf=model))
    return plan(decide(config, set(), VIRTUAL).config, meshes)


def test_a_requested_mesh_replaces_that_of_the_configuration(tmp_path):
    model = jaxtp.ModelConfig(num_heads=9, num_kv_heads=3)
    small, cases = plan(CheckConfig(model=model), ("tp=3",))
    assert meshes_of(cases) == numbers("1113")
    assert dtypes(small) == ["float32"]
    small, cases = fitted(smol_lm(tmp_path / "model"), "tp=3", "fsdp=2,tp=3")
    assert meshes_of(cases) == numbers("1113 1213")
    assert dtypes(small) == ["float32", "bfloat16"], "the model's own dtype too"
    adapted = jaxtp.ModelConfig(
        lora=jaxtp.LoraConfig(rank=2), precision=jaxtp.Precision(param="float16")
    )
    small, _ = plan(CheckConfig(model=adapted), ("tp=2",))
    assert dtypes(small) == ["float32", "float16"]


def test_default_meshes_are_those_that_a_model_of_hugging_face_fits(tmp_path):
    _, cases = fitted(smol_lm(tmp_path / "model"))
    assert meshes_of(cases) >= numbers("1113 1213 2213 2113 1811 8111 1123 1181")
    model = jaxtp.ModelConfig(num_heads=11, num_kv_heads=11, d_ff=88)
    _, cases = plan(CheckConfig(model=model, mesh=MeshConfig(dp=1, fsdp=1, tp=1)))
    assert meshes_of(cases) >= numbers("1811 8111 1112 1118 1181"), "with padded heads"


def test_default_meshes_cover_the_axes():
    cases = default_cases(CheckConfig(), mesh_shape(dp=4, fsdp=16, tp=8))
    assert cases[0] == Case(mesh_shape(fsdp=2, tp=8), True), "its own mesh first, scaled down"
    assert Case(mesh_shape(fsdp=2, tp=8), False) in cases
    sizes = [case.sizes for case in cases]
    assert all(mesh_shape(**{axis: 8}) in sizes for axis in AXES), "each axis alone"
    assert any(min(each.values()) == 2 for each in sizes), "and all together"


def methods(cases):
    return {case.context for case in cases if case.sizes["cp"] > 1}


def test_default_meshes_keep_cp_and_its_method():
    def default(changes=(), **sizes):
        return default_cases(replace_nested(CheckConfig(), dict(changes)), mesh_shape(**sizes))

    cases = default(dp=4, cp=4, tp=2)
    own = mesh_shape(dp=2, cp=4, tp=2)
    assert cases[:2] == [Case(own, True, "ulysses"), Case(own, False, "ulysses")]
    assert methods(cases) == {"ulysses", "gather"}
    few = {"model.num_kv_heads": 1}
    assert default(few, cp=2, tp=2)[0].context == "gather"
    assert methods(default(few | {"mesh.context": "ulysses"}, cp=2, tp=2)) == {"ulysses"}
    assert default(cp=64, tp=8)[0].sizes == mesh_shape(cp=2, tp=8)
    odd = default({"data.sequence_length": 129}, tp=2)
    assert not methods(odd), "what cp does not divide is left out"


def test_a_window_stays_as_long_beside_a_chunk():
    changes = {"data.sequence_length": 4096, "mesh.dp": 1, "mesh.fsdp": 1}
    for window in (500, 1500, 3000):
        small, _ = plan(replace_nested(CheckConfig(), {**changes, "model.sliding_window": window}))
        share = small.model.sliding_window / small.data.sequence_length
        assert share == pytest.approx(window / 4096, abs=0.04)


@pytest.mark.wide
def test_a_mesh_with_cp_passes_by_each_method(capsys, tmp_path):
    flags = ["--mesh", "cp=2,tp=2", "--model.num-kv-heads", "2", "--model.num-layers", "1"]
    cases = checked(tmp_path, *TINY, *flags)["cases"]
    assert [case["context"] for case in cases] == ["gather", "gather", "ulysses"]
    assert "ok    cp 2 x tp 2, sequence-parallel, gather" in capsys.readouterr().out


@pytest.mark.wide
def test_keys_that_never_came_over_cp_are_named(monkeypatch, capsys):
    def own_keys_twice(x, axis, dim):
        return jnp.concatenate([x] * 2, axis=dim)

    monkeypatch.setattr(context, "all_gather", own_keys_twice)
    over_cp = ("--mesh", "cp=2", "--mesh.context", "gather", "--model.num-layers", "1")
    assert main([*TINY, *over_cp]) == 1
    assert "first difference: blocks.0.attention" in capsys.readouterr().out


def test_a_mesh_of_sixteen_devices_takes_eight_kv_heads():
    model = jaxtp.ModelConfig(num_heads=32, num_kv_heads=8, vocab_size=128256)
    small, _ = plan(CheckConfig(model=model), ["tp=16"])
    assert small.model.head_dim * 8 % 16 == 0
