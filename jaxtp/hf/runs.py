"""Loads models from jaxtp runs: all weights, or adapters with their base model.

A run that starts from a Hugging Face model also stores its config.json and tokenizer files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxtp.checkpoint.checksum import Sums, as_digits
from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.checkpoint.logical import (
    Variable,
    named_arrays,
    named_variables,
    select_paths,
    to_logical,
)
from jaxtp.checkpoint.manager import load_weights
from jaxtp.checkpoint.storage import HF_FILES, RUN_AT_URL, newest_checkpoint, read_info_on_all
from jaxtp.config.files import fingerprint
from jaxtp.config.reading import truncate
from jaxtp.config.schema import split_settings, validate
from jaxtp.data.copies import local, recorded
from jaxtp.distributed.agreement import all_gather_json, raise_everywhere
from jaxtp.hf.adapters import merge_adapters
from jaxtp.hf.config_json import check_adaptable, family_of
from jaxtp.hf.loading import Arrays, load_state, print_notes
from jaxtp.hf.model_folder import CONFIG, open_folder, read_attributes, read_files, read_json
from jaxtp.hf.peft import PeftFolder, with_peft
from jaxtp.hf.saving import TOKENIZER_FILES, atomic_folder, json_bytes, write_files
from jaxtp.hf.wrapper import is_part
from jaxtp.layers.lora import LoraConfig, quantise, stored_kernels
from jaxtp.models.config import ModelConfig, OriginConfig, upgrade_settings
from jaxtp.models.decoder import Decoder, abstract_decoder
from jaxtp.models.own_decoder import call_of_load, decoder_settings

Info = Mapping[str, Any]
"""The info of a checkpoint, from its JSON file."""
# Key in the info of a checkpoint of adapters: folder and hash of the base model
BASE = "base"
ORIGIN = "origin.json"
"""File in `HF_FILES` that names the folder of a model with tensors outside of the text model."""


@dataclass(frozen=True)
class RecordedModel:
    """The decoder that a checkpoint records."""

    config: ModelConfig
    origin: OriginConfig

    def decoder(self, checkpoint: Path) -> ModelConfig:
        """Returns the settings of the decoder; raises CheckpointError for another model."""
        return self.config


class RecordedFlaxModel(RecordedModel):
    """A user's Flax model that a checkpoint records; only the precision of `config` has effect."""

    def decoder(self, checkpoint: Path) -> ModelConfig:
        """See `RecordedModel`."""
        raise CheckpointError(
            f"{checkpoint} has a model of {self.origin.build}, which is not a jaxtp.Decoder, and "
            "commands that generate, evaluate, score or export take only decoders; in Python, "
            f"{call_of_load(checkpoint, self.origin.build)} returns it"
        )


def load_merged(
    checkpoint: Path,
    info: Info,
    config: ModelConfig,
    mesh: Mesh,
    base: Path | None = None,
) -> Decoder:
    """Returns a checkpoint's model as in `config`, with any adapters merged.

    Raises as `load_run`.
    """
    with jax.set_mesh(mesh):
        graph, abstract = abstract_decoder(config)
    if _has_adapters(info):
        weights = nnx.state(
            merge_adapters(load_adapted(checkpoint, info, mesh, base), dtype=config.precision.param)
        )
    else:
        weights, _ = load_weights(checkpoint, abstract, mesh)
    return nnx.merge(graph, weights)


def merge_peft(model: Decoder, folder: PeftFolder, config: ModelConfig, mesh: Mesh) -> Decoder:
    """Merges PEFT adapters into kernels in float32, rounded once to the dtype of `config`."""
    with jax.set_mesh(mesh):
        added = merge_adapters(with_peft(model, folder, mesh), dtype=config.precision.param)
        return nnx.merge(abstract_decoder(config)[0], nnx.state(added))


def load_adapted(checkpoint: Path, info: Info, mesh: Mesh, base: Path | None = None) -> Decoder:
    """Returns an adapter checkpoint's model with its base weights; see `load_merged`."""
    if BASE not in info:
        raise CheckpointError(f"{checkpoint} does not name the base model of its adapters")
    config = run_model_config(checkpoint, info)
    path = local(info[BASE]["from"]) if base is None else base
    if not path.is_dir():
        where = f"--base {path}" if base is not None else f"{path}, the base model of {checkpoint}"
        raise CheckpointError(f"{where}: no such folder; name the base model by --base DIR")
    weights, origin = load_base(path, config, mesh)
    check_base(info, describe_base(base_checksums(weights, mesh), origin), origin)
    model = load_adapters(checkpoint, config, mesh)
    nnx.update(model, weights)
    return model


