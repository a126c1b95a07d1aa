"""`jaxtp check`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

import jaxtp
from jaxtp import config as configuration
from jaxtp import entry
from jaxtp.check.config import SHOWN_FIRST, CheckConfig
from jaxtp.check.report import HEADER, Verdict
from jaxtp.check.run import dtypes, plan, verdicts
from jaxtp.check.shrink import describe
from jaxtp.command_line import Command
from jaxtp.files import require_writable, write_json
from jaxtp.mesh import request_virtual_devices
from jaxtp.train.config import NOT_OF_A_STEP, TrainConfig
from jaxtp.train.defaults import fit
from jaxtp.train.place import Place

PROGRAM = "jaxtp check"
DESCRIPTION = """Checks that any mesh gives the numbers of one device, for a training configuration.

The model is shrunk to something that runs on virtual CPU devices in a minute or two, with the same architecture and the
same parallel structure, and trained for three updates on one device and on each mesh. The losses, gradient norms, every
gradient and every updated array are compared, and the compiled step is audited: nothing replicated unasked, no
collective that no module declared. Exit code 1 if anything differs; the first module that does is named.

--config FILE reads the configuration of a training run (see configs/); dotted flags override it.
"""
COMMAND = Command(
    program=PROGRAM, schema=CheckConfig, description=DESCRIPTION, first=SHOWN_FIRST, without=NOT_OF_A_STEP
)
VIRTUAL = Place(devices=8, per_process=8, bfloat16=True, kind="devices")
"""Devices that a model is taken to be trained on, where the configuration does not say."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 1 if a mesh differs, 2 for a user's mistake."""
    return entry.attempt(PROGRAM, lambda: _check(argv))


def _check(argv: Sequence[str]) -> int:
    fitted = partial(fit, place=VIRTUAL)
    config, notes = COMMAND.load(argv, fitted)
    small, cases = plan(config)
    require_writable("--json", config.json)
    jax.config.update("jax_platforms", "cpu")
    request_virtual_devices(max(case.devices for case in cases))
    print(f"jaxtp   {jaxtp.__version__} with jax {jax.__version__}, virtual CPU devices")
    told = ("model",) if config.meshes else ("model", "mesh")
    print("".join(f"default {note}\n" for note in notes if note.startswith(told)), end="")
    print(f"shrunk  {', '.join(describe(config, small)) or 'nothing: it is small'}")
    print("        (rope_theta so that every dim turns; the weights are moved away from their initial values)")
    print(f"cases   {len(cases)} in {' and '.join(dtypes(small))}; errors relative to one device, of three updates\n")
    print(HEADER, flush=True)
    results: list[Verdict] = []
    for verdict in verdicts(small, cases):
        print("\n".join(verdict.lines()), flush=True)
        results.append(verdict)
    failed = sum(not verdict.passed for verdict in results)
    write_json("--json", config.json, _record(config, small, results))
    print(f"\n{f'{failed} of {len(results)} differ' if failed else f'all {len(results)} equal one device'}")
    return 1 if failed else 0


def _record(config: CheckConfig, small: TrainConfig, results: list[Verdict]) -> dict[str, Any]:
    return {
        "jaxtp": jaxtp.__version__,
        "jax": jax.__version__,
        "passed": all(verdict.passed for verdict in results),
        "config": configuration.to_plain(config),
        "shrunk": configuration.to_plain(small),
        "cases": [verdict.as_json() for verdict in results],
    }


if __name__ == "__main__":
    entry.run(PROGRAM, main)
