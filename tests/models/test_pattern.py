"""Models whose blocks differ: first ones, a pattern that repeats, and a rest that it does not
divide."""

from dataclasses import replace
from itertools import groupby

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose
from support import decoder, random_weights, without_mesh
from tables import read_table, with_tuples
from variants import small_model

from jaxtp.config.schema import ConfigError, from_yaml, to_plain, to_yaml
from jaxtp.mesh import mesh_shape
from jaxtp.models.config import repeated_patterns, validate_model
from jaxtp.train.__main__ import main
from jaxtp.train.config import TrainConfig
from jaxtp.train.resume import check_resumable
from jaxtp.train.run_folder import RunFolderError, checkpoint_info

TABLES = read_table(__file__)

B = 8
T = 8
PLAIN = small_model(vocab_size=32, num_layers=6, loss_chunk=8)
MODEL = replace(
    PLAIN,
    first_blocks=({"rope_theta": 50.0},),
    pattern=({"sliding_window": 3}, {"rope_theta": 100.0}),
)
IDS = default_rng(0).integers(0, PLAIN.vocab_size, (B, T), np.int32)


def loss_of(config, weights, dropout_keys):
    """Returns the loss without a mesh."""
    graph, state = without_mesh(decoder(config), weights)
    loss = lambda state: nnx.merge(graph, state).loss(IDS, IDS, dropout_keys=dropout_keys)[0]
    return jax.jit(loss)(state)


@pytest.mark.wide
def test_scan_pattern_and_unrolling_draw_the_same_dropout():
    """A window of all positions makes another kind of block of the same mathematics."""
    alike = replace(PLAIN, num_layers=4, dropout=0.4)
    in_turn = replace(alike, pattern=({"sliding_window": T}, {}))
    weights = random_weights(decoder(alike))
    blocks = {
        name.removeprefix("blocks."): array
        for name, array in weights.items()
        if name.startswith("blocks.")
    }
    turned = {name: array for name, array in weights.items() if not name.startswith("blocks.")}
    turned |= {f"blocks.{i}.{name}": array[i::2] for name, array in blocks.items() for i in (0, 1)}
    keys = jax.random.split(jax.random.key(1), B)
    expected = loss_of(alike, weights, keys)
    for config in (in_turn, replace(in_turn, scan_layers=False)):
        assert_allclose(loss_of(config, turned, keys), expected, rtol=1e-6)


def test_equal_blocks_are_one_stack_whatever_describes_them():
    for described in TABLES["equal"]:
        (stack,) = replace(PLAIN, **with_tuples(described)).stacks()
        assert stack == PLAIN.stacks()[0]


@given(st.text("abc", max_size=30))
def test_patterns_of_a_list_are_that_list_in_at_most_as_many_kinds_as_runs(text):
    patterns = repeated_patterns(text)
    assert "".join(pattern * repeats for pattern, repeats in patterns) == text
    assert sum(len(pattern) for pattern, _ in patterns) <= len(list(groupby(text)))


def test_first_blocks_that_repeat_are_a_stack():
    """Nemotron 3 Nano has 52 blocks, of which 14 are compiled."""
    changes = {"M": {}, "E": {"d_ff": 16}, "*": {"sliding_window": 3}}
    letters = "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME"
    blocks = tuple(changes[letter] for letter in letters)
    listed = replace(PLAIN, num_layers=len(blocks), first_blocks=blocks)
    first, *_ = listed.stacks()
    repeated = replace(PLAIN, num_layers=35, pattern=blocks[:7])
    assert (first,) == repeated.stacks()
    assert sum(len(stack.pattern) for stack in listed.stacks()) == 14
    assert list(listed.layers())[35:] == list(
        replace(PLAIN, num_layers=17, first_blocks=blocks[35:]).layers()
    )


def test_it_is_written_as_mappings_and_read_back(tmp_path):
    run = TrainConfig(model=replace(MODEL, pattern=({"rope_scaling": {"kind": "yarn"}}, {})))
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(run))
    assert "  pattern:\n  - rope_scaling:\n      kind: yarn\n  - {}\n" in file.read_text()
    assert from_yaml(TrainConfig, file) == run


@pytest.mark.parametrize(
    ("model", "message"),
    TABLES["refused"],
)
def test_a_pattern_that_cannot_be_is_one_error(model, message, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {model}" if model.startswith("{") else f"model: {{{model}}}")
    assert main([f"--config={file}", f"--run.dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 3
    assert not (tmp_path / "run").exists()


def test_problems_of_many_kinds_of_blocks_are_told_of_the_first_few():
    many = replace(
        PLAIN, num_layers=100, pattern=tuple({"num_heads": 2 * n + 1} for n in range(100))
    )
    with pytest.raises(ConfigError) as caught:
        validate_model(many, mesh_shape())
    assert 2 <= len(str(caught.value).splitlines()) <= 10


@pytest.mark.parametrize(
    "pattern", [3, (3,), "local", ({"sliding_window": {}},), ({3: 4},)], ids=str
)
def test_in_python_too(pattern):
    with pytest.raises(ConfigError, match="pattern"):
        validate_model(replace(PLAIN, pattern=pattern), mesh_shape())


def test_a_run_of_the_first_version_goes_on_without_a_word():
    """Its blocks are of one kind, and keep their paths; what it does not know had no effect on
    it."""
    paths = nnx.to_flat_state(nnx.state(nnx.eval_shape(decoder(PLAIN)))).paths
    assert {path[1] for path in paths if path[0] == "blocks"} == {
        "attention_norm",
        "attention",
        "mlp_norm",
        "mlp",
    }
    run = TrainConfig(model=PLAIN)
    info = checkpoint_info(to_plain(run), {}, 0, mesh_shape())
    for name in ("first_blocks", "pattern", "activation", "norm", "norm_placement", "query_scale"):
        del info["config"]["model"][name]
    assert check_resumable(to_plain(run), {}, info) == []
    other = TrainConfig(model=replace(PLAIN, activation="gelu"))
    with pytest.raises(RunFolderError, match=r"model\.activation: silu -> gelu"):
        check_resumable(to_plain(other), {}, info)
