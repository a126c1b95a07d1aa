"""A tokenizer that is named by its place, and the chat template that lies beside it."""

from pathlib import Path

from jaxtp.data.manifest import MANIFEST
from jaxtp.data.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    read_tokenizer,
    tokenizer_file,
)


def open_tokenizer(path: str | Path, *, special_tokens: bool = False) -> Tokenizer:
    """The tokenizer of a dataset, or a `tokenizer.json`, or the one in a folder.

    Args:
      path: of the folder or file.
      special_tokens: whether text that spells a special token becomes that token.

    Raises:
      DatasetError: an unfinished or damaged dataset.
      TokenizerError: no tokenizer.
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
