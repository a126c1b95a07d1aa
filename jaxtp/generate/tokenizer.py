"""A tokenizer that is named by its place, and the chat template that lies beside it."""

from pathlib import Path

from jaxtp.data.companions import CompanionError, chat_template, special_tokens
from jaxtp.data.manifest import MANIFEST, TOKENIZER
from jaxtp.data.tokenizer import HuggingFaceTokenizer, Tokenizer, TokenizerError, load_tokenizer, read_tokenizer
from jaxtp.generate.source import SourceError


def open_tokenizer(path: Path, *, special_tokens: bool = False) -> Tokenizer:
    """The tokenizer of a dataset, or a `tokenizer.json`, or the one in a folder.

    Args:
      path: of the folder or file.
      special_tokens: whether text that spells a special token becomes that token.

    Raises:
      DatasetError: an unfinished or damaged dataset.
      TokenizerError: no tokenizer.
    """
    if (path / MANIFEST).is_file():
        return load_tokenizer(path, special_tokens=special_tokens)
    file = path / TOKENIZER if path.is_dir() else path
    content = read_tokenizer(file)
    try:
        return HuggingFaceTokenizer(content, str(file), special_tokens=special_tokens)
    except TokenizerError:  # perhaps it is only that no token ends a document, which is no matter here
        return HuggingFaceTokenizer(content, str(file), has_eos=False, special_tokens=special_tokens)


def chat_of(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template of a folder, if it has one, and the special tokens that it may name.

    Raises:
      SourceError: a JSON file is damaged.
    """
    try:
        return chat_template(folder), special_tokens(folder)
    except CompanionError as error:
        raise SourceError(str(error)) from None
