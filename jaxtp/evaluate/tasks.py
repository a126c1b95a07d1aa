"""Tasks of lm-evaluation-harness: found and loaded before the model is, run, and shown; needs the extra `eval`."""

import difflib
import json
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from jaxtp.config import nearest_file, to_plain
from jaxtp.evaluate.config import EvaluateConfig
from jaxtp.evaluate.harness import HarnessError, JaxtpLM
from jaxtp.files import fingerprint
from jaxtp.generate.loading import Source
from jaxtp.interrupt import Interrupt
from jaxtp.models.decoder import Decoder

_NEAREST = 3
"""Names in a message at most."""


class Tasks(TaskManager):
    """Tasks that have been found and loaded; what the harness then asks to be loaded is these.

    Those of the harness itself are looked for only where a name is not that of one in the folders. Nothing is
    downloaded but the data of tasks that say so.

    Args:
      names: tasks and groups.
      folders: folders of tasks of one's own.

    Raises:
      HarnessError: there is no such task or folder, or it cannot be loaded.
    """

    def __init__(self, names: Sequence[str], folders: Sequence[Path]):
        for folder in folders:
            if not folder.is_dir():
                raise HarnessError(f"--task-folder {folder}: no such folder{nearest_file(folder)}")
        paths = [str(folder) for folder in folders]
        own = TaskManager(include_path=paths, include_defaults=False).all_tasks if paths else []
        super().__init__(include_path=paths or None, include_defaults=not set(names) <= set(own))
        if missing := [name for name in names if name not in self.all_tasks]:
            raise HarnessError("; ".join(self._unknown(name) for name in missing))
        self._loaded: Any = None
        self.load(list(names))

    def load(self, task_list: Any) -> Any:
        """Returns the tasks; the first time they are loaded, with their data.

        Raises:
          HarnessError: they cannot be.
        """
        if self._loaded is None:
            try:
                self._loaded = super().load(task_list)
            except Exception as error:  # of YAML, of the library datasets, and whatever a task's own code raises
                said = str(error).strip().partition("\n")[0][:300]
                raise HarnessError(f"--tasks {' '.join(task_list)}: {type(error).__name__}: {said}") from None
        return self._loaded

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.all_tasks, n=_NEAREST, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "`lm_eval ls tasks` lists those of the harness"
        return f"--tasks {name}: no such task; {hint}"


def quieten() -> None:
    """Keeps the harness's log lines and the progress bars of its data out of the output."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def run(model: Decoder, source: Source, tasks: Tasks, config: EvaluateConfig, length: int) -> dict[str, Any]:
    """Returns the harness's results.

    Args:
      model: the model.
      source: what was opened.
      tasks: the tasks.
      config: the command line.
      length: the most tokens of a request.

    Raises:
      HarnessError: a task asks for what the model cannot.
    """
    cache = None if config.cache is None else str(config.cache / _identity(config, source, length))
    with Interrupt(signal.SIGINT) as interrupt:  # it waits for the batch, as that of `measure` does
        found = simple_evaluate(
            JaxtpLM(model, source, batch_size=config.batch_size, max_length=length, interrupt=interrupt),
            tasks=list(config.tasks),
            task_manager=tasks,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            use_cache=cache,
            apply_chat_template=config.chat,
            log_samples=False,
            batch_size=config.batch_size,
        )
    assert found is not None
    return found


def as_table(results: dict[str, Any]) -> str:
    """Returns the results as the harness's own command prints them."""
    groups = [make_table(results, "groups")] if results.get("groups") else []
    return "\n".join([make_table(results), *groups]).rstrip()


def as_record(results: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Returns the results for machines, as plain values."""
    kept = {name: results[name] for name in ("results", "groups", "n-shot", "n-samples", "versions") if name in results}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=handle_non_serializable))
    return {**about, **plain}


def _identity(config: EvaluateConfig, source: Source, length: int) -> str:
    """Returns a name for a model's answers that no other model has: of its files, and of how it is run."""
    folders = [folder for folder in (config.model, config.base, config.adapters) if folder is not None]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    seen = [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return fingerprint([source.name, source.tokenizer.info.name, length, to_plain(source.config), seen])[:32]
