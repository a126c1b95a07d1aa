"""Importing and exporting, as the command does it."""

import shutil
import sys
import time
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtp import config as configuration
from jaxtp.checkpoint.manager import CheckpointError, Checkpoints, load_weights, newest, stored_info
from jaxtp.convert.config import Export, Import, MeshFlags
from jaxtp.hf.attributes import family_of
from jaxtp.hf.folder import CONFIG, Folder, HFError, inside, open_folder
from jaxtp.hf.load import Progress, import_config, load_folder
from jaxtp.hf.names import dtypes
from jaxtp.hf.save import TOKENIZER_FILES, save_hf
from jaxtp.layers.precision import Precision
from jaxtp.mesh import make_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder, abstract_decoder
from jaxtp.models.families.family import Family
from jaxtp.train import folder as run_folder
from jaxtp.train.config import MeshConfig, RunConfig, TrainConfig

HF = "hf"
"""In an imported run: config.json and the tokenizer's files, as they came."""
IMPORTED = "imported"
"""In a checkpoint's info: where the model is from, and in which dtype it came."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def import_run(command: Import) -> str:
    """Makes a run of an imported model; returns what was done, in a line.

    Raises:
      HFError: the folder cannot be imported, or the run's is not empty.
    """
    target = command.run.expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HFError(f"{target} is there already; name a new folder")
    source = open_folder(command.source.expanduser())
    precision = None if command.dtype is None else Precision(param=command.dtype)
    model_config = import_config(source, precision, {})
    mesh = _mesh(command.mesh)
    with jax.set_mesh(mesh):
        model = load_folder(source, model_config, mesh, _progress("read"))
    config = TrainConfig(
        run=RunConfig(dir=target), mesh=MeshConfig(fsdp=command.mesh.fsdp, tp=command.mesh.tp), model=model_config
    )
    run_folder.prepare(target)
    family = family_of(source.attributes, str(source.path))
    _save(target, config, model, mesh, {"from": str(source.path), "dtype": _dtype(source, family)})
    _keep_files(source.path, target / HF)
    run_folder.write_config(config)
    return f"{source.path} ({family.model_type}) is in {target}, parameters in {model_config.precision.param}"


def export_run(command: Export) -> str:
    """Writes a checkpoint as a folder in Hugging Face format; returns what was done, in a line.

    Raises:
      HFError: no family can be this model, or the folder cannot be written.
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoint = newest(command.run.expanduser())
    try:
        info = stored_info(checkpoint)
        config = configuration.validate(ModelConfig, info["config"]["model"], source=f"{checkpoint}: its model")
    except CheckpointError:
        raise
    except Exception as error:  # Orbax raises whatever it meets
        raise CheckpointError(f"{checkpoint} is damaged ({str(error).splitlines()[0][:200]})") from None
    mesh = _mesh(command.mesh)
    with jax.set_mesh(mesh):
        graph, abstract = abstract_decoder(config)
    weights, origin = load_weights(checkpoint, abstract, mesh)
    model: Decoder = nnx.merge(graph, weights)
    save_hf(
        model,
        command.out.expanduser(),
        family=command.family,
        tokenizer_from=_tokenizer(command, checkpoint, config),
        dtype=command.dtype or info.get(IMPORTED, {}).get("dtype"),
        max_shard_size=command.max_shard_size,
        progress=_progress("written"),
    )
    return f"{origin} is in {command.out}"


def _mesh(flags: MeshFlags) -> Mesh:
    return make_mesh(fsdp=flags.fsdp, tp=flags.tp)


def _save(target: Path, config: TrainConfig, model: Decoder, mesh: Mesh, imported: dict[str, str]) -> None:
    checkpoints = Checkpoints(target / run_folder.CHECKPOINTS)
    info = run_folder.checkpoint_info(config, {IMPORTED: imported["from"]}, 0, mesh_sizes(mesh))
    state: nnx.State = nnx.State({"model": nnx.state(model)})
    checkpoints.save(0, state, mesh, {**info, IMPORTED: imported})
    checkpoints.close()


def _dtype(source: Folder, family: Family) -> str:
    """What all tensors are stored in, or what holds any of them."""
    stored = dtypes(source.tensors, family)
    return _DTYPES[stored.pop()] if len(stored) == 1 else "float32"


def _keep_files(source: Path, target: Path) -> None:
    """Copies what an export needs beside the weights."""
    target.mkdir()
    for name in (CONFIG, *TOKENIZER_FILES):
        if (source / name).exists():
            shutil.copyfile(inside(source, name), target / name)


def _tokenizer(command: Export, checkpoint: Path, config: ModelConfig) -> Path | None:
    """The folder of the tokenizer's files: as asked for, as imported, or of the model that a run began with."""
    if command.tokenizer_from is not None:
        return command.tokenizer_from.expanduser()
    began_with = config.from_hf if config.from_hf is not None and config.from_hf.is_dir() else None
    return _kept_files(checkpoint) or began_with


def _kept_files(checkpoint: Path) -> Path | None:
    """Those that `_keep_files` left in the run that a checkpoint is of."""
    kept = checkpoint.resolve().parent.parent / HF
    return kept if any((kept / name).exists() for name in TOKENIZER_FILES) else None


def _progress(verb: str) -> Progress | None:
    """In a terminal, a line that counts."""
    if not sys.stderr.isatty():
        return None
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2 or done == total:
            last = now
            rate = done / 1e9 / max(now - started, 1e-3)
            end = "\n" if done == total else ""
            print(
                f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB {verb}, {rate:.2f} GB/s ",
                end=end,
                file=sys.stderr,
                flush=True,
            )

    return show
