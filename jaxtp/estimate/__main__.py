"""`jaxtp estimate`."""

import math
import textwrap
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxtp import config as configuration
from jaxtp import entry
from jaxtp.command_line import Command
from jaxtp.config import ConfigError
from jaxtp.estimate.alternatives import faster, remedies
from jaxtp.estimate.compiled import partitioned_lines, partitioned_record, target_lines, target_record
from jaxtp.estimate.config import SHOWN_FIRST, EstimateConfig
from jaxtp.estimate.generation import generations, records, table
from jaxtp.estimate.partitioned import compile_partitioned, request_devices
from jaxtp.estimate.plot import draw
from jaxtp.estimate.reasons import device_hours, what_would_fit, why
from jaxtp.estimate.record import as_configuration, is_written, record
from jaxtp.estimate.report import details, heading, ranking
from jaxtp.estimate.search import (
    Model,
    Search,
    Setting,
    Target,
    describe_model,
    estimate,
    meshes_to_try,
    search,
    target,
)
from jaxtp.estimate.target import compile_for
from jaxtp.estimate.topology import DoesNotFitError, TargetError, topology
from jaxtp.files import require_picture, require_writable, write_json, write_picture, writing
from jaxtp.hardware import RANGES
from jaxtp.hardware_file import MAX_DEVICES, parse
from jaxtp.mesh import MeshError, describe_mesh, fill, parse_mesh, sized
from jaxtp.train.config import NOT_OF_ITS_COST, TrainConfig, check_kernels, training_of, violations_on
from jaxtp.train.defaults import RUN_DIR, fit
from jaxtp.train.place import Place

WIDTH = 110
PROGRAM = "jaxtp estimate"
DESCRIPTION = """Will it fit, and what will it cost: answered before the hardware is there.

For a training configuration and hardware such as h100x8, every mesh (dp, fsdp, cp, tp), micro-batch and remat policy is
tried on paper: bytes on each device by kind, collectives by mesh axis, seconds of a step by part. What cannot run or
does not fit is dropped, the rest is ranked, and the best is explained. Each number says where it comes from: exact (the
program's own declarations, and formulas that tests hold equal to it), compiled (what a compiler made of the step),
modelled (a model of the hardware, wrong by tens of percent).

--config FILE reads the configuration of a training run (see configs/); dotted flags override it. Nothing is allocated,
and no accelerator is needed. Hardware of your own is a YAML file: like (a name of the table; without it the first six
of these are needed), platform (cuda, rocm, tpu), direct (true: links join each pair), and any of
KEYS. Exit code 1 if nothing fits, or if tier 3 says that the best does not.

  jaxtp estimate --config configs/llama3_8b.yaml --hardware h100x8
  jaxtp estimate --config configs/llama3_8b.yaml --hardware mine.yamlx16 --mesh tp=8,fsdp=2 --tier 2
  jaxtp estimate --model.from-hf models/llama --hardware h100x8 --write runs/llama.yaml
""".replace("KEYS", ", ".join(f"{key} ({unit})" for key, (_, _, unit) in RANGES.items()))