def load_adapters(checkpoint: Path, config: ModelConfig, mesh: Mesh) -> Decoder:
    """Returns an adapter checkpoint's model, not in 8 bits; its other parameters are abstract."""
    config = replace(config, lora=replace(config.lora, base="full"))
    with jax.set_mesh(mesh):
        graph, abstract = abstract_decoder(config)
    factors, _ = load_weights(checkpoint, nnx.filter_state(abstract, nnx.LoRAParam), mesh)
    return nnx.merge(graph, nnx.merge_state(abstract, factors))


def run_model_config(checkpoint: Path, info: Info, build: object = None) -> ModelConfig:
    """Returns the configuration of the decoder that a checkpoint records.

    Args:
      checkpoint: for messages.
      info: the checkpoint's info.
      build: as in `own_or_decoder`.

    Raises:
      CheckpointError: as `own_or_decoder`, or the model is no decoder.
    """
    return own_or_decoder(checkpoint, info, build).decoder(checkpoint)


def own_or_decoder(checkpoint: Path, info: Info, build: object = None) -> RecordedModel:
    """Returns the model that a checkpoint records.

    A checkpoint may come from anyone, so no code that it names is imported: the caller gives the
    code of a user's own model as `build`.

    Args:
      checkpoint: for messages.
      info: the checkpoint's info.
      build: a function, a class or settings.

    Raises:
      CheckpointError: no configuration, a model that needs `build`, or one that has no use for it.
      ConfigError: `build` does not take the recorded arguments, or fails.
    """
    stored = info.get("config", {})
    if "model" not in stored:
        raise CheckpointError(
            f"{checkpoint} does not record its model; jaxtp train did not write it"
        )
    stored_origin, model = split_settings(upgrade_settings(stored["model"]), OriginConfig)
    source = f"{checkpoint}: its model"
    origin = validate(OriginConfig, stored_origin, source=source)
    if origin.build is None:
        if build is not None:
            raise CheckpointError(
                f"{checkpoint} has jaxtp's own decoder, which needs no code: leave build out"
            )
        return RecordedModel(validate(ModelConfig, model, source=source), origin)
    if build is None:
        described = truncate(origin.build, 300)
        if origin.arguments:
            described += f" with the arguments {truncate(origin.arguments, 300)}"
        raise CheckpointError(
            f"{checkpoint} has a model of {described}, and jaxtp runs no code that a folder names; "
            "if you trust that code, name it: by --model.build of jaxtp train, by --build of other "
            "commands that have this flag, which take a jaxtp.Decoder, or in Python by "
            f"{call_of_load(checkpoint, truncate(origin.build, 300))}"
        )
    settings = decoder_settings(build, origin)
    if settings is None:
        return RecordedFlaxModel(validate(ModelConfig, model, source=source), origin)
    decoder = validate(type(settings), model, source=source)
    return RecordedModel(replace(decoder, decoder=settings.decoder), origin)


def _has_adapters(info: Info) -> bool:
    return bool(info.get("config", {}).get("model", {}).get("lora", {}).get("rank"))


class _FrozenArrays(Arrays):
    """A base model's parameters as adapters have them, and the checksums of the originals."""

    def __init__(self, abstract: nnx.State, originals: nnx.State, mesh: Mesh):
        super().__init__(nnx.filter_state(abstract, nnx.Not(nnx.LoRAParam)), mesh)
        self._originals = named_variables(originals)
        self._forms = stored_kernels(abstract)
        self._mesh = mesh
        self._totals: dict[str, np.ndarray] = {}

    def put(self, path: str, index: int | None, placed: Array) -> None:
        """Quantises a kernel if it has a form."""
        part = placed if index is None else placed[None]
        sums = _sums(path, self._originals[path].replace(part), self._mesh, index or 0)
        self._totals[path] = self._totals.get(path, 0) + sums.totals[path]
        if path not in self._forms:
            super().put(path, index, placed)
            return
        for field, array in quantise(placed, self._forms[path])._asdict().items():
            super().put(f"{path}.{field}", index, array)

    def checksums(self) -> dict[str, str]:
        """Returns the `base_checksums` of the originals."""
        return {path: as_digits(total) for path, total in self._totals.items()}


def load_frozen(
    path: Path, config: ModelConfig, mesh: Mesh, abstract: nnx.State
) -> tuple[nnx.State, dict[str, str], Path]:
    """Returns a base model's frozen parameters, its `describe_base`, and its path.

    The parameters are as in `abstract`; the description is of the original weights. Of kernels in a
    form, memory holds one in full precision: a layer's from a folder, all layers' from a run. All
    processes must call it.
    """
    with jax.set_mesh(mesh):
        _, originals = abstract_decoder(replace(config, lora=LoraConfig()))
    arrays = _FrozenArrays(abstract, originals, mesh)
    frozen, origin = load_base(path, config, mesh, arrays=arrays)
    return frozen, describe_base(arrays.checksums(), origin), origin


