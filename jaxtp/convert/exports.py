"""Exporting, as the command does it."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtp.checkpoint.stored import newest, stored_info
from jaxtp.config import expand
from jaxtp.convert.config import Export
from jaxtp.convert.imports import IMPORTED, dtype_of, progress
from jaxtp.data.tokenizer_files import LONGEST
from jaxtp.hf.folder import CONFIG, HFError, open_folder
from jaxtp.hf.load import import_config, load_folder
from jaxtp.hf.peft import save_peft
from jaxtp.hf.peft_load import open_peft
from jaxtp.hf.runs import (
    BASE,
    kept_family,
    kept_files,
    load_adapted,
    load_adapters,
    load_merged,
    merge_peft,
    model_of,
)
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
    source = command.run
    if (source / CONFIG).is_file():
        return _export_folder(command, source)
    checkpoint = newest(source)
    info = stored_info(checkpoint)
    config = model_of(checkpoint, info)
    adapted = config.lora.rank or command.adapters is not None
    if not adapted and (command.merged or command.base is not None):
        raise HFError(f"{checkpoint} has no adapters; leave {'--merged' if command.merged else '--base'} out")
    if config.lora.rank and command.adapters is not None:
        raise HFError(f"{checkpoint} has adapters of its own; export them with --merged, and add others to that")
    mesh = command.mesh.make()
    if config.lora.rank and not command.merged:
        if command.experts != "separate":
            raise HFError(f"--experts {command.experts} is of a whole model, and adapters are exported; add --merged")
        _export_adapters(command, checkpoint, info, config, mesh)
        return f"the adapters of {checkpoint} are in {command.out}"
    _export_model(command, checkpoint, info, config, mesh)
    return f"{checkpoint} is in {command.out}"


def _export_folder(command: Export, source: Path) -> str:
    """Writes a model in Hugging Face format with adapters in PEFT's added to it."""
    if command.adapters is None:
        raise HFError(f"{source} is in Hugging Face format already; --adapters DIR adds adapters to it")
    if command.base is not None:
        raise HFError(f"--base is of a run that trained adapters, and {source} is none")
    folder = open_folder(source)
    config = import_config(folder, None, {}, command.ignore_config)
    family = folder.attributes["model_type"]
    found = open_peft(command.adapters, config, family)
    mesh = command.mesh.make()
    with jax.set_mesh(mesh):
        model = load_folder(folder, config, mesh, progress("read"))
    given = command.tokenizer_from
    save_hf(
        merge_peft(model, found, config, mesh),
        command.out,
        family=command.family or family,
        tokenizer_from=given if given is not None else source if has_tokenizer(source) else None,
        attributes=carried(source),
        dtype=command.dtype or dtype_of(folder),
        experts=command.experts,
        max_shard_size=command.max_shard_size,
        progress=progress("written"),
    )
    return f"{source} with {found.path} is in {command.out}"


def _export_model(command: Export, checkpoint: Path, info: dict[str, Any], config: ModelConfig, mesh: Mesh) -> None:
    whole, found = replace(config, lora=LoraConfig()), None
    if command.adapters is not None:
        found = open_peft(command.adapters, whole, kept_family(checkpoint))
    model = load_merged(checkpoint, info, whole, mesh, command.base)
    save_hf(
        model if found is None else merge_peft(model, found, whole, mesh),
        command.out,
        family=command.family or kept_family(checkpoint),
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


def _export_adapters(command: Export, checkpoint: Path, info: dict[str, Any], config: ModelConfig, mesh: Mesh) -> None:
    given = command.base
    save_peft(
        load_adapters(checkpoint, config, mesh) if given is None else load_adapted(checkpoint, info, mesh, given),
        command.out,
        base=given or (info[BASE]["from"] if config.from_hf is not None else None),
        family=command.family or kept_family(checkpoint),
        tokenizer_from=_tokenizer(command, checkpoint, info),
        dtype=command.dtype,
        progress=progress("written"),
    )


def _tokenizer(command: Export, checkpoint: Path, info: dict[str, Any]) -> Path | None:
    """Returns the folder of the tokenizer's files: as asked for, as they came with the model, or that of the data."""
    if command.tokenizer_from is not None:
        return command.tokenizer_from
    data = info["config"].get("data", {}).get("path")
    folders = (kept_files(checkpoint), None if data is None else expand(Path(data)))
    found = next((folder for folder in folders if folder is not None and has_tokenizer(folder)), None)
    if found is None:
        print("no tokenizer's files are known to go with it; --tokenizer-from DIR copies some", file=sys.stderr)
    return found
