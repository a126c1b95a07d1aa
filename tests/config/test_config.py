import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import assert_errors, raised_by, read_table, with_tuples

from jaxtp.config.schema import (
    ConfigError,
    from_yaml,
    leaves,
    merged,
    replace_nested,
    to_plain,
    to_short_yaml,
)
from jaxtp.mesh import mesh_shape
from jaxtp.models.config import ModelConfig, OriginConfig, violations
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.config import MeshConfig, TrainConfig
from jaxtp.train.run_report import describe_overlap
from jaxtp.train.validation import check, share_of, violations_on

CONFIGS = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.yaml"))
ONE = mesh_shape()


def test_every_recipe_loads_and_fits_its_mesh_and_begins_with_its_command():
    for path in CONFIGS:
        config = from_yaml(TrainConfig, path)
        check(config, to_plain(config)["mesh"])
        first = path.read_text().partition("\n")[0]
        assert first.startswith("# jaxtp "), path
        assert f"configs/{path.name}" in first, path


def test_the_file_of_a_run_of_before_is_read():
    """It has each setting of its version, also those that are gone, at their defaults."""
    before = from_yaml(TrainConfig, Path(__file__).parent / "golden" / "run_of_0.2.yaml")
    assert before.run.dir == Path("runs/old")
    assert before.model == ModelConfig(
        d_model=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, d_ff=96
    )


def test_tiny_is_the_default():
    assert from_yaml(TrainConfig, CONFIGS[0].parent / "tiny.yaml") == TrainConfig()


def test_a_summary_says_whether_rings_do_anything():
    nothing = "model.overlap=ring does nothing here: "
    for overlap, tp, said in (
        ("none", 4, None),
        ("ring", 4, "rings of tp 4: a part of a sequence moves while another part is multiplied"),
        ("ring", 1, f"{nothing}there is no tp"),
        ("ring", 3, f"{nothing}tp 3 does not divide sequences of 128, which tp leaves whole"),
    ):
        config = replace_nested(TrainConfig(), {"model.overlap": overlap})
        share = share_of(config, mesh_shape(tp=tp))
        assert describe_overlap(config.model, share) == said


def test_scientific_notation_without_a_point_is_a_number(tmp_path):
    # YAML 1.1 calls this a string
    (tmp_path / "c.yaml").write_text("optimizer: {learning_rate: 1e-3}")
    assert from_yaml(TrainConfig, tmp_path / "c.yaml").optimizer.learning_rate == 1e-3


def test_mistakes_in_a_file_are_errors_that_name_the_setting(tmp_path):
    path = tmp_path / "a.yaml"

    def error_of(row):
        path.write_text(row["file"])
        return raised_by(from_yaml, TrainConfig, path)

    assert_errors(read_table(__file__, "mistaken_files"), error_of)


def test_short_yaml_says_what_differs_and_reads_back_the_same(tmp_path):
    always = {"mesh.tp", "model.precision.compute"}
    for chosen in (
        {},
        {"data.mixture": {"a": 0.5}, "train.steps": 7},
        {"model.scan_layers": False},
    ):
        config = replace_nested(TrainConfig(), chosen)
        text = to_short_yaml(config, always)
        (tmp_path / "c.yaml").write_text(text)
        named = set(map(".".join, dict(leaves(yaml.safe_load(text)))))
        assert {*chosen, *always} - {"data.mixture"} <= named
        assert "optimizer.beta1" not in named
        assert from_yaml(TrainConfig, tmp_path / "c.yaml") == config


def test_all_problems_of_a_file_at_once(tmp_path):
    (tmp_path / "c.yaml").write_text("train: {steps: 0}\nmesh: {tpp: 2}\noptimizer: {beta1: 2}")
    with pytest.raises(ConfigError) as error:
        from_yaml(TrainConfig, tmp_path / "c.yaml")
    assert len(str(error.value).splitlines()) == 4


def test_steps_and_epochs_replace_each_other_in_the_section_train_alone():
    mixture = {"data": {"mixture": {"steps": 0.5, "epochs": 0.5}}}
    assert (
        merged({"train": {"steps": 7}} | mixture, {"train": {"epochs": 2}})
        == {"train": {"epochs": 2}} | mixture
    )
    assert merged({"train": {"steps": 7}}, {"train": {"epochs": None}}) == {
        "train": {"steps": 7, "epochs": None}
    }


def test_missing_file_suggests_its_neighbour(tmp_path):
    (tmp_path / "tiny.yaml").touch()
    with pytest.raises(ConfigError, match=r"did you mean .*tiny.yaml\?"):
        from_yaml(TrainConfig, tmp_path / "tinny.yaml")


def test_a_default_that_a_setting_does_not_fit_is_named():
    """Of the two, only num_heads was given."""
    model = replace(TrainConfig().model, num_heads=4)
    with pytest.raises(
        ConfigError, match=r"num_kv_heads=8, the default: set both; num_kv_heads can be 1, 2, 4$"
    ):
        check(TrainConfig(model=model), mesh_shape())


def test_violations_come_together_with_values_that_work():
    model = replace(TrainConfig().model, num_heads=12, num_kv_heads=5, d_model=100)
    with pytest.raises(ConfigError) as error:
        check(TrainConfig(model=model), mesh_shape(fsdp=3, tp=8))
    text = str(error.value)
    assert (
        "model.num_heads=12 is not divisible by model.num_kv_heads=5; num_kv_heads can be 1, 2, 3, "
        "4, 6, 12\n" in text
    )
    assert (
        "model.d_model=100 is not divisible by mesh.fsdp=3; fsdp can be 1, 2, or d_model 99 or 102"
        in text
    )
    assert "data.global_batch_size=16 is not divisible by mesh.fsdp=3; fsdp can be 1, 2" in text


