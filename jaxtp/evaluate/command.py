"""The work of `jaxtp evaluate`: it opens model and documents, measures, and gives the numbers."""

from importlib.util import find_spec
from typing import Any

from jax.sharding import Mesh

from jaxtp.config import ConfigError
from jaxtp.evaluate.config import EvaluateConfig
from jaxtp.evaluate.inputs import Input, open_inputs
from jaxtp.evaluate.lengths import request_length, window_length
from jaxtp.evaluate.measure import Reading, measure
from jaxtp.evaluate.report import Report, as_record, as_table, give, require_json
from jaxtp.evaluate.scoring import Scorer
from jaxtp.generate.command import load, say
from jaxtp.generate.config import open_mesh, request_devices
from jaxtp.generate.loading import Source, open_source
from jaxtp.launch.agreement import several, together
from jaxtp.mesh import mesh_sizes


def run(config: EvaluateConfig) -> None:
    """Carries out a configuration that `config.check` has passed.

    Raises:
      ValueError: a user's mistake, found before the weights are read.
      WrongNumbersError: a loss is not finite.
    """
    assert config.model is not None
    if config.tasks:
        _run_tasks(config)
        return
    with together():
        request_devices(config.mesh)
        require_json(config.json)
        source = open_source(config.model, config.of_model)
        inputs = open_inputs(config, source)
        reading = reading_of(config, source)
        mesh = open_mesh(config.mesh, source.config)
    model = load(source, mesh)
    say(_described_inputs(inputs, reading))
    with Report(sum(each.size for each in inputs)) as report:
        measured = measure(Scorer(model, config.batch_size), inputs, reading, report.moved)
    give(
        as_table(measured, config.by),
        config.json,
        as_record(measured, config.by, _about(source, inputs, reading, mesh)),
    )


def _run_tasks(config: EvaluateConfig) -> None:
    """Runs tasks of lm-evaluation-harness.

    Raises:
      HarnessError, ConfigError: a user's mistake, found before the weights are read where it can be.
    """
    assert config.model is not None
    if find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs lm-evaluation-harness: pip install 'jaxtp[eval]'")
    if several():
        raise ConfigError("--tasks runs in one process, and there are several; one process drives all GPUs of a host")
    from jaxtp.evaluate import tasks as harness

    harness.quieten()
    request_devices(config.mesh)
    require_json(config.json)
    source = open_source(config.model, config.of_model)
    if config.chat and source.template is None:
        raise ConfigError(f"--chat: {source.name} has no chat template; leave --chat out")
    length, mesh = request_length(config, source), open_mesh(config.mesh, source.config)
    tasks = harness.Tasks(config.tasks, config.task_folder)
    results = harness.run(load(source, mesh), source, tasks, config, length)
    about = {"model": source.name, "dtype": source.config.precision.compute, "mesh": mesh_sizes(mesh)}
    give(harness.as_table(results), config.json, harness.as_record(results, {**about, "sequence_length": length}))


def reading_of(config: EvaluateConfig, source: Source) -> Reading:
    """Returns how documents are read.

    Raises:
      ConfigError: the model cannot read so.
    """
    length = window_length(config, source)
    return Reading(length, config.stride or length, config.packing, max(config.mesh.cp, 1))


def _described_inputs(inputs: list[Input], reading: Reading) -> str:
    documents, size = (sum(getattr(each, name) for each in inputs) for name in ("num_documents", "size"))
    apart = "" if reading.stride == reading.length else f" that begin {reading.stride:,} apart"
    how = {"documents": "packed", "none": "a row each", "concatenated": "one after the other"}[reading.packing]
    texts = f"{documents:,} document{'s' * (documents != 1)}, {size:,} bytes of text"
    return f"data    {texts}; windows of {reading.length:,} tokens{apart}, {how}"


def _about(source: Source, inputs: list[Input], reading: Reading, mesh: Mesh) -> dict[str, Any]:
    return {
        "model": source.name,
        "data": [each.name for each in inputs],
        "dtype": source.config.precision.compute,
        "mesh": mesh_sizes(mesh),
        "sequence_length": reading.length,
        "stride": reading.stride,
        "packing": reading.packing,
    }
