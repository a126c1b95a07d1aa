"""What came with a model beside its weights, kept in the folder of each run that begins with it."""

from pathlib import Path

from jaxtp.hf.folder import CONFIG, read_files
from jaxtp.hf.writing import TOKENIZER_FILES, appearing

KEPT = "hf"
"""In a run's folder: config.json and the tokenizer's files, as they came."""


def keep_files(source: Path, run: Path) -> None:
    """Copies them, if there are any and the run has none.

    Args:
      source: a folder in Hugging Face format, or what another run kept of one.
      run: the folder of the run.

    Raises:
      HFError: one cannot be read, or is a link out of the folder; then none is copied.
    """
    if (run / KEPT).exists() or not (found := read_files(source, (CONFIG, *TOKENIZER_FILES))):
        return
    with appearing(run / KEPT) as folder:
        for name, content in found.items():
            (folder / name).write_bytes(content)


def kept_files(checkpoint: Path) -> Path | None:
    """The folder of those of the run that a checkpoint belongs to; None if it has none."""
    folder = checkpoint.resolve().parent.parent / KEPT
    return folder if folder.is_dir() else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)
