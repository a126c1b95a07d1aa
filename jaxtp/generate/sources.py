"""The kinds of model on disk: a run of ours, or a folder in Hugging Face's format. A further kind is a line here."""

import os
from pathlib import Path

from jaxtp.config import nearest_file
from jaxtp.generate import huggingface, runs
from jaxtp.generate.source import Options, Source, SourceError
from jaxtp.hf.peft import CONFIG as ADAPTERS


def open_source(folder: Path, options: Options = Options()) -> Source:
    """What is in a folder.

    Raises:
      SourceError: no model, or none with a tokenizer.
      ValueError: it is damaged, or not understood (`CheckpointError`, `DatasetError`, `TokenizerError`, `ConfigError`).
    """
    if not os.path.isdir(folder):  # unlike Path's, it takes names of any length
        what = "is no folder" if os.path.exists(folder) else "no such folder"
        raise SourceError(f"--model {folder}: {what}{nearest_file(folder)}")
    for kind in (huggingface, runs):
        if kind.is_model(folder):
            if options.ignore_config and kind is runs:
                raise SourceError(f"--ignore-config is of a model in Hugging Face's format, and {folder} is a run")
            return kind.open_folder(folder, options)
    if (folder / ADAPTERS).is_file():
        raise SourceError(
            f"--model {folder}: adapters in PEFT's format, without their model; give the run that trained them, or "
            "export it with --merged"
        )
    raise SourceError(
        f"--model {folder}: no run with a finished checkpoint, and no model in Hugging Face's format (config.json)"
    )
