"""Exporting, as the command does it."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxtp.checkpoint.stored import newest, stored_info
from jaxtp.config import expand
from jaxtp.convert.config import Export
from jaxtp.convert.imports import IMPORTED, progress
from jaxtp.data.tokenizer_files import LONGEST
from jaxtp.hf.folder import CONFIG, HFError, read_attributes
from jaxtp.hf.peft import save_peft
from jaxtp.hf.runs import BASE, kept_files, load_adapted, load_adapters, load_merged, model_of
from jaxtp.hf.save import carried, save_hf
from jaxtp.hf.writing import has_tokenizer
from jaxtp.layers.lora import LoraConfig
from jaxtp.models.config import ModelConfig


def export_run(command: Export) -> str:
    """Writes a checkpoint as a folder in Hugging Face format; returns what was done, in a line.

    Raises:
      HFError: no family can be this model, or the folder cannot be written.
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoint = newest(expand(command.run))
    info = stored_info(checkpoint)
    config = model_of(checkpoint, info)
    if not config.lora.rank and (command.merged or command.base is not None):
        raise HFError(f"{checkpoint} has no adapters; leave {'--merged' if command.merged else '--base'} out")
    mesh = command.mesh.make()
    if config.lora.rank and not command.merged:
        if command.experts != "separate":
            raise HFError(f"--experts {command.experts} is of a whole model, and adapters are exported; add --merged")
        _export_adapters(command, checkpoint, info, config, mesh)
        return f"the adapters of {checkpoint} are in {command.out}"
    _export_model(command, checkpoint, info, config, mesh)
    return f"{checkpoint} is in {command.out}"


def _export_model(command: Export, checkpoint: Path, info: dict[str, Any], config: ModelConfig, mesh: Mesh) -> None:
    whole = replace(config, lora=LoraConfig())
    save_hf(
        load_merged(checkpoint, info, whole, mesh, _base(command)),
        expand(command.out),
        family=command.family or _family(checkpoint),
        tokenizer_from=_tokenizer(command, checkpoint, info),
        attributes=_attributes(checkpoint, info),
        dtype=command.dtype or info.get(IMPORTED, {}).get("dtype"),
        experts=command.experts,
        max_shard_size=command.max_shard_size,
        progress=progress("written"),
    )


def _attributes(checkpoint: Path, info: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of config.json that describe no computation: as the model came, or its trained length."""
    kept = kept_files(checkpoint)
    return carried(kept) if kept is not None else {LONGEST: info["config"]["data"]["sequence_length"]}


def _family(checkpoint: Path) -> str | None:
    """Returns the family that the model came as, if it was imported."""
    kept = kept_files(checkpoint)
    return None if kept is None or not (kept / CONFIG).is_file() else read_attributes(kept).get("model_type")


def _export_adapters(command: Export, checkpoint: Path, info: dict[str, Any], config: ModelConfig, mesh: Mesh) -> None:
    given = _base(command)
    save_peft(
        load_adapters(checkpoint, config, mesh) if given is None else load_adapted(checkpoint, info, mesh, given),
        expand(command.out),
        base=given or (info[BASE]["from"] if config.from_hf is not None else None),
        family=command.family or _family(checkpoint),
        tokenizer_from=_tokenizer(command, checkpoint, info),
        dtype=command.dtype,
        progress=progress("written"),
    )


def _base(command: Export) -> Path | None:
    return None if command.base is None else expand(command.base)


def _tokenizer(command: Export, checkpoint: Path, info: dict[str, Any]) -> Path | None:
    """Returns the folder of the tokenizer's files: as asked for, as they came with the model, or that of the data."""
    if command.tokenizer_from is not None:
        return expand(command.tokenizer_from)
    data = info["config"].get("data", {}).get("path")
    folders = (kept_files(checkpoint), None if data is None else expand(Path(data)))
    found = next((folder for folder in folders if folder is not None and has_tokenizer(folder)), None)
    if found is None:
        print("no tokenizer's files are known to go with it; --tokenizer-from DIR copies some", file=sys.stderr)
    return found
