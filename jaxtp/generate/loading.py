"""Opens the model at a path to generate from: its weights, tokenizer, chat template and defaults.

The path is that of a run of `jaxtp train`, of one of its checkpoints, or of a folder in Hugging Face format.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxtp.checkpoint.reader import Stored, open_checkpoint
from jaxtp.checkpoint.stored import finished
from jaxtp.config import expand, nearest_file
from jaxtp.data.corpus import PREFIX
from jaxtp.data.manifest import BYTES, MANIFEST, TOKENIZER
from jaxtp.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    read_tokenizer,
    tokenizer_file,
)
from jaxtp.data.tokenizer_files import (
    GENERATION,
    MODEL_CONFIG,
    TokenizerError,
    chat_template,
    context,
    end_ids,
    special_tokens,
)
from jaxtp.entry import UserError
from jaxtp.generate.config import SourceConfig, default_dtype
from jaxtp.hf import peft
from jaxtp.hf.attributes import read_config, stored_dtype
from jaxtp.hf.folder import CONFIG, read_attributes
from jaxtp.hf.load import load_hf
from jaxtp.hf.peft_load import PeftFolder, open_peft
from jaxtp.hf.runs import kept_family, kept_files, load_merged, merge_peft, model_of
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import DType
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder


class SourceError(UserError):
    """A path from which no model can be read, or a model without its tokenizer."""


@dataclass(frozen=True)
class Source:
    """A model on disk, of which everything but the weights has been read."""

    name: str
    """Its name in messages."""

    config: ModelConfig
    """The configuration to run it with."""

    tokenizer: Tokenizer

    load: Callable[[Mesh], Decoder]
    """Reads the weights onto a mesh."""

    end_ids: frozenset[int]
    """Tokens that end a text."""

    prefix: tuple[int, ...]
    """Tokens that the model expects before a text."""

    template: str | None
    """Chat template, in Jinja."""

    special_tokens: Mapping[str, str]
    """The text of the special tokens that the template may name, such as bos_token."""

    context: int | None
    """The most tokens of a prompt and its text that the model was made for; None where nothing says so."""


def open_source(path: Path, asked: SourceConfig = SourceConfig()) -> Source:
    """Returns the model at a path.

    Args:
      path: the folder.
      asked: settings that replace what the model has or says itself: dtype, tokenizer, base, adapters, special_tokens
        and ignore_config.

    Raises:
      SourceError: there is no model, or it has no tokenizer.
      ValueError: it is damaged or not understood (`CheckpointError`, `DatasetError`, `TokenizerError`, `ConfigError`,
        `HFError`).
    """
    if not os.path.isdir(path):  # unlike Path's, it takes names of any length
        what = "is no folder" if os.path.exists(path) else "no such folder"
        raise SourceError(f"--model {path}: {what}{nearest_file(path)}")
    if (path / CONFIG).is_file():
        return _open_hf(path, asked)
    if finished(path):
        return _open_run(path, asked)
    if (path / peft.CONFIG).is_file():
        raise SourceError(
            f"--model {path}: adapters in PEFT's format, without their model; give that, and these by --adapters {path}"
        )
    raise SourceError(
        f"--model {path}: no run with a finished checkpoint, and no model in Hugging Face's format (config.json)"
    )


def _open_hf(folder: Path, asked: SourceConfig) -> Source:
    stored = read_config(folder, asked.ignore_config)
    config = _inference_config(stored, asked.dtype or default_dtype(stored_dtype(folder)))
    adapters = _adapters(asked, stored, read_attributes(folder).get("model_type"))
    if asked.tokenizer is None and not (folder / TOKENIZER).is_file():
        raise SourceError(f"{folder} has no {TOKENIZER}; name one by --tokenizer PATH")
    tokenizer = open_tokenizer(asked.tokenizer or folder, special_tokens=asked.special_tokens)

    def load(mesh: Mesh) -> Decoder:
        with jax.set_mesh(mesh):
            precision = config.precision if adapters is None else None
            model = load_hf(folder, precision=precision, ignore_config=asked.ignore_config)
            return model if adapters is None else merge_peft(model, adapters, config, mesh)

    return Source(
        name=_named(str(folder), adapters),
        config=config,
        tokenizer=tokenizer,
        load=load,
        end_ids=_end_ids(folder) or tokenizer.info.end_ids,
        prefix=tokenizer.prefix if isinstance(tokenizer, HuggingFaceTokenizer) else (),
        template=chat_template(folder),
        special_tokens=special_tokens(folder),
        context=_context([folder], config),
    )


def _open_run(path: Path, asked: SourceConfig) -> Source:
    """Returns the model of the newest checkpoint of a run, or of the checkpoint whose folder is given."""
    if asked.ignore_config:
        raise SourceError(f"--ignore-config is of a model in Hugging Face's format, and {path} is a run")
    checkpoint = open_checkpoint(path)
    folder, info = checkpoint.folder, checkpoint.info
    trained = model_of(folder, info)
    config = _inference_config(trained, asked.dtype)
    if trained.lora.rank and asked.adapters is not None:
        raise SourceError(
            f"--adapters {asked.adapters}: {path} has adapters of its own; make a model of these first, by `python -m "
            f"jaxtp.convert export {path} DIR --merged`, and give that by --model"
        )
    adapters = _adapters(asked, trained, kept_family(folder))

    def load(mesh: Mesh) -> Decoder:
        if adapters is None:
            return load_merged(folder, info, config, mesh, asked.base)
        return merge_peft(load_merged(folder, info, trained, mesh), adapters, config, mesh)

    place = _tokenizer_place(checkpoint, asked.tokenizer)
    tokenizer = _tokenizer_of_run(checkpoint, place, asked)
    folders = [found for found in (place, kept_files(folder)) if found is not None and found.is_dir()]
    template, names = _chat(folders)
    return Source(
        name=_named(f"{path}, step {folder.name}", adapters),
        config=config,
        tokenizer=tokenizer,
        load=load,
        end_ids=tokenizer.info.end_ids.union(*map(_end_ids, folders)),
        prefix=tuple(info.get("corpus", {}).get(PREFIX, ())),
        template=template,
        special_tokens=names,
        context=_context(folders, config),
    )


def _adapters(asked: SourceConfig, model: ModelConfig, family: str | None) -> PeftFolder | None:
    """Returns the adapters that are asked for, compared with the model."""
    return None if asked.adapters is None else open_peft(asked.adapters, model, family)


def _named(model: str, adapters: PeftFolder | None) -> str:
    return model if adapters is None else f"{model} with {adapters.path}"


def _inference_config(config: ModelConfig, dtype: DType | None) -> ModelConfig:
    """Returns a model's configuration without what only training needs.

    Weights are stored in the dtype that they are multiplied in: layers cast to it anyway, before anything else.
    """
    compute = dtype or default_dtype(config.precision.compute)
    return replace(
        config,
        attention="auto",  # whatever the run was trained with, perhaps elsewhere; and so for experts
        grouped="auto",
        dropout=0.0,
        remat="none",
        sequence_parallel=None,
        lora=LoraConfig(),
        precision=replace(config.precision, param=compute, compute=compute),
    )


def _tokenizer_place(checkpoint: Stored, asked: Path | None) -> Path | None:
    """Returns where the tokenizer of a run's data should be, and the chat template that they were made by."""
    data = checkpoint.info["config"].get("data", {})
    mixture = next(iter(data.get("mixture") or ()), None)
    places = (asked, data.get("path"), mixture, kept_files(checkpoint.folder))
    return next((expand(Path(place)) for place in places if place is not None), None)


