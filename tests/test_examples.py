"""Examples equal one device under their plans, and learn; a proposed plan sends no more."""

import functools
import importlib
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_parity import assert_same, train_alone, train_on
from moves import bytes_over_tp
from support import sweep

import jaxtp
from jaxtp.parallelize.module_wrappers import find_modules
from jaxtp.parallelize.plan import assign_styles

FOLDER = Path(__file__).parent.parent / "scripts" / "examples"
NAMES = ["vit", "mixer", "encoder_decoder", "recurrent"]


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def example(name):
    return importlib.import_module(name), importlib.import_module(f"{name}_plan").PLAN


def inputs_of(module, size=8):
    """Returns the model's inputs."""
    arrays = module.batch(np.random.default_rng(1), size)
    return arrays if module.__name__ == "encoder_decoder" else arrays[:1]


@functools.cache
def on_one_device(name):
    module, _ = example(name)
    return train_alone(builder(module), inputs_of(module))


def builder(module):
    """Returns a function that builds the example in float64; a cell's initial carry has `param_dtype`."""

    def build():
        model = module.build()
        for _, cell in nnx.iter_modules(model):
            if isinstance(cell, nnx.LSTMCell):
                cell.param_dtype = jnp.float64
        return model

    return build


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 1, 8), (1, 2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_on_a_mesh_equals_one_device(name, mesh):
    module, plan = example(name)
    assert_same(train_on(mesh, builder(module), plan, inputs_of(module)), on_one_device(name))


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_so_does_its_proposed_plan(name):
    module, _ = example(name)
    plan = jaxtp.propose_plan(module.build, *inputs_of(module), mesh={"fsdp": 2, "tp": 4}, report=None)
    assert_same(train_on((1, 2, 4), builder(module), plan, inputs_of(module)), on_one_device(name))


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_a_proposed_plan_moves_no_more_than_the_one_by_hand(name):
    """Also checks that the compiled step sends the predicted bytes."""
    (module, by_hand), mesh = example(name), jaxtp.make_mesh(fsdp=2, tp=4)
    batch = module.batch(np.random.default_rng(1), 8)
    proposed = jaxtp.propose_plan(module.build, *inputs_of(module), mesh=mesh, report=None)
    moved = bytes_over_tp(module.build, proposed, batch, mesh, module.loss)
    assert moved == proposed.bytes
    assert moved <= bytes_over_tp(module.build, by_hand, batch, mesh, module.loss)


@pytest.mark.parametrize("name", sweep(NAMES, "vit"))
def test_a_proposed_plan_is_megatron_s(name):
    """Equals the plan by hand, except for the vocabulary, which is too small, and the cell, which has no pairs."""
    module, by_hand = example(name)
    proposed = jaxtp.propose_plan(module.build, *inputs_of(module, 64), mesh={"tp": 4}, report=None)
    left = {"encoder_decoder": ("embedding", "head"), "recurrent": ("rnn",)}.get(name, ())
    expected = {path: style for path, style in expanded(module, by_hand).items() if not path.startswith(left or ("-",))}
    assert expanded(module, proposed) == expected


def expanded(module, plan):
    """Returns the plan with paths instead of patterns."""
    paths = [info.paths for info in find_modules(module.build())]
    styles = zip(paths, assign_styles(plan, paths), strict=True)
    return {path[0]: style for path, (_, style) in styles if style}


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns(name, capsys):
    steps = 30
    module, plan = example(name)
    importlib.import_module("train").main(
        module.build, module.loss, module.batch, plan, ["--mesh", "fsdp=2,tp=4", "--steps", str(steps)]
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == steps // 10
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.wide
def test_an_example_takes_the_proposed_plan(capsys):
    module, plan = example("mixer")
    main = importlib.import_module("train").main
    main(module.build, module.loss, module.batch, plan, ["--mesh", "tp=4", "--steps", "10", "--propose"])
    assert "plan for mesh dp 1 x fsdp 1 x cp 1 x tp 4" in capsys.readouterr().out


@pytest.mark.parametrize("mesh", ["tp=3", "tp=four", "tpp=4", "tp", "tp=0", "tp=-1,dp=-1"])
def test_a_mesh_that_does_not_fit_is_one_message(mesh, capsys):
    module, plan = example("vit")
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module("train").main(module.build, module.loss, module.batch, plan, ["--mesh", mesh])
    assert exit_.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_a_model_knows_nothing_of_this_package(name):
    source = (FOLDER / f"{name}.py").read_text()
    assert not re.search(r"^\s*(import|from) jaxtp", source, re.MULTILINE)
    assert f"python scripts/examples/{name}.py" in source


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "tp=x"], "tp=x is not a number of devices"),
        (["--mesh", "pp=2"], "'pp' is not an axis"),
        (["--mesh", "tp=2,tp=4"], "tp is given twice"),
        (["--steps", "0"], "--steps 0: should be 1 or more"),
        (["--steps", "-3"], "--steps -3: should be 1 or more"),
    ],
    ids=str,
)
def test_a_flag_that_cannot_be_is_one_error(flags, message, capsys):
    module, plan = example("vit")
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("train").main(module.build, module.loss, module.batch, plan, flags)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ["5", "[]", '{"step": 2, "loss": "high"}', '{"step": 2, "loss": [1]}', "[" * 100_000])
def test_a_plot_leaves_out_lines_that_are_no_records(line, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    huge = f'{{"step": 3, "loss": 1{"0" * 400}}}'
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 0.5}}\n{line}\n{huge}\n')
    out = tmp_path / "plot.png"
    assert importlib.import_module("plot_run").main([str(tmp_path), "--metrics", "loss", "--out", str(out)]) == 0
    assert out.is_file()
