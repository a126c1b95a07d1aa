"""`jaxtp evaluate`: measures models on documents, and reports a table or JSON."""

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtp.analysis.tables import columns
from jaxtp.checkpoint import silence_orbax
from jaxtp.config import entry
from jaxtp.config.command_line import Command
from jaxtp.config.entry import Interrupt
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.schema import ConfigError
from jaxtp.distributed.agreement import (
    raise_everywhere,
    reporting_failure,
    run_and_report,
    watch,
)
from jaxtp.distributed.joining import join_processes
from jaxtp.generate.loading import (
    ModelSource,
    Status,
    inference_mesh,
    load_model,
    open_source,
    print_status,
    request_devices,
)
from jaxtp.mesh import mesh_sizes
from jaxtp.tools.evaluate.evaluation_settings import (
    SHOWN_FIRST,
    EvaluateConfig,
    conflicts,
    require_harness,
    window_length,
)
from jaxtp.tools.evaluate.inputs import Input, open_inputs
from jaxtp.tools.evaluate.measure import Measured, Scorer, measure

PROGRAM = "jaxtp evaluate"
DESCRIPTION = """Measures loss, perplexity and bits per byte of a model on text.

The model is a run of jaxtp train or a folder in Hugging Face's format; the text is in datasets of
jaxtp prepare or in files.

jaxtp evaluate --model runs/a --data data/own --text notes.txt

Every token of a document except the first is predicted once, from the earlier ones in the same
document. The numbers are the same on any mesh (--mesh fsdp=2,tp=4) and with any --batch-size.
--tasks NAME runs tasks of lm-evaluation-harness instead (pip install 'jaxtp[eval]'). Results go to
standard output, as a table or with --json - as JSON; everything else goes to standard error.
"""
COMMAND = Command(
    program=PROGRAM, schema=EvaluateConfig, description=DESCRIPTION, short_help=SHOWN_FIRST
)
STDOUT = Path("-")  # Value of --json for standard output
_FORMATS = {
    "documents": ",",
    "tokens": ",",
    "bytes": ",",
    "loss": ".6f",
    "perplexity": ".5g",
    "bits_per_byte": ".5f",
    "accuracy": ".2%",
}
"""Columns of the table."""

Record = dict[str, Any]  # An object of the JSON


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      0; 2 for a user's mistake; 3 for a loss that is not finite; 75 if another process was lost;
      130 for Ctrl-C.
    """
    silence_orbax()
    return run_and_report(lambda: entry.attempt(PROGRAM, lambda: _evaluate(argv)))


def _evaluate(argv: Sequence[str]) -> None:
    join_processes()
    with raise_everywhere(watch):
        config, _ = COMMAND.load(argv)
        path = config.model
        problems = list(conflicts(config))
        if path is None or problems:
            raise ConfigError("; ".join(problems))
        request_devices(config.mesh)
    with reporting_failure():
        if config.tasks:
            _run_tasks(config, path)
        else:
            _measure_model(config, path)


def _measure_model(config: EvaluateConfig, path: Path) -> None:
    with raise_everywhere():
        _require_json(config.json)
        source = open_source(path, config.source_options)
        length = window_length(config, source)
        inputs = open_inputs(config, path, source)
        mesh = inference_mesh(config.mesh, source.config)
    measured = _measure(config, source, inputs, mesh, length)
    record = _describe(source, mesh, length)
    record["data"] = [documents.name for documents in inputs]
    record["stride"] = config.stride or length
    record["all"] = measured.numbers()
    _report(_table(record), config.json, record)


def _measure(
    config: EvaluateConfig, source: ModelSource, inputs: Sequence[Input], mesh: Mesh, length: int
) -> Measured:
    scorer = Scorer(load_model(source, mesh), config.batch_size)
    stride = config.stride or length
    total = sum(source.num_documents for source in inputs)
    started = time.monotonic()
    status = Status()
    overlap = "" if stride == length else f" that start {stride:,} apart"
    print_status(
        f"data    {total:,} document{'s' * (total != 1)}; windows of {length:,} tokens{overlap}"
    )

    def progress(measured: Measured) -> None:
        tokens = measured.tokens
        # The documents that were read, in proportion to their tokens that are scored
        share = measured.documents / total * tokens / measured.tokens_read
        rate = tokens / (time.monotonic() - started)
        status(f"{share:.0%}  loss {measured.loss:.4f}  {rate:,.0f} tokens/s")

    return measure(scorer, inputs, length, stride, progress)


def _run_tasks(config: EvaluateConfig, path: Path) -> None:
    require_harness("--tasks")
    from jaxtp.tools.evaluate import harness

    _require_json(config.json)
    source = open_source(path, config.source_options)
    source, day = harness.with_day(source, config)
    length = window_length(config, source)
    mesh = inference_mesh(config.mesh, source.config)
    record = _describe(source, mesh, length)
    if day is not None:
        record["chat_template_day"] = day
        print_status(f"date    the chat template writes the day {day}; --date names another")
    tasks = harness.open_tasks(config.tasks, config.task_folder)
    # Waits for the batch
    with Interrupt(signal.SIGINT) as interrupt:
        lm = harness.JaxtpLM(
            load_model(source, mesh),
            source,
            batch_size=config.batch_size,
            max_length=length,
            check=interrupt.check,
        )
        results = harness.run(lm, tasks, config)
    table, described = harness.described(results)
    _report(table, config.json, record | described)


def _describe(source: ModelSource, mesh: Mesh, length: int) -> Record:
    return {
        "model": source.name,
        "dtype": source.config.precision.compute,
        "mesh": mesh_sizes(mesh),
        "sequence_length": length,
    }


def _require_json(path: Path | None) -> None:
    if path != STDOUT and jax.process_index() == 0:
        require_writable("--json", path)


def _report(table: str, path: Path | None, record: Mapping[str, object]) -> None:
    if jax.process_index() != 0:
        return
    if path == STDOUT:
        print(json.dumps(record, indent=2), flush=True)
        return
    print(table, flush=True)
    try:
        write_json("--json", path, record)
    except ConfigError as error:
        raise ConfigError(f"{error}; the numbers are above") from None


def _table(record: Record) -> str:
    header = ["", "window", *(name.replace("_per_", "/") for name in _FORMATS)]
    cells = ["all", f"{record['sequence_length']:,}"]
    for key, style in _FORMATS.items():
        value = record["all"][key]
        cells.append("-" if value is None else f"{value:{style}}")
    return columns(header, [cells])


if __name__ == "__main__":
    entry.run(PROGRAM, main)
