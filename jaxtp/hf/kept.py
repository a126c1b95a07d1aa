"""What came with a model beside its weights, kept in the folder of each run that begins with it."""

import shutil
from pathlib import Path

from jaxtp.hf.folder import CONFIG, inside
from jaxtp.hf.writing import TOKENIZER_FILES

KEPT = "hf"
"""In a run's folder: config.json and the tokenizer's files, as they came."""


def keep_files(source: Path, run: Path) -> None:
    """Copies them, if there are any and the run has none.

    Args:
      source: a folder in Hugging Face format, or what another run kept of one.
      run: the folder of the run.

    Raises:
      HFError: one is a link out of the folder.
    """
    found = [name for name in (CONFIG, *TOKENIZER_FILES) if (source / name).exists()]
    if not found or (run / KEPT).exists():
        return
    (run / KEPT).mkdir()
    for name in found:
        shutil.copyfile(inside(source, name), run / KEPT / name)


def kept_files(checkpoint: Path) -> Path | None:
    """The folder of those of the run that a checkpoint belongs to; None if it has none."""
    folder = checkpoint.resolve().parent.parent / KEPT
    return folder if folder.is_dir() else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)
