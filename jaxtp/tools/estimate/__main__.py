"""`jaxtp estimate`."""

import math
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import jax
from pydantic import Field

from jaxtp.analysis.hardware import RANGES, TABLE, parse, require_matmul
from jaxtp.analysis.tables import Record, gigabytes
from jaxtp.config import entry
from jaxtp.config.affects import Argument, in_short_help
from jaxtp.config.command_line import Command
from jaxtp.config.console import columns_of, for_terminal, has_colour
from jaxtp.config.files import require_writable, write_json, writing
from jaxtp.config.schema import (
    ConfigError,
    Fraction,
    OptionalFile,
    Positive,
    UserPath,
    replace_nested,
    to_short_yaml,
)
from jaxtp.mesh import TP, MeshError, Sizes, mesh_shape, resolve_sizes
from jaxtp.tools.estimate.compiler import (
    DoesNotFitError,
    TargetError,
    compile_for,
    topology,
)
from jaxtp.tools.estimate.foreign import rank_meshes
from jaxtp.tools.estimate.remedies import faster, remedies
from jaxtp.tools.estimate.roofline import leaves_domain
from jaxtp.tools.estimate.search import (
    Model,
    Setting,
    Target,
    describe_model,
    estimate,
    meshes_to_try,
    parse_meshes,
    runnable,
    search,
    target,
)
from jaxtp.tools.estimate.summary import (
    explained,
    heading,
    ranking,
    record,
    setting_record,
    speed_range,
)
from jaxtp.train.config import IGNORED_BY_COST, TrainConfig, training_of
from jaxtp.train.defaults import RUN_DIR, Decider, DeviceInfo, default_settings
from jaxtp.train.parts import load_parts
from jaxtp.train.setup import plan_step
from jaxtp.train.validation import check_kernels

PROGRAM = "jaxtp estimate"
DESCRIPTION = """Will it fit, and what will it cost? The hardware need not be here.

Tries every mesh (dp, fsdp, cp, tp), micro-batch and remat policy of a training configuration on
hardware such as h100x8, and ranks those that fit. Times are modelled: on the one GPU that was
tried, a step took 1.4 times as long.

--hardware also takes a YAML file, whose keys --help-all lists. Exit code 1: nothing fits.
--train.loss works as for jaxtp train, without the data. So do --model.build, --data.batches and
--optimizer.build, for any Flax model; the estimate then tries meshes only.

  jaxtp estimate --config configs/llama3_8b.yaml --hardware mine.yamlx16 --mesh tp=8,fsdp=2
  jaxtp estimate --model.from-hf models/llama --hardware h100x8 --write runs/llama.yaml
"""

OF_ALL_STEPS = ("data.path", "data.long_documents", "data.batches", "train.epochs")
"""Settings that decide the number of steps, and so the cost of a run."""
SHOWN_FIRST = (
    *("hardware", "tier", "meshes", "as_configured", "price", "json", "write"),
    *(name for name in in_short_help(TrainConfig) if name not in OF_ALL_STEPS),
)
_KEYS = ", ".join(f"{key} ({unit})" for key, (_, _, unit) in RANGES.items())
HARDWARE = (
    "Kind and number of devices, as in h100x8, 2xh100x8 (two hosts) or mine.yamlx8 (a YAML file): "
    f"{', '.join(TABLE)}. A YAML file has like (a name; without it the first six keys are "
    f"required), platform (cuda, rocm, tpu), direct (true: links join each pair) and {_KEYS}."
)
WRITTEN = "# The best of jaxtp estimate for"


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(TrainConfig):
    """Command line of an estimate: a training configuration, and hardware."""

    hardware: Annotated[str, Field(description=HARDWARE), Argument("h100x8")] = "h100x8"
    """See `HARDWARE`."""

    meshes: Annotated[tuple[str, ...], Argument("tp=8 fsdp=2,tp=4", name="mesh")] = ()
    """Meshes to try, by default all that can run; an axis that is left out is 1."""

    memory_fraction: Fraction | None = None
    """Share of a GPU's memory that JAX takes: by default 0.75 as in JAX, and 0.9 on several hosts
    as in scripts/cluster/gpu.env. XLA_PYTHON_CLIENT_MEM_FRACTION is ignored."""

    json: OptionalFile = None
    """JSON file for all numbers."""

    tier: Literal[1, 3] = 1
    """Depth of the estimate: 1 computes it in seconds; 3 also compiles the best mesh for the
    hardware, NVIDIA GPUs that need not be present. 3 needs pip install 'jaxtp[estimate-gpu]'."""

    as_configured: bool = False
    """Keep remat and accumulation as configured, instead of the fastest."""

    price: Positive | None = None
    """Price of a device hour, in any currency, for the cost of all steps."""

    write: Annotated[UserPath | None, Argument("FILE.yaml")] = None
    """YAML file to write the best setting to, if one fits."""

    timeout: Positive = 300.0
    """Seconds that tier 3 waits for the compiler."""


