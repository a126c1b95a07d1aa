"""A folder in Hugging Face's format: what its JSON files say of generation; `jaxtp.hf` reads the model itself."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxtp.data.manifest import TOKENIZER
from jaxtp.data.tokenizer import HuggingFaceTokenizer
from jaxtp.generate.described import describe
from jaxtp.generate.source import Options, Source, SourceError, stretched, to_generate
from jaxtp.generate.tokenizer import open_tokenizer
from jaxtp.hf.attributes import read_config
from jaxtp.hf.folder import CONFIG
from jaxtp.hf.load import load_hf
from jaxtp.layers.parameter import Precision
from jaxtp.models.decoder import Decoder


def is_model(folder: Path) -> bool:
    """Whether a folder is one of this kind."""
    return (folder / CONFIG).is_file()


def open_folder(folder: Path, options: Options) -> Source:
    """The model of a folder, with its tokenizer, end tokens and chat template.

    Raises:
      SourceError: a JSON file is damaged, or there is no tokenizer.json.
      HFError: what is not understood of the model.
    """
    config = to_generate(read_config(folder, options.ignore_config), options.dtype)
    if options.tokenizer is None and not (folder / TOKENIZER).is_file():
        raise SourceError(f"{folder} has no {TOKENIZER}; name one by --tokenizer PATH")
    tokenizer = open_tokenizer(options.tokenizer or folder, special_tokens=options.special_tokens)
    described = describe(folder)
    own_end = () if tokenizer.info.eos_id is None else (tokenizer.info.eos_id,)
    return Source(
        name=str(folder),
        config=config,
        tokenizer=tokenizer,
        load=lambda mesh: _load(folder, config.precision, mesh, options.ignore_config),
        end_ids=described.end_ids or frozenset(own_end),
        prefix=tokenizer.prefix if isinstance(tokenizer, HuggingFaceTokenizer) else (),
        template=described.template,
        special_tokens=described.special_tokens,
        context=stretched(described.context, config.rope_scaling),
    )


def _load(folder: Path, precision: Precision, mesh: Mesh, ignore_config: tuple[str, ...]) -> Decoder:
    with jax.set_mesh(mesh):
        return load_hf(folder, precision=precision, ignore_config=ignore_config)
