"""Outputs, gradients and three updates of a run on any mesh are those of one device."""

from dataclasses import replace

import deltas
from support import sizes_of, swept
from tables import read_table
from variants import small_model, variant

from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.train.config import TrainConfig

T = 16
TABLE = read_table(__file__)
RUN = variant(TrainConfig(model=small_model()), TABLE[".run"])
ROWS = {name: row for name, row in TABLE.items() if not name.startswith(".")}
# An audit compiles a program whose text is read, which cannot be kept for the next run.
AUDITED = {
    "blockwise",
    "mixture",
    "adapters of gpt-oss, parts of experts",
    "plain experts",
    "padded, parallel",
    "padded, gated delta",
}
REFERENCES = {}


def on_one_device(run):
    """Returns the initial arrays of a run, and what it computes; rows that differ in their mesh
    alone share them."""
    if repr(run) not in REFERENCES:
        initial = deltas.long_memory(parity.initial_arrays(run))
        REFERENCES[repr(run)] = initial, parity.run(run, ONE_DEVICE, initial)
    return REFERENCES[repr(run)]


@swept("name", ROWS)
def test_three_updates_on_a_mesh_are_those_of_one_device(name):
    settings = dict(ROWS[name])
    mesh = settings.pop("mesh")
    method = settings.pop("context", "auto")
    divides = mesh[-1] > 1 and T % (mesh[-1] * mesh[-2]) == 0
    split = settings.pop("split", divides)
    run = variant(RUN, settings)
    initial, expected = on_one_device(run)
    found = parity.run(run, Case(sizes_of(mesh), split, method), initial, audited=name in AUDITED)
    errors = parity.compare(found, expected)
    # A second moment is a square, with twice the gradient's relative error.
    updates = {
        path: error / 2 if ".nu." in path else error for path, error in errors.updates.items()
    }
    tolerance = parity.TOLERANCES[run.model.precision.compute]
    assert replace(errors, updates=updates).within(tolerance), errors
    assert found.problems == ()
    has_experts = "num_experts" in str(settings) and not run.model.lora.rank
    assert has_experts == any("mlp.router" in name for name in found.gradients)
