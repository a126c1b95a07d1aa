"""`jaxtp bench`."""

import contextlib
import io
from collections.abc import Sequence
from functools import partial

import jax

from jaxtp import entry
from jaxtp.bench.comm import measure
from jaxtp.bench.config import SHOWN_FIRST, CommConfig
from jaxtp.bench.measured import Measured
from jaxtp.bench.plot import draw
from jaxtp.command_line import Command, choose
from jaxtp.config import ConfigError
from jaxtp.files import require_picture, require_writable, write_json, write_picture, writing
from jaxtp.launch.environment import keep_programs
from jaxtp.launch.joining import join_processes
from jaxtp.launch.peers import leaving, watch
from jaxtp.mesh import mesh_of
from jaxtp.train.config import NOT_OF_ITS_COST, training_of
from jaxtp.train.defaults import fit

PROGRAM = "jaxtp bench"
DESCRIPTION = """Communication against computation, measured on the devices that are there.

Times all-reduce, all-gather, reduce-scatter and permute over message sizes on each axis of the mesh, the matrix
products of a transformer block, and a column and a row layer with and without their communication at each tp that the
devices allow. --config FILE reads the configuration of a training run (see configs/), whose mesh and sizes are taken;
dotted flags override it. --out writes what was measured as a hardware file for jaxtp estimate.

  jaxtp bench comm --config configs/llama3_8b.yaml --out h100.yaml
  jaxtp estimate --config configs/llama3_8b.yaml --hardware h100.yamlx8

Without GPUs the devices are virtual ones of the CPU: that tries the command, and says nothing about hardware. Of
several processes, started as those of jaxtp train, the first one prints and writes.
"""

COMMANDS = {
    "comm": Command(
        program=f"{PROGRAM} comm",
        schema=CommConfig,
        description=DESCRIPTION,
        first=SHOWN_FIRST,
        without=NOT_OF_ITS_COST,
    )
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    return leaving(lambda: entry.attempt(PROGRAM, lambda: _bench(argv)))


def _bench(argv: Sequence[str]) -> None:
    command, flags = choose(PROGRAM, COMMANDS, argv)
    join_processes()
    watch()
    asked, _ = command.load(flags, fit)
    config = training_of(asked)
    mesh = mesh_of(config.mesh.sizes)
    keep_programs(mesh.devices.flat[0].platform)
    if jax.process_index() == 0:
        _require_files(asked)
        _write(asked, measure(asked, config, mesh))
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            measure(asked, config, mesh)


def _write(asked: CommConfig, measured: Measured) -> None:
    write_json("--json", asked.json, measured.record())
    write_picture("--plot", asked.plot, partial(draw, measured))
    if asked.out is not None:
        with writing("--out", asked.out):
            asked.out.write_text(measured.hardware_file())
        print(f"\n{asked.out}: for jaxtp estimate --hardware {asked.out}x{measured.place.devices}")


def _require_files(asked: CommConfig) -> None:
    require_writable("--json", asked.json)
    require_writable("--out", asked.out)
    if asked.out is not None and asked.out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {asked.out}: a hardware file is YAML; name it {asked.out.with_suffix('.yaml')}")
    require_picture("--plot", asked.plot)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
