"""`jaxtp evaluate`: opens models and documents, measures, and reports the numbers as a table or as JSON."""

import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxtp.checkpoint import silence_orbax
from jaxtp.config import entry
from jaxtp.config.command_line import Command
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.schema import ConfigError
from jaxtp.distributed.agreement import is_multiprocess, raise_everywhere
from jaxtp.distributed.joining import join_processes
from jaxtp.distributed.peers import report_failure, run_and_report, watch
from jaxtp.generate.loading import ModelSource, inference_mesh, load_model, open_source, print_status, request_devices
from jaxtp.mesh import mesh_sizes
from jaxtp.tools.evaluate.evaluation_settings import SHOWN_FIRST, EvaluateConfig, check, window_length
from jaxtp.tools.evaluate.inputs import Input, open_inputs
from jaxtp.tools.evaluate.measure import Measured, Scorer, Totals, measure

PROGRAM = "jaxtp evaluate"
DESCRIPTION = """Measures loss, perplexity and bits per byte of a model on text. The model is a run of jaxtp train or a
folder in Hugging Face's format; the text is in datasets of jaxtp prepare or in files.

jaxtp evaluate --model runs/a --data data/own --text notes.txt --by length
jaxtp evaluate --model models/base runs/tuned --data data/own

Every token of a document except the first is predicted once, from the earlier ones in the same document. The numbers
are the same on any mesh (--mesh fsdp=2,tp=4) and with any --batch-size. --tasks NAME runs tasks of
lm-evaluation-harness instead (pip install 'jaxtp[eval]'). Results go to standard output, as a table or with --json - as
JSON; everything else goes to standard error.
"""
COMMAND = Command(program=PROGRAM, schema=EvaluateConfig, description=DESCRIPTION, first=SHOWN_FIRST)
STDOUT = Path("-")
"""Value of --json for standard output."""
PROGRESS_SECONDS = 5.0
_COLUMNS = ("documents", "tokens", "bytes", "loss", "perplexity", "bits/byte", "accuracy")

