"""Loads the model of a run of ours: its weights, or its adapters and the model that they were trained beside.

A run that begins with a Hugging Face model also keeps the files that came with it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.checksum import checksums
from jaxtp.checkpoint.damage import CheckpointError
from jaxtp.checkpoint.logical import to_logical
from jaxtp.checkpoint.manager import load_weights
from jaxtp.checkpoint.orbax_logs import without_metadata_warning
from jaxtp.checkpoint.reader import open_checkpoint
from jaxtp.checkpoint.stored import agreed_info, newest
from jaxtp.config import expand, validate
from jaxtp.hf.adapters import merge_adapters
from jaxtp.hf.folder import CONFIG, open_folder, read_attributes, read_files
from jaxtp.hf.load import load_folder
from jaxtp.hf.peft_load import PeftFolder, with_peft
from jaxtp.hf.writing import TOKENIZER_FILES, appearing
from jaxtp.launch.agreement import share, together
from jaxtp.layers.lora import LoraConfig, LoraParam
from jaxtp.mesh import current_mesh, make_mesh
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder, abstract_decoder

BASE = "base"
"""Key in the info of a checkpoint of adapters: where the model beside them is from, and a hash of it."""
KEPT = "hf"
"""Folder in a run's folder for config.json and the tokenizer's files, as they came with its model."""


@without_metadata_warning()
def load_run(path: str | Path, *, base: str | Path | None = None) -> Decoder:
    """Returns the model of a run as it was trained, with its adapters if it has any, on the mesh in context.

    Args:
      path: the folder of a run (its newest checkpoint), or of one checkpoint.
      base: where the model beside the adapters is, if it is no longer where the run found it.

    Raises:
      CheckpointError: there is none, it is damaged, or `base` is not what its adapters were trained beside.
      HFError: what is in `base` cannot be read.
    """
    checkpoint = open_checkpoint(expand(Path(path)))
    mesh = make_mesh() if current_mesh() is None else jax.sharding.get_mesh()
    model = model_of(checkpoint.folder, checkpoint.info)
    if model.lora.rank:
        return load_adapted(checkpoint.folder, checkpoint.info, mesh, None if base is None else expand(Path(base)))
    return load_merged(checkpoint.folder, checkpoint.info, model, mesh)


def load_merged(
    checkpoint: Path, info: Mapping[str, Any], config: ModelConfig, mesh: Mesh, base: Path | None = None
) -> Decoder:
    """Returns the model of a checkpoint without adapters: if it has some, they are added to their kernels.

    Args:
      checkpoint: its folder.
      info: the info that is stored beside its arrays.
      config: the configuration to run it with: `model_of` it, but for dtypes and the like, and without adapters.
      mesh: the mesh to put it on.
      base: where the model beside the adapters is, if it is no longer where it was.

    Raises:
      CheckpointError: it is damaged, or what is in `base` is not what its adapters were trained beside.
      HFError: what is in `base` cannot be read.
    """
    trained = model_of(checkpoint, info)
    with jax.set_mesh(mesh):
        graph, abstract = abstract_decoder(config)
    if trained.lora.rank:  # in the dtypes of training, before anything is cast
        return _in_dtype(merge_adapters(load_adapted(checkpoint, info, mesh, base)), graph, config)
    weights, _ = load_weights(checkpoint, abstract, mesh)
    model: Decoder = nnx.merge(graph, weights)
    return model


def merge_peft(model: Decoder, found: PeftFolder, config: ModelConfig, mesh: Mesh) -> Decoder:
    """Returns a model with the adapters of a folder in PEFT's format added to its kernels, in float32.

    Args:
      model: without adapters, in the dtype in which it is stored.
      found: the folder.
      config: the configuration to run it with, into whose dtype it is cast at the end.
      mesh: the mesh that it is on.

    Raises:
      HFError: what is in the folder cannot be read.
    """
    with jax.set_mesh(mesh):
        merged = merge_adapters(with_peft(model, found, mesh, "float32"))
        return _in_dtype(merged, abstract_decoder(config)[0], config)


def _in_dtype(model: Decoder, graph: nnx.GraphDef[Decoder], config: ModelConfig) -> Decoder:
    weights = jax.tree.map(lambda array: array.astype(config.precision.param), nnx.state(model))
    cast: Decoder = nnx.merge(graph, weights)
    return cast


def load_adapted(checkpoint: Path, info: Mapping[str, Any], mesh: Mesh, base: Path | None = None) -> Decoder:
    """Returns the model of a checkpoint of adapters, with them and the base weights; see `load_merged`."""
    if BASE not in info:
        raise CheckpointError(f"{checkpoint} does not say beside which model its adapters were trained")
    config = model_of(checkpoint, info)
    kept, origin = load_base(_base_of(checkpoint, info, base), config, mesh)
    check_base(info, describe_base(kept, origin, mesh), origin)
    model = load_adapters(checkpoint, config, mesh)
    nnx.update(model, kept)
    return model


def load_adapters(checkpoint: Path, config: ModelConfig, mesh: Mesh) -> Decoder:
    """Returns the model of a checkpoint of adapters, whose other parameters are shapes.

    Raises:
      CheckpointError: it is damaged.
    """
    with jax.set_mesh(mesh):
        graph, abstract = abstract_decoder(config)
    own, _ = load_weights(checkpoint, nnx.filter_state(abstract, LoraParam), mesh)
    model: Decoder = nnx.merge(graph, nnx.merge_state(abstract, own))
    return model


def model_of(checkpoint: Path, info: Mapping[str, Any]) -> ModelConfig:
    """Returns the configuration of the model of a checkpoint.

    Raises:
      CheckpointError: the checkpoint has none.
      ConfigError: it is that of no model of ours.
    """
    stored = info.get("config", {})
    if "model" not in stored:
        raise CheckpointError(f"{checkpoint} does not say of which model it is; jaxtp train did not write it")
    return validate(ModelConfig, stored["model"], source=f"{checkpoint}: its model")


def load_base(path: Path, config: ModelConfig, mesh: Mesh) -> tuple[nnx.State, Path]:
    """Returns all parameters of a model but its adapters, and the folder that they are from.

    All processes of a run have to call it: what one of them cannot read is the error of all.

    Args:
      path: a folder in Hugging Face format, or a run of ours or one of its checkpoints.
      config: the model; it may have adapters.
      mesh: the mesh to put them on.

    Raises:
      HFError, CheckpointError: they cannot be read, or are of another model.
    """
    whole = replace(config, lora=LoraConfig())
    if share((path / CONFIG).is_file())[0]:
        with jax.set_mesh(mesh), together():
            return nnx.state(load_folder(open_folder(path), whole, mesh)), path
    folder, info = agreed_info(path, lambda: newest(path))
    if model_of(folder, info).lora.rank:
        raise CheckpointError(
            f"{folder} holds adapters alone; make a model of them by "
            f"`jaxtp convert export {path} DIR --merged` and begin with --model.from-hf DIR"
        )
    with jax.set_mesh(mesh):
        _, abstract = abstract_decoder(whole)
    return load_weights(folder, abstract, mesh)


def describe_base(weights: nnx.State, origin: Path, mesh: Mesh) -> dict[str, str]:
    """Returns what a checkpoint of adapters records of the model beside them: its folder, and a hash of its values.

    The hash is of the values in float32, so the same values in bfloat16 and in float32 are the same model.
    """
    arrays = to_logical(weights, mesh)
    sums = {name: checksums({name: array.astype(jnp.float32)})[name] for name, array in sorted(arrays.items())}
    return {"from": str(origin.resolve()), "sha256": hashlib.sha256(json.dumps(sums).encode()).hexdigest()}


def check_base(info: Mapping[str, Any], now: Mapping[str, str], origin: Path) -> None:
    """Checks that adapters are put beside the model that they were trained beside.

    Args:
      info: the info of the adapters' checkpoint.
      now: what `describe_base` returns for the model to put them beside.
      origin: the folder that it is from.

    Raises:
      CheckpointError: it is another model.
    """
    stored = info.get(BASE, {})
    if stored.get("sha256") != now["sha256"]:
        raise CheckpointError(
            f"the adapters were trained beside the model in {stored.get('from', 'a folder that is not recorded')}, and "
            f"what is in {origin} now has other values, or another dtype (model.precision.param)"
        )


def _base_of(checkpoint: Path, info: Mapping[str, Any], given: Path | None) -> Path:
    path = Path(info[BASE]["from"]) if given is None else given
    if not path.is_dir():
        where = f"--base {path}" if given is not None else f"{path}, beside which {checkpoint} was trained"
        raise CheckpointError(f"{where}: no such folder; name the model's by --base DIR")
    return path


def keep_files(source: Path, run: Path) -> None:
    """Copies config.json and the tokenizer's files into the folder of a run, if there are any and the run has none.

    Args:
      source: a folder in Hugging Face format, or one in which another run keeps such files.
      run: the folder of the run.

    Raises:
      HFError: a file cannot be read, or is a link out of the folder; then none is copied.
    """
    if (run / KEPT).exists() or not (found := read_files(source, (CONFIG, *TOKENIZER_FILES))):
        return
    with appearing(run / KEPT) as folder:
        for name, content in found.items():
            (folder / name).write_bytes(content)


def kept_family(checkpoint: Path) -> str | None:
    """Returns the `model_type` that came with the model of a checkpoint's run, if its config.json did."""
    kept = kept_files(checkpoint)
    return None if kept is None or not (kept / CONFIG).is_file() else read_attributes(kept).get("model_type")


def kept_files(checkpoint: Path) -> Path | None:
    """Returns the folder of such files in the run of a checkpoint; None if it has none."""
    folder = checkpoint.resolve().parent.parent / KEPT
    return folder if folder.is_dir() else None
