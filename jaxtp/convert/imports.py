"""Importing, as the command does it."""

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.config import to_yaml
from jaxtp.convert.config import Import
from jaxtp.hf.attributes import family_of
from jaxtp.hf.folder import Folder, open_folder
from jaxtp.hf.load import Progress, import_config, load_folder
from jaxtp.hf.names import dtypes
from jaxtp.hf.runs import keep_files
from jaxtp.hf.writing import appearing
from jaxtp.layers.parameter import DType, Precision
from jaxtp.mesh import mesh_sizes
from jaxtp.models.decoder import Decoder
from jaxtp.train import folder as run_folder
from jaxtp.train.config import MeshConfig, RunConfig, TrainConfig

IMPORTED = "imported"
"""Key of a checkpoint's info: where the model is from, and in which dtype it came."""
_DTYPES: Mapping[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def import_run(command: Import) -> str:
    """Makes a run of an imported model, which appears when it is complete; returns what was done, in a line.

    Raises:
      HFError: the folder cannot be imported, or the run's is not empty or cannot be written.
      CheckpointError: the checkpoint cannot be written.
    """
    target = command.run
    with appearing(target) as partial:
        source = open_folder(command.source)
        precision = None if command.dtype is None else Precision(param=command.dtype)
        model_config = import_config(source, precision, {}, command.ignore_config)
        mesh = command.mesh.make()
        with jax.set_mesh(mesh):
            model = load_folder(source, model_config, mesh, progress("read"))
        config = TrainConfig(run=RunConfig(dir=target), mesh=MeshConfig(**asdict(command.mesh)), model=model_config)
        family = family_of(source.attributes, str(source.path))
        _save(partial, config, model, mesh, {"from": str(source.path), "dtype": dtype_of(source)})
        keep_files(source.path, partial)
        (partial / run_folder.CONFIG).write_text(to_yaml(config), encoding="utf-8")
    return f"{source.path} ({family.model_type}) is in {target}, parameters in {model_config.precision.param}"


def _save(folder: Path, config: TrainConfig, model: Decoder, mesh: Mesh, imported: dict[str, str]) -> None:
    checkpoints = Checkpoints(folder / run_folder.CHECKPOINTS)
    info = run_folder.checkpoint_info(config, {IMPORTED: imported["from"]}, 0, mesh_sizes(mesh))
    state: nnx.State = nnx.State({"model": nnx.state(model)})
    checkpoints.save(0, state, mesh, {**info, IMPORTED: imported})
    checkpoints.close()


def dtype_of(source: Folder) -> DType:
    """Returns the dtype that all tensors are stored in, or one that holds any of them."""
    stored = dtypes(source.tensors, family_of(source.attributes, str(source.path)))
    return _DTYPES[stored.pop()] if len(stored) == 1 else "float32"


def progress(verb: str) -> Progress | None:
    """Returns what shows how far a conversion is, in a terminal: a line that counts."""
    if not sys.stderr.isatty():
        return None
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2 or done == total:
            last = now
            rate = done / 1e9 / max(now - started, 1e-3)
            line = f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB {verb}, {rate:.2f} GB/s "
            print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show
