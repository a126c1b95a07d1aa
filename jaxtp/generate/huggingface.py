"""A folder in Hugging Face's format: what its JSON files say of generation; `jaxtp.hf` reads the model itself."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtp.data.tokenizer import HuggingFaceTokenizer
from jaxtp.generate.source import Options, Source, SourceError, to_generate
from jaxtp.generate.tokenizer import open_tokenizer
from jaxtp.hf.attributes import read_config
from jaxtp.hf.folder import CONFIG
from jaxtp.hf.load import load_hf
from jaxtp.layers.precision import Precision
from jaxtp.models.decoder import Decoder

GENERATION = "generation_config.json"
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def is_model(folder: Path) -> bool:
    """Whether a folder is one of this kind."""
    return (folder / CONFIG).is_file()


def open_folder(folder: Path, options: Options) -> Source:
    """The model of a folder, with its tokenizer, end tokens and chat template.

    Raises:
      SourceError: a JSON file is damaged.
      TokenizerError: it has no tokenizer.json.
      HFError: what is not understood of the model.
    """
    config = to_generate(read_config(folder), options.dtype)
    tokenizer = open_tokenizer(options.tokenizer or folder, special_tokens=options.special_tokens)
    described = _read(folder / TOKENIZER_CONFIG)
    own_end = () if tokenizer.info.eos_id is None else (tokenizer.info.eos_id,)
    return Source(
        name=str(folder),
        config=config,
        tokenizer=tokenizer,
        load=lambda mesh: _load(folder, config.precision, mesh),
        end_ids=frozenset(_end_ids(folder)) or frozenset(own_end),
        prefix=tokenizer.prefix if isinstance(tokenizer, HuggingFaceTokenizer) else (),
        template=_template(folder, described),
        special_tokens=dict(_special_tokens(described)),
    )


def _load(folder: Path, precision: Precision, mesh: Mesh) -> Decoder:
    with jax.set_mesh(mesh):
        return load_hf(folder, precision=precision)


def _end_ids(folder: Path) -> list[int]:
    """Those of the generation's configuration, which may be several; or else the model's."""
    for name in (GENERATION, CONFIG):
        ids = _read(folder / name).get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(token, int) for token in listed):
                raise SourceError(f"{folder / name}: eos_token_id = {ids}: should be ids")
            return listed
    return []


def _template(folder: Path, described: Mapping[str, Any]) -> str | None:
    """The file beside the tokenizer; or what its configuration has: one, or several by name."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    template = described.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = described.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            yield name, text


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(record, dict):
        raise SourceError(f"{path}: expected a JSON object, found {type(record).__name__}")
    return record