def load_base(
    path: Path,
    config: ModelConfig,
    mesh: Mesh,
    only: Callable[[str], bool] = lambda name: True,
    *,
    has_notes: bool = True,
    new_ids: range | None = None,
    arrays: Arrays | None = None,
) -> tuple[nnx.State, Path]:
    """Returns the base model's parameters in a folder, run or checkpoint, and its path.

    All processes must call it.

    Args:
      only: chooses the parameters by dotted path.
      has_notes: whether to print the folder's notes.
      new_ids: as in `load_state`.
      arrays: as in `load_state`.
    """
    whole = replace(config, lora=LoraConfig())
    if all_gather_json((path / CONFIG).is_file())[0]:
        with jax.set_mesh(mesh), raise_everywhere():
            hf_folder = open_folder(path)
            if has_notes:
                print_notes(hf_folder.path, hf_folder.notes)
            if config.lora.rank:
                check_adaptable(hf_folder.attributes)
            _, state = load_state(hf_folder, whole, mesh, only=only, new_ids=new_ids, arrays=arrays)
            return state, path
    folder, info = read_info_on_all(path, lambda: newest_checkpoint(path))
    if _has_adapters(info):
        raise CheckpointError(
            f"{folder} holds only adapters; merge them by "
            f"`jaxtp convert export {path} DIR --merged` and start from the result: "
            "--model.from-hf DIR"
        )
    with jax.set_mesh(mesh):
        _, abstract = abstract_decoder(whole)
    if arrays is None:
        return load_weights(folder, select_paths(abstract, only), mesh)
    for name in filter(only, named_variables(abstract)):
        weights, origin = load_weights(folder, select_paths(abstract, name.__eq__), mesh)
        arrays.put(name, None, named_arrays(weights)[name])
        del weights
    return arrays.state(), origin


def describe_base(sums: Mapping[str, str], origin: Path) -> dict[str, str]:
    """Returns a base model's folder and hash, for the checkpoints of its adapters."""
    return {"from": recorded(origin), "sha256": fingerprint(sums)}


def base_checksums(weights: nnx.State, mesh: Mesh) -> dict[str, str]:
    """Returns the checksums of a base model's arrays in float32.

    An array in bfloat16 with the same values has the same checksum.
    """
    checksums = dict[str, str]()
    # Only one array at a time is in float32.
    for name, variable in named_variables(weights).items():
        checksums |= _sums(name, variable, mesh).checksums()
    return checksums


def _sums(name: str, variable: Variable, mesh: Mesh, first: int = 0) -> Sums:
    logical = to_logical(nnx.from_flat_state([((name,), variable)]), mesh)
    return Sums({name: logical[name].astype(jnp.float32)}, first)


def check_base(info: Info, now: Mapping[str, str], origin: Path) -> None:
    """Raises `CheckpointError` unless adapters were trained with this base model.

    `now` is its `describe_base`.
    """
    stored = info.get(BASE, {})
    if stored.get("sha256") != now["sha256"]:
        raise CheckpointError(
            "the adapters were trained with the model in "
            f"{stored.get('from', 'a folder that is not recorded')}, and "
            f"the model in {origin} has other values, or another dtype (model.precision.param)"
        )


def copy_hf_files(
    source: Path, run: Path, changes: Mapping[str, bytes] = MappingProxyType({})
) -> None:
    """Copies config.json and tokenizer files to a run, with changes, unless the run has them.

    Copies all files or none; raises `HFError`. If the source has more than a text model, an export
    needs the source, so `ORIGIN` records it.
    """
    if (run / HF_FILES).exists():
        return
    names = [CONFIG, *TOKENIZER_FILES]
    if source.name == HF_FILES:
        names.append(ORIGIN)
    files = {**read_files(source, names), **changes}
    if not files:
        return
    if CONFIG in files and ORIGIN not in files:
        family = family_of(read_attributes(source), str(source / CONFIG))
        if is_part(family):
            files[ORIGIN] = json_bytes({"from": recorded(source)})
    with atomic_folder(run / HF_FILES) as folder:
        write_files(folder, files)


def origin_of(hf_files: Path | None) -> Path | None:
    """Returns the folder of a run's initial model, if it holds more than a text model."""
    if hf_files is None or not (hf_files / ORIGIN).is_file():
        return None
    return local(str(read_json(hf_files, ORIGIN).get("from")))


def family_of_run(checkpoint: Path) -> str | None:
    """Returns the `model_type` in the run's config.json, if any."""
    folder = hf_files_of(checkpoint)
    if folder is None or not (folder / CONFIG).is_file():
        return None
    return read_attributes(folder).get("model_type")


def hf_files_of(checkpoint: Path) -> Path | None:
    """Returns the `HF_FILES` folder of a checkpoint's run, or of a copy of its URL, if any."""
    run = checkpoint.resolve().parent.parent
    folders = (run / HF_FILES, run / RUN_AT_URL / checkpoint.name / HF_FILES)
    return next(filter(Path.is_dir, folders), None)
