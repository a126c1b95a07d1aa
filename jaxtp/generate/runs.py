"""A run of `jaxtp.train`: its newest checkpoint has the weights, and says what the model and the data were."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtp.checkpoint.reader import open_checkpoint
from jaxtp.checkpoint.stored import CheckpointError, newest
from jaxtp.config import expand
from jaxtp.data.corpus import PREFIX
from jaxtp.data.manifest import BYTES
from jaxtp.data.tokenizer import ByteTokenizer, Tokenizer
from jaxtp.generate.described import Described, describe
from jaxtp.generate.source import Options, Source, SourceError, stretched, to_generate
from jaxtp.generate.tokenizer import open_tokenizer
from jaxtp.hf.kept import kept_files
from jaxtp.hf.runs import load_merged, model_of


def is_model(folder: Path) -> bool:
    """Whether a folder is that of a run, or of a checkpoint."""
    try:
        newest(folder)
    except CheckpointError:
        return False
    return True


def open_folder(folder: Path, options: Options) -> Source:
    """The newest checkpoint of a run, or the one whose folder it is.

    Raises:
      CheckpointError: it is damaged.
      SourceError: it does not say what model it is of, or its tokenizer is not where it was.
    """
    checkpoint = open_checkpoint(folder)
    config = to_generate(model_of(checkpoint.folder, checkpoint.info), options.dtype)
    tokenizer = _tokenizer(checkpoint.folder, checkpoint.info, options)
    folders = (_place(checkpoint.folder, checkpoint.info, options), kept_files(checkpoint.folder))
    described = [describe(folder) for folder in folders if folder is not None and folder.is_dir()]
    chat = next((said for said in described if said.template is not None), Described())
    end = () if tokenizer.info.eos_id is None else (tokenizer.info.eos_id,)
    return Source(
        name=f"{folder}, step {checkpoint.folder.name}",
        config=config,
        tokenizer=tokenizer,
        load=lambda mesh: load_merged(checkpoint.folder, checkpoint.info, config, mesh, options.base),
        end_ids=frozenset(end).union(*(said.end_ids for said in described)),
        prefix=tuple(checkpoint.info.get("corpus", {}).get(PREFIX, ())),
        template=chat.template,
        special_tokens=chat.special_tokens,
        context=stretched(next((said.context for said in described if said.context), None), config.rope_scaling),
    )


def _place(checkpoint: Path, info: Mapping[str, Any], options: Options) -> Path | None:
    """Where the tokenizer of the data should be, and the chat template that they were made by."""
    data = info["config"].get("data", {})
    places = [options.tokenizer, data.get("path"), next(iter(data.get("mixture") or ()), None), kept_files(checkpoint)]
    return next((expand(Path(place)) for place in places if place is not None), None)


def _tokenizer(checkpoint: Path, info: Mapping[str, Any], options: Options) -> Tokenizer:
    """The one that the run was trained with, which a checksum tells."""
    recorded = info.get("corpus", {}).get("tokenizer")
    if recorded == BYTES:
        if options.tokenizer is not None:
            raise SourceError(f"{checkpoint} was trained on bytes; leave --tokenizer out")
        return ByteTokenizer()
    path = _place(checkpoint, info, options)
    if path is None:
        raise SourceError(f"{checkpoint} does not say which tokenizer it needs; name it by --tokenizer PATH")
    if not path.exists():
        raise SourceError(
            f"the tokenizer of {checkpoint} was in {path}, and there is nothing; name it by --tokenizer PATH"
        )
    tokenizer = open_tokenizer(path, special_tokens=options.special_tokens)
    if recorded is not None and tokenizer.info.sha256 != recorded:
        raise SourceError(f"{path} is not the tokenizer that {checkpoint} was trained with: its sha256 is another")
    return tokenizer