COMMAND = Command(
    program=PROGRAM, schema=EstimateConfig, description=DESCRIPTION, first=SHOWN_FIRST, without=NOT_OF_ITS_COST
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 1 if nothing fits or tier 3 says so, 2 for a user's mistake."""
    return entry.attempt(PROGRAM, lambda: _estimate(argv))


def _fit(asked: EstimateConfig, given: Set[str]) -> tuple[EstimateConfig, list[str]]:
    """Returns the configuration as a run on that hardware would have it, and the defaults that it chooses."""
    hardware, count = parse(asked.hardware)
    place = Place(count, min(count, hardware.domain), bfloat16=True, kind=hardware.name)
    config, notes = fit(asked, given, place)
    return config, [f"default {note}" for note in notes if not note.startswith(RUN_DIR)]


def _estimate(argv: Sequence[str]) -> int:
    written = any(word.partition("=")[0] == "--write" for word in argv)  # then all settings of the run matter
    command = replace(COMMAND, without=()) if written else COMMAND
    asked, chosen = command.load(argv, _fit)
    jax.config.update("jax_platforms", "cpu")  # nothing is allocated, on a GPU least of all
    require_writable("--json", asked.json)
    require_writable("--write", asked.write)
    _keep_others(asked)
    require_picture("--plot", asked.plot)
    config = training_of(asked)
    where = target(*parse(asked.hardware), asked.memory_fraction)
    _require_compiler(asked, where)
    check_kernels(config, sized(), where.hardware.platform)
    meshes = _meshes(asked, config, where)
    model = describe_model(config)
    print(heading(config, where, model), *chosen, sep="\n", end="\n\n", flush=True)
    found = search(config, where, model, meshes, as_configured=asked.as_configured)
    numbers = _tell(asked, config, where, model, found)
    title = f"{model.parameters / 1e9:,.1f} billion parameters on {asked.hardware}"
    write_picture("--plot", asked.plot, partial(draw, found, title))
    if asked.generate:
        length = config.data.sequence_length
        generating = generations(config.model, where, model, meshes, asked.generate, length)
        print("", table(generating, length), sep="\n", flush=True)
        numbers["generation"] = records(generating)
    failed = _compile(asked, found.settings[0], numbers) if asked.tier > 1 else None
    fits = bool(found.fitting) and numbers.get("tier_3", {}).get("fits", True)
    write_json("--json", asked.json, numbers)
    if asked.write is not None:
        _write(asked, asked.write, found.settings[0] if fits else None)
    if failed is not None:
        return entry.fail(PROGRAM, failed)
    return 0 if fits else 1


def _keep_others(asked: EstimateConfig) -> None:
    """Checks that --write replaces no file but one that it wrote.

    Raises:
      ConfigError: it would.
    """
    file = asked.write
    if file is None:
        return
    if asked.json is not None and asked.json.absolute() == file.absolute():
        raise ConfigError(f"--write and --json are both {file}: name two files")
    if file.is_file():
        with file.open("rb") as opened:
            if not is_written(opened.read(4096).decode(errors="replace")):
                raise ConfigError(
                    f"--write {file}: it is there already, and no earlier --write made it; name another file"
                )


def _write(asked: EstimateConfig, file: Path, best: Setting | None) -> None:
    """Writes the best setting as a configuration, if one fits, and says so."""
    if best is None:
        print(f"\n--write {file}: not written, because nothing fits")
        return
    with writing("--write", file):
        file.write_text(as_configuration(best, file, asked))
    needed = " --model.from-hf DIR" if asked.model.lora.rank and asked.model.from_hf is None else ""
    print(f"\n{file}: for jaxtp train --config {file}{needed}")


def _tell(asked: EstimateConfig, config: TrainConfig, where: Target, model: Model, found: Search) -> dict[str, Any]:
    """Prints tier 1, each part as soon as it is known; gives it for machines."""
    print(ranking(found), details(found.settings[0]), sep="\n\n", end="\n\n", flush=True)
    configured = None if asked.as_configured or asked.meshes else _configured(config, where, model)
    others = list(faster(found, model) if found.fitting else remedies(found, model))
    words = why(found, configured, others) if found.fitting else what_would_fit(found, others)
    for sentence in words:
        print(textwrap.fill(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False), flush=True)
    if asked.price is not None:
        low, high = (each * asked.price for each in device_hours(found.settings[0]))
        print(f"At {asked.price:g} for an hour of a device all steps cost {low:,.0f} to {high:,.0f}, modelled.")
    return record(config, where, model, found, configured, others, words)


def _compile(asked: EstimateConfig, best: Setting, numbers: dict[str, Any]) -> Exception | None:
    """Runs tiers 2 and 3, as far as they are asked for; what one could not do takes nothing back of the others."""
    failed: Exception | None = None
    try:
        request_devices(best)
        partitioned = compile_partitioned(best)
        numbers["tier_2"] = partitioned_record(partitioned)
        print("", *partitioned_lines(best, partitioned), sep="\n", flush=True)
    except (ConfigError, MeshError) as error:
        numbers["tier_2"], failed = {"error": str(error)}, error
    if asked.tier < 3:
        return failed
    try:
        hardware = best.target.hardware.compiled_as
        compiled = compile_for(best.config, best.sizes, hardware, **_hosts(best.target), timeout_s=asked.timeout)
        numbers["tier_3"] = target_record(best, compiled)
        print("", *target_lines(best, compiled), sep="\n", flush=True)
    except DoesNotFitError as error:
        numbers["tier_3"] = {"error": str(error), "fits": False}
        print("", error, sep="\n", flush=True)
    except TargetError as error:
        numbers["tier_3"], failed = {"error": str(error)}, error
    return failed


def _require_compiler(asked: EstimateConfig, where: Target) -> None:
    """Checks that there is a compiler for the hardware, if tier 3 is asked for.

    Raises:
      ConfigError: there is none, or it is not installed.
    """
    if asked.tier < 3:
        return
    try:
        topology(where.hardware.compiled_as, **_hosts(where))
    except TargetError as error:
        raise ConfigError(f"--tier 3: {error}; --tier 2 needs none") from None


def _hosts(where: Target) -> dict[str, int]:
    """Returns the number of hosts of a target, and of the devices of each."""
    each = math.gcd(where.devices, where.hardware.domain)
    return {"hosts": where.devices // each, "devices_per_host": each}


def _meshes(asked: EstimateConfig, config: TrainConfig, where: Target) -> Sequence[Mapping[str, int]]:
    """Returns the meshes that are asked about, or all.

    Raises:
      MeshError, ConfigError: one is not of that form, or of another number of devices.
    """
    meshes = [parse_mesh(text) for text in asked.meshes]
    for text, sizes in zip(asked.meshes, meshes, strict=True):
        if (needed := math.prod(sizes.values())) != where.devices:
            instead = f"; {asked.hardware.rstrip('0123456789')}{needed} has as many" if needed <= MAX_DEVICES else ""
            raise ConfigError(
                f"--mesh {text}: {describe_mesh(sizes)} is {needed:,} devices, and --hardware {asked.hardware} is "
                f"{where.devices:,}{instead}"
            )
    return meshes or meshes_to_try(config, where.devices, where.hardware.domain)


def _configured(config: TrainConfig, where: Target, model: Model) -> Setting | None:
    """Returns the configuration as it is; None if its own mesh cannot be made of the devices or cannot run it."""
    try:
        sizes = fill(config.mesh.sizes, where.devices)
    except MeshError:
        return None
    if math.prod(sizes.values()) != where.devices or list(violations_on(config, sizes)):
        return None
    return estimate(configuration.changed(config, {"mesh": config.mesh.of_sizes(sizes)}), where, model)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
