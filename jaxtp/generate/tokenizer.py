"""A tokenizer that is named by its place."""

from pathlib import Path

from jaxtp.data.manifest import MANIFEST, TOKENIZER
from jaxtp.data.tokenizer import HuggingFaceTokenizer, Tokenizer, TokenizerError, load_tokenizer, read_tokenizer


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
    file = path / TOKENIZER if path.is_dir() else path
    content = read_tokenizer(file)
    try:
        return HuggingFaceTokenizer(content, str(file), special_tokens=special_tokens)
    except TokenizerError:  # perhaps it is only that no token ends a document, which is no matter here
        return HuggingFaceTokenizer(content, str(file), has_eos=False, special_tokens=special_tokens)