Record = dict[str, object]


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      0; 2 for a user's mistake; 3 for a loss that is not finite; 75 if another process was lost; 130 for Ctrl-C.
    """
    silence_orbax()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"orbax|flax")
    return run_and_report(lambda: entry.attempt(PROGRAM, lambda: _evaluate(argv)))


def _evaluate(argv: Sequence[str]) -> None:
    join_processes()
    with raise_everywhere(watch):
        config, _ = COMMAND.load(argv)
        check(config)
        request_devices(config.mesh)
    try:
        _run_tasks(config) if config.tasks else _measure_models(config)
    except BaseException as error:
        report_failure(error)
        raise


def _measure_models(config: EvaluateConfig) -> None:
    with raise_everywhere():
        _require_json(config.json)
        sources = [open_source(path, config.source_options) for path in config.model]
        names = [source.name for source in sources]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"--model {duplicates[0]} is given twice")
        length = window_length(config, sources)
        inputs = [open_inputs(config, path, source) for path, source in zip(config.model, sources, strict=True)]
        meshes = [inference_mesh(config.mesh, source.config) for source in sources]
    measured: dict[str, Measured] = {}
    records: list[Record] = []
    try:
        for source, documents, mesh in zip(sources, inputs, meshes, strict=True):
            found = measured[source.name] = _measure(config, source, documents, mesh, length)
            about: Record = {"data": [each.name for each in documents], "stride": config.stride or length}
            records.append({**_describe(source, mesh, length), **about, **_record(found, config.by)})
    finally:  # reports the models before a failure
        if records:
            record = records[0] if len(sources) == 1 else {"models": records}
            _report(_table(measured, config.by, length), config.json, record)


def _measure(config: EvaluateConfig, source: ModelSource, inputs: Sequence[Input], mesh: Mesh, length: int) -> Measured:
    """Frees the weights before the next model loads."""
    scorer = Scorer(load_model(source, mesh), config.batch_size)
    total, started = sum(each.num_documents for each in inputs), time.monotonic()
    stride = f" that start {config.stride:,} apart" if config.stride not in (None, length) else ""
    print_status(f"data    {total:,} document{'s' * (total != 1)}; windows of {length:,} tokens{stride}")
    printed = started

    def progress(measured: Measured) -> None:
        nonlocal printed
        now, whole = time.monotonic(), measured.whole()
        if now - printed >= PROGRESS_SECONDS and whole.tokens:
            printed, rate = now, whole.tokens / (now - started)
            print_status(f"{measured.documents_scored() / total:.0%}  loss {whole.loss:.4f}  {rate:,.0f} tokens/s")

    return measure(scorer, inputs, length, config.stride or length, progress)


def _run_tasks(config: EvaluateConfig) -> None:
    if find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs lm-evaluation-harness: pip install 'jaxtp[eval]'")
    if is_multiprocess():
        raise ConfigError("--tasks runs in one process, and there are several; one process drives all GPUs of a host")
    from jaxtp.tools.evaluate import harness

    _require_json(config.json)
    source = open_source(config.model[0], config.source_options)
    if config.chat and source.template is None:
        raise ConfigError(f"--chat: {source.name} has no chat template; leave --chat out")
    length, mesh = window_length(config, [source]), inference_mesh(config.mesh, source.config)
    tasks = harness.open_tasks(config.tasks, config.task_folder)
    results = harness.run(load_model(source, mesh), source, tasks, config, length)
    record = {**_describe(source, mesh, length), **harness.plain_results(results)}
    _report(harness.results_table(results), config.json, record)


def _describe(source: ModelSource, mesh: Mesh, length: int) -> Record:
    dtype = source.config.precision.compute
    return {"model": source.name, "dtype": dtype, "mesh": mesh_sizes(mesh), "sequence_length": length}


def _require_json(path: Path | None) -> None:
    if path != STDOUT and jax.process_index() == 0:
        require_writable("--json", path)


def _report(table: str, path: Path | None, record: Mapping[str, object]) -> None:
    if jax.process_index() != 0:
        return
    print(json.dumps(record, indent=2) if path == STDOUT else table, flush=True)
    if path != STDOUT:
        try:
            write_json("--json", path, record)
        except ConfigError as error:
            raise ConfigError(f"{error}; the numbers are above") from None


def _table(measured: Mapping[str, Measured], by: Sequence[str], length: int) -> str:
    rows = [["", "window", *_COLUMNS]]
    for model, sums in measured.items():
        for part, totals in _parts(sums, by):
            name = part if len(measured) == 1 else f"{model}: {part}" if by else model
            rows.append([name, f"{length:,}", *_cells(totals)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)


def _parts(measured: Measured, by: Sequence[str]) -> Iterator[tuple[str, Totals]]:
    if "source" in by:
        yield from measured.by_source().items()
    if "length" in by:
        for least, part in measured.by_length().items():
            yield f"{least:,} tokens" if least == 1 else f"{least:,} to {2 * least - 1:,} tokens", part
    yield "all", measured.whole()


def _cells(part: Totals) -> list[str]:
    counts = [f"{count:,}" for count in (part.documents, part.tokens, part.num_bytes)]
    if not part.tokens:
        return [*counts, *["-"] * 4]
    bits = "-" if part.bits_per_byte is None else f"{part.bits_per_byte:.5f}"
    return [*counts, f"{part.loss:.6f}", f"{part.perplexity:.5g}", bits, f"{part.accuracy:.2%}"]


def _record(measured: Measured, by: Sequence[str]) -> Record:
    record: Record = {"all": _numbers(measured.whole())}
    if "source" in by:
        record["by_source"] = [{"source": name, **_numbers(part)} for name, part in measured.by_source().items()]
    if "length" in by:
        record["by_length"] = [
            {"tokens_from": least, "tokens_to": 2 * least - 1, **_numbers(part)}
            for least, part in measured.by_length().items()
        ]
    return record


def _numbers(part: Totals) -> Record:
    names = ("loss", "perplexity", "bits_per_byte", "accuracy")
    numbers = {name: getattr(part, name) if part.tokens else None for name in names}
    counts: Record = {"documents": part.documents, "tokens": part.tokens, "bytes": part.num_bytes}
    return counts | {k: v if v is not None and math.isfinite(v) else None for k, v in numbers.items()}


if __name__ == "__main__":
    entry.run(PROGRAM, main)