SMOL = ModelConfig(vocab_size=512, d_model=576, num_heads=9, num_kv_heads=3, head_dim=64, d_ff=1536)
"""The sizes of SmolLM2-135M, whose heads no power of two divides."""


@pytest.mark.wide
@given(
    model=st.builds(
        ModelConfig,
        num_heads=st.integers(1, 32),
        num_kv_heads=st.integers(1, 32),
        d_ff=st.integers(1, 64),
        d_model=st.integers(1, 64),
        sequence_parallel=st.sampled_from([None, True]),
    ),
    mesh=st.fixed_dictionaries({axis: st.integers(1, 16) for axis in ONE}),
    batch=st.integers(1, 64),
    fixed=st.booleans(),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_following_one_hint_solves_its_problem_and_makes_no_other(model, mesh, batch, fixed):
    settings = {
        "data.global_batch_size": batch,
        "data.sequence_length": 24,
        "run.init_from": Path("a") if fixed else None,
    }
    config = replace_nested(TrainConfig(model=model), settings)
    before = problems_of(config, mesh)
    for line in violations_on(config, mesh, devices=16):
        for name, values in HINT.findall(line.partition("; ")[2]):
            for value in map(int, re.findall(r"\d+", values)):
                setting = SETTINGS[name]
                assert not (fixed and setting.startswith("model.")), (
                    "the sizes of a model that is there stay"
                )
                if name in mesh:
                    after = problems_of(config, mesh | {name: value})
                else:
                    after = problems_of(replace_nested(config, {setting: value}), mesh)
                assert after < before or not after, (
                    f"{line}: with {setting}={value} there is {after - before}"
                )


HINT = re.compile(r"(\w+)(?: can be)? (\d+(?:(?:, | or )\d+)*)")
SETTINGS = {
    **{axis: f"mesh.{axis}" for axis in ONE},
    **{name: f"model.{name}" for name in ("num_heads", "num_kv_heads", "d_ff", "d_model")},
    "accumulation": "train.accumulation",
    "global_batch_size": "data.global_batch_size",
    "sequence_length": "data.sequence_length",
}


def problems_of(config, mesh):
    """The problems without what is suggested; of the number of devices, whether there is one."""
    return {
        re.sub("^the mesh.*", "devices", line.partition("; ")[0])
        for line in violations_on(config, mesh, 16)
    }


def test_a_model_that_is_there_keeps_its_sizes():
    origin = OriginConfig(from_hf=Path("a"))
    strict = TrainConfig(origin=origin, model=SMOL, mesh=MeshConfig(allow_padding=False))
    heads, kv_heads = violations_on(strict, mesh_shape(fsdp=2, tp=4), devices=8)
    assert (
        heads
        == "mesh.tp=4 pads 9 query heads to 12, and mesh.allow_padding is false; tp can be 1, 3"
    )
    assert kv_heads.endswith("; tp can be 1, 3"), "of 8 devices, fsdp has 2"
    hints = violations(SMOL, mesh_shape(fsdp=5), fixed=True)
    assert [line.partition("; ")[2].split(",")[0] for line in hints] == ["fsdp can be 1"]
    assert "or d_model" not in "".join(violations(SMOL, mesh_shape(fsdp=10**22))), (
        "no such model can be"
    )
    assert "or d_model 575 or 580" in next(violations(SMOL, mesh_shape(fsdp=5)))


SINGLE_VIOLATIONS = [
    {"change": {"model.num_kv_heads": 3}, "says": "num_kv_heads can be 1, 2, 4, 8"},
    {
        "change": {"data.path": Path("a"), "data.mixture": {"b": 1.0}},
        "says": "data.path=a and data.mixture exclude each other",
    },
    {
        "change": {"model.overlap": "ring", "model.sequence_parallel": False},
        "says": "model.overlap=ring has no effect without model.sequence_parallel",
    },
    {
        "change": {"profile.start": 500},
        "says": "profile.start=500 is after the last step, train.steps=400",
    },
]


def test_single_violations_name_the_setting():
    error_of = lambda row: raised_by(check, replace_nested(TrainConfig(), row["change"]), ONE)
    assert_errors(SINGLE_VIOLATIONS, error_of)


def test_a_file_can_include_another(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/small.yaml").write_text("model: {d_model: 64, num_layers: 2}")
    (tmp_path / "run.yaml").write_text("base: common/small.yaml\nmodel: {num_layers: 3}")
    config = from_yaml(TrainConfig, tmp_path / "run.yaml")
    assert (config.model.d_model, config.model.num_layers) == (64, 3)


def test_the_printed_configuration_reads_back_the_same(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text('optimizer: {groups: {"head.*": {learning_rate_scale: 0.5}}}')
    words = [f"--config={tmp_path}/a.yaml", "--mesh.tp", "2", "--model.tie-embeddings"]
    with pytest.raises(SystemExit, match="0"):
        TRAIN.load([*words, "--print-config"])
    (tmp_path / "b.yaml").write_text(capsys.readouterr().out)
    config = from_yaml(TrainConfig, tmp_path / "b.yaml")
    loaded, _ = TRAIN.load(words)
    assert vars(config) == {name: getattr(loaded, name) for name in vars(config)}
    assert (config.mesh.tp, config.optimizer.groups["head.*"].learning_rate_scale) == (2, 0.5)


def test_a_setting_whose_switch_is_off_is_refused():
    for row in read_table(__file__, "switches"):
        *_, name = row["settings"]
        without = replace_nested(TrainConfig(), with_tuples(row["settings"]))
        with pytest.raises(ConfigError, match=rf"{name}=.* has no effect without"):
            check(without, ONE)
        check(replace_nested(without, with_tuples(row["switch"])), ONE)