def _tokenizer_of_run(checkpoint: Stored, place: Path | None, asked: SourceConfig) -> Tokenizer:
    """Returns the tokenizer that a run was trained with, which its checksum proves."""
    folder, recorded = checkpoint.folder, checkpoint.info.get("corpus", {}).get("tokenizer")
    if recorded == BYTES:
        if asked.tokenizer is not None:
            raise SourceError(f"{folder} was trained on bytes; leave --tokenizer out")
        return ByteTokenizer()
    if place is None:
        raise SourceError(f"{folder} does not say which tokenizer it needs; name it by --tokenizer PATH")
    if not place.exists():
        raise SourceError(
            f"the tokenizer of {folder} was in {place}, and there is nothing; name it by --tokenizer PATH"
        )
    tokenizer = open_tokenizer(place, special_tokens=asked.special_tokens)
    if recorded is not None and tokenizer.info.sha256 != recorded:
        raise SourceError(f"{place} is not the tokenizer that {folder} was trained with: its sha256 is another")
    return tokenizer


def open_tokenizer(path: str | Path, *, special_tokens: bool = False) -> Tokenizer:
    """Returns the tokenizer of a dataset, of a `tokenizer.json`, or of a folder that has one.

    Args:
      path: the folder or file.
      special_tokens: whether text that spells a special token becomes that token.

    Raises:
      DatasetError: the dataset is unfinished or damaged.
      TokenizerError: there is no tokenizer.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return load_tokenizer(path, special_tokens=special_tokens)
    file = tokenizer_file(path)
    content = read_tokenizer(file)
    try:
        return HuggingFaceTokenizer(content, str(file), special_tokens=special_tokens)
    except TokenizerError:  # perhaps it is only that no token ends a document, which is no matter here
        return HuggingFaceTokenizer(content, str(file), has_eos=False, special_tokens=special_tokens)


def _chat(folders: Sequence[Path]) -> tuple[str | None, Mapping[str, str]]:
    """Returns the first chat template in some folders, with the special tokens of its folder."""
    found = ((chat_template(folder), folder) for folder in folders)
    return next(((text, special_tokens(folder)) for text, folder in found if text is not None), (None, {}))


def _end_ids(folder: Path) -> frozenset[int]:
    return frozenset(end_ids(folder / GENERATION) or end_ids(folder / MODEL_CONFIG))  # the first may name several


def _context(folders: Sequence[Path], config: ModelConfig) -> int | None:
    """Returns the context that a config.json in some folders gives, stretched by the scaling of rotary embeddings."""
    length = next((found for folder in folders if (found := context(folder / MODEL_CONFIG)) is not None), None)
    scaling = config.rope_scaling
    if length is None or scaling.kind == "none":
        return length
    return max(length, int((length if scaling.kind == "linear" else scaling.original_length) * scaling.factor))