COMMAND = Command(
    program=PROGRAM,
    schema=EstimateConfig,
    description=DESCRIPTION,
    short_help=SHOWN_FIRST,
    ignored=tuple(name for name in IGNORED_BY_COST if name not in OF_ALL_STEPS),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 1 if nothing fits or tier 3 disagrees, or 2 for a mistake."""
    return entry.attempt(PROGRAM, lambda: _estimate(argv))


def _estimate(argv: Sequence[str]) -> int:
    # With --write all settings of the run matter.
    writes = any(word.partition("=")[0] == "--write" for word in argv)
    command = replace(COMMAND, ignored=()) if writes else COMMAND
    options, notes = command.load(argv, _fit)
    jax.config.update("jax_platforms", "cpu")  # nothing is allocated, on a GPU least of all
    require_writable("--json", options.json)
    _check_overwrite(options)
    config = training_of(options)
    where = _target(options)
    if config.origin.build or config.data.batches or config.optimizer.build:
        _refuse_for_own_parts(options)
        meshes = parse_meshes(options.meshes, options.hardware, where.devices)
        fits, numbers = rank_meshes(where, meshes, plan_step(config))
        write_json("--json", options.json, numbers)
        return int(not fits)
    load_parts(config)  # refuses settings without effect
    if options.tier == 3:
        try:
            topology(where.hardware.compiled_as, **where.hosts)
        except TargetError as error:
            raise ConfigError(f"--tier 3: {error}") from None
    require_matmul(where.hardware, config.model.precision.matmul)
    check_kernels(config, mesh_shape(), where.hardware.architecture)
    model = describe_model(config)
    text = "\n".join([heading(config, where, model), *notes, ""])
    print(for_terminal(text, sys.stdout), flush=True)
    best, numbers = _search(options, config, where, model)
    fits, failure = _compile(options, best, numbers)
    write_json("--json", options.json, numbers)
    if options.write is not None and not fits:
        print(f"\n--write {options.write}: not written, because nothing fits")
    elif options.write is not None:
        with writing("--write", options.write):
            options.write.write_text(as_configuration(best, options))
        needs_model = options.model.lora.rank and options.origin.from_hf is None
        needed_flags = " --model.from-hf DIR" if needs_model else ""
        print(f"\n{options.write}: for jaxtp train --config {options.write}{needed_flags}")
    if failure is not None:
        return entry.fail(PROGRAM, failure)
    return int(not fits)


def _search(
    options: EstimateConfig, config: TrainConfig, where: Target, model: Model
) -> tuple[Setting, Record]:
    # Prints the ranking; returns the best setting, and numbers for --json.
    meshes: Sequence[Sizes] = parse_meshes(options.meshes, options.hardware, where.devices)
    meshes = meshes or meshes_to_try(config, where.devices, where.hardware)
    results = search(config, where, model, meshes, as_configured=options.as_configured)
    table = ranking(results, columns_of(sys.stdout), has_colour(sys.stdout))
    print(table, end="\n\n", flush=True)
    configured = None
    if not (options.as_configured or options.meshes):
        configured = _configured(config, where, model)
    best = results.settings[0]
    alternatives = faster(results) if best.fits else list(remedies(results))
    text = explained(results, configured, alternatives, options.price)
    print(for_terminal(text, sys.stdout), flush=True)
    numbers = record(results)
    numbers["configured"] = None if configured is None else setting_record(configured)
    numbers["alternatives"] = [
        {"change": other.change, **setting_record(other.setting)} for other in alternatives
    ]
    return best, numbers


def _fit(options: EstimateConfig, explicit: Set[str]) -> tuple[EstimateConfig, list[str]]:
    if options.train.epochs is not None and not (
        options.data.path or options.data.mixture or options.data.batches
    ):
        raise ConfigError(
            f"train.epochs={options.train.epochs:,.15g} needs a dataset to count its steps: add "
            "--data.path, or give --train.steps instead"
        )
    where = _target(options)
    hardware = where.hardware
    per_process = where.hosts["devices_per_host"]
    place = DeviceInfo(
        where.devices, per_process, True, hardware.name, where.room, hardware.architecture
    )
    config, notes = Decider(place)(options, explicit)
    unused = (RUN_DIR, "mesh") if options.meshes else RUN_DIR
    return config, [f"default {note}" for note in notes if not note.startswith(unused)]


def _refuse_for_own_parts(options: EstimateConfig) -> None:
    flags = ", ".join(
        f"--{name.replace('_', '-')}"
        for name in ("tier", "as_configured", "price", "write")
        if getattr(options, name) != getattr(EstimateConfig, name)
    )
    if flags:
        raise ConfigError(
            f"{flags}: not for a model, loss, batches or optimizer of your own, whose step is "
            "traced as it is configured; --mesh, --memory-fraction and --json work"
        )


def _target(options: EstimateConfig) -> Target:
    return target(*parse(options.hardware), options.memory_fraction, options.launch.allocator)


def _check_overwrite(options: EstimateConfig) -> None:
    require_writable("--write", options.write)
    if options.write is None:
        return
    if options.json is not None and options.json.absolute() == options.write.absolute():
        raise ConfigError(f"--write and --json are both {options.write}: name different files")
    if options.write.is_file():
        with options.write.open(errors="replace") as file:
            if not is_written(file.read(4096)):
                raise ConfigError(
                    f"--write {options.write}: it exists, and no earlier --write made it; name "
                    "another file"
                )


def is_written(text: str) -> bool:
    """Returns whether a file's first lines come from --write."""
    return any(line.startswith(WRITTEN) for line in text.splitlines()[:4])


def as_configuration(best: Setting, options: EstimateConfig) -> str:
    """Returns a setting as YAML for `train`.

    Comments have the command and the hardware.
    """
    where = best.target
    config = best.config
    if leaves_domain(where.hardware, best.sizes, (TP,)):
        config = replace_nested(config, {"mesh.tp_across_hosts": True})
    default = target(where.hardware, where.devices, allocator=config.launch.allocator).share
    variable = "" if where.share == default else f"XLA_PYTHON_CLIENT_MEM_FRACTION={where.share} "
    lines = [
        f"# {variable}jaxtp train --config {options.write}",
        "#",
        f"{WRITTEN} {options.hardware}: {gigabytes(best.memory.total)} GB on each device, of",
        f"# {gigabytes(where.room)} for JAX, and {speed_range(best)} tokens/s, modelled.",
    ]
    if where.devices > where.hardware.domain:
        lines.insert(
            0,
            "# Each host starts this, by a scheduler or jaxtp launch "
            "(jaxtp/guides/several_hosts.md):",
        )
    return "\n".join(lines) + f"\n\n{to_short_yaml(config, default_settings(config))}"


def _compile(
    options: EstimateConfig, best: Setting, numbers: Record
) -> tuple[bool, Exception | None]:
    """Adds tier 3 to the numbers.

    Returns whether the step fits, and an error of the compiler.
    """
    if options.tier == 1:
        return best.fits, None
    try:
        compiled = compile_for(
            best.config,
            best.sizes,
            best.target.hardware.compiled_as,
            **best.target.hosts,
            timeout_s=options.timeout,
        )
    except DoesNotFitError as error:
        numbers["tier_3"] = {"error": str(error), "fits": False}
        print("", error, sep="\n", flush=True)
        return False, None
    except TargetError as error:
        numbers["tier_3"] = {"error": str(error)}
        return best.fits, error
    numbers["tier_3"] = compiled.record(best)
    print("", *compiled.lines(best), sep="\n", flush=True)
    return best.fits and compiled.fits(best), None


def _configured(config: TrainConfig, where: Target, model: Model) -> Setting | None:
    try:
        sizes = resolve_sizes(config.mesh.sizes, where.devices)
    except MeshError:
        return None
    runs, _ = runnable(config, [sizes], as_configured=True)
    if math.prod(sizes.values()) != where.devices or not runs:
        return None
    return estimate(runs[0], where, model)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
