"""Runs lm-evaluation-harness tasks; importing it needs the extra `eval`.

Requests that differ only in their last token, for example the answers A to D to a question, share a
row. Rows are sorted by length and padded on the right to a few powers of two, each compiled once.
Tokens, windows and the prefix of an empty context are as in the harness's `hf` model, so results
agree.
"""

import datetime
import io
import itertools
import json
import logging
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
from flax import nnx
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import (
    get_rolling_token_windows,
    handle_non_serializable,
    make_disjoint_window,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from jaxtp.analysis.tables import columns
from jaxtp.config.entry import Interrupt, InterruptError
from jaxtp.config.hints import closest
from jaxtp.config.schema import ConfigError, nearest_file, validate
from jaxtp.data.chat_template import ChatTemplate, writes_day
from jaxtp.data.rows import empty_row
from jaxtp.generate.engine import Generator
from jaxtp.generate.loading import InferenceMeshConfig, ModelSource, StoredModel, source_of
from jaxtp.generate.sampling import Settings
from jaxtp.hf.adapters import merge_adapters
from jaxtp.hf.runs import family_of_run
from jaxtp.mesh import CP, mesh_sizes
from jaxtp.models.decoder import Decoder, abstract_decoder
from jaxtp.tools.evaluate.evaluation_settings import EvaluateConfig, window_length
from jaxtp.tools.evaluate.inputs import check_ids
from jaxtp.tools.evaluate.measure import Scorer, row_length
from jaxtp.train.config import TrainConfig
from jaxtp.train.run_folder import CHECKPOINTS

MAX_NEW_TOKENS = 256  # Default of a task's max_gen_toks, as in the harness's own models
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "seed"}

Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""Context and continuation as texts (None for a window of a text), and as tokens."""
Answer = tuple[float, bool]
"""Log-likelihood of a continuation, and whether every token of it is the argmax."""
Kwargs = Mapping[str, object]


class _Instance(Protocol):
    args: tuple  # type: ignore[type-arg]


class JaxtpLM(TemplateLM):
    """The harness's interface to a model.

    Args:
      max_length: maximum tokens read together.
      check: called after each batch.
    """

    tokenizer_name = ""  # part of the key of cached requests, which are off

    def __init__(
        self,
        model: Decoder,
        source: ModelSource,
        *,
        batch_size: int,
        max_length: int,
        check: Callable[[], None],
    ):
        super().__init__()
        self.source = source
        self.max_length = max_length
        self._model = model
        self._scorer = Scorer(model, batch_size)
        self._check_run = check

    @cached_property
    def _generator(self) -> Generator:
        # Made on first use: it copies the weights, and few tasks generate.
        source = self.source
        rows = self._scorer.batch_size
        return Generator(self._model, source.tokenizer, end_ids=source.end_ids, batch_size=rows)

    @cached_property
    def _template(self) -> ChatTemplate:
        return self.source.chat.template()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return _special_token(self.source, "eos_token", min(self.source.end_ids, default=None))

    @property
    def prefix_token_id(self) -> int:
        """The token of an empty context: the first token of a text, or the end token."""
        return _special_token(
            self.source, "bos_token", next(iter(self.source.prefix), self.eot_token_id)
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Returns a text's tokens after the model's prefix."""
        ids: list[int] = self.source.tokenizer.encode_batch([string])[0].tolist()
        prefix = list(self.source.prefix)
        if add_special_tokens is None:
            add_special_tokens = ids[: len(prefix)] != prefix
        return prefix + ids if add_special_tokens else ids

    def loglikelihood_rolling(
        self, requests: Sequence[_Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns each text's log-likelihood, in `max_length`-token windows without overlap."""
        texts = [request.args[0] for request in requests]
        windows: list[Pair] = []
        owners = []
        for owner, text in enumerate(texts):
            tokens = self.tok_encode(text)
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        logprobs = [logprob for logprob, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        sums: list[float] = np.bincount(owners, logprobs, len(texts)).tolist()
        return sums

    def generate_until(
        self, requests: Sequence[_Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Returns each context's continuation, up to its first stop text."""
        texts: dict[int, str] = {}
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(index)
        eos = self.source.chat.special_tokens.get("eos_token")
        with tqdm(total=len(requests), unit="text", disable=disable_tqdm) as progress:
            for indices in by_settings.values():
                settings, stops = _generation_settings(requests[indices[0]].args[1], eos)
                room = self.max_length - settings.max_tokens
                if room < 1:
                    raise ConfigError(
                        f"a task generates {settings.max_tokens:,} tokens, and the model reads "
                        f"{self.max_length:,} with the context; give a larger --sequence-length if "
                        "the model's context allows it"
                    )
                prompts = [self.tok_encode(requests[index].args[0])[-room:] for index in indices]
                for piece in self._generator.stream(prompts, settings):
                    if piece.result is None:
                        continue
                    ids = np.array(piece.result.ids, np.int32)
                    text = self.source.tokenizer.decode(ids).decode(errors="replace")
                    texts[indices[piece.index]] = postprocess_generated_text(text, stops, None)
                    progress.update()
                    self._check_run()
        return [texts[index] for index in range(len(requests))]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation."""
        arguments = self.source.chat.arguments
        text = self._template.render(
            chat_history, answer=add_generation_prompt, arguments=arguments
        )
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()  # the model continues it
        return text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **ignored: object
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        # Indices of requests by input tokens: all but the last, cut on the left to max_length.
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            self._check(context, continuation)
            tokens = [*context, *continuation][-(self.max_length + 1) :]
            groups.setdefault(tuple(tokens[:-1]), []).append(index)
        with tqdm(total=len(requests), unit="request", disable=disable_tqdm) as progress:
            for length, rows in self._batches(groups):
                score = self._scores(rows, length)
                for row, inputs in enumerate(rows):
                    for index in groups[inputs]:
                        answers[index] = score(row, len(inputs), requests[index][2])
                progress.update(len(answers) - progress.n)
                self._check_run()
        return [answers[index] for index in range(len(requests))]

    def _batches(
        self, rows: Iterable[tuple[int, ...]]
    ) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        """Yields batches of rows that are padded to one length, the longest first."""
        longest_first = sorted(rows, key=lambda inputs: (-len(inputs), inputs))
        parts = self._scorer.sequence_parts
        by_length = itertools.groupby(
            longest_first, lambda inputs: row_length(len(inputs), self.max_length, parts)
        )
        for length, same_length in by_length:
            while batch := list(itertools.islice(same_length, self._scorer.batch_size)):
                yield length, batch

    def _scores(
        self, rows: Sequence[tuple[int, ...]], length: int
    ) -> Callable[[int, int, list[int]], Answer]:
        """Returns a function of a row, its length, and a continuation.

        All tokens of the continuation but the last are at the row's end.
        """
        size = self._scorer.batch_size
        batch = {name: np.stack([array] * size) for name, array in empty_row(length).items()}
        last = np.zeros(size, np.int32)
        for row, inputs in enumerate(rows):
            batch["inputs"][row, : len(inputs)] = inputs
            batch["labels"][row, : len(inputs) - 1] = inputs[1:]
            last[row] = len(inputs) - 1
        scores, next_token = self._scorer.next_token_logprobs(batch, last)
        losses = np.asarray(scores.losses, np.float64)
        correct = np.asarray(scores.correct)
        next_logprobs = np.asarray(next_token)

        def answer(row: int, end: int, continuation: list[int]) -> Answer:
            before = slice(end - len(continuation), end - 1)
            logprobs = next_logprobs[row]
            last_logprob = logprobs[continuation[-1]]
            is_greedy = correct[row, before].all() and last_logprob >= logprobs.max()
            return float(last_logprob) - float(losses[row, before].sum()), bool(is_greedy)

        return answer

    def _check(self, context: Sequence[int], continuation: Sequence[int]) -> None:
        if not (context and continuation):
            raise ConfigError("a task has a context or a continuation without tokens")
        if len(continuation) > self.max_length:
            raise ConfigError(
                f"a continuation has {len(continuation):,} tokens, and the model reads "
                f"{self.max_length:,}; give a larger --sequence-length if the model's context "
                "allows it"
            )
        check_ids(np.array([*context, *continuation]), self.source, "a task")


def _special_token(source: ModelSource, name: str, default: int | None) -> int:
    if name in source.chat.special_tokens:
        ids = source.tokenizer.encode_batch([source.chat.special_tokens[name]])[0]
        if len(ids) == 1:
            return int(ids[0])
    if default is not None:
        return default
    return int(source.tokenizer.encode_batch(["\n"])[0][-1])


def _generation_settings(kwargs: Kwargs, eos: str | None) -> tuple[Settings, list[str]]:
    values = dict(normalize_gen_kwargs(kwargs, MAX_NEW_TOKENS))
    stops: list[str] = handle_stop_sequences(values.pop("until", None), eos)
    max_tokens = values.pop("max_gen_toks")
    do_sample = values.pop("do_sample", False)
    unknown = values.keys() - _SAMPLING
    if unknown:
        raise ConfigError(
            f"a task generates with {', '.join(sorted(unknown))}; known are "
            f"{', '.join(sorted(_SAMPLING))}, do_sample, until and max_gen_toks"
        )
    if not do_sample:
        values = {}
    settings = {**values, "max_tokens": max_tokens, "stop": tuple(filter(None, stops))}
    return validate(Settings, settings, source="generation_kwargs"), stops


class _Tasks(TaskManager):
    """Tasks of one command, which are loaded once although the harness loads them again."""

    _loaded: Any = None

    def load(self, task_list: Any) -> Any:
        if self._loaded is None:
            self._loaded = super().load(task_list)
        return self._loaded


def open_tasks(names: Sequence[str], folders: Sequence[Path], section: str = "") -> TaskManager:
    """Finds and loads tasks of the harness and of folders; downloads only data that a task names.

    Args:
      section: of the settings, in messages (`--eval.tasks`).

    Raises:
      ConfigError: a task or folder does not exist or cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"--{section}task-folder {folder}: no such folder{nearest_file(folder)}"
            )
    paths = list(map(str, folders))
    in_folders = TaskManager(include_path=paths, include_defaults=False).all_tasks if paths else []
    tasks = _Tasks(include_path=paths or None, include_defaults=not set(names) <= set(in_folders))
    for name in names:
        if name not in tasks.all_tasks:
            close = closest(name, tasks.all_tasks)
            hint = "`lm_eval ls tasks` lists the tasks of the harness"
            if close:
                hint = f"did you mean {close}?"
            raise ConfigError(f"--{section}tasks {name}: no such task; {hint}")
    try:
        tasks.load(list(names))
    except Exception as error:  # from YAML, datasets, or a task's code
        message = str(error).strip().partition("\n")[0][:300]
        raise ConfigError(
            f"--{section}tasks {' '.join(names)}: {type(error).__name__}: {message}"
        ) from None
    return tasks


def run(lm: JaxtpLM, tasks: TaskManager, config: EvaluateConfig, **options: Any) -> dict[str, Any]:
    """Returns the harness's results; the options are of `simple_evaluate`.

    Raises:
      ConfigError: the model cannot run a task.
    """
    results: dict[str, Any] = simple_evaluate(
        lm,
        tasks=list(config.tasks),
        task_manager=tasks,
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        apply_chat_template=config.chat,
        log_samples=False,
        batch_size=config.batch_size,
        **options,
    )
    return results


def scores_of(results: Mapping[str, Any]) -> Iterator[tuple[str, str, float, object]]:
    """Yields task or group, metric (`acc`, or `exact_match/FILTER`), score, and standard error."""
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, variant = key.partition(",")
            if variant and not metric.endswith("_stderr") and isinstance(value, int | float):
                name = metric if variant == "none" else f"{metric}/{variant}"
                yield task, name, float(value), values.get(f"{metric}_stderr,{variant}", "N/A")


def described(results: Mapping[str, Any]) -> tuple[str, dict[str, object]]:
    """Returns a table of scores, and the results for JSON."""
    cells = []
    for task, metric, score, error in scores_of(results):
        shown = f"{error:.4f}" if isinstance(error, float) else "-"
        cells.append([task, str(results["n-shot"].get(task, "-")), metric, f"{score:.4f}", shown])
    names = ("results", "groups", "n-shot", "n-samples", "versions")
    chosen = {name: results[name] for name in names if name in results}
    record = json.loads(json.dumps(chosen, default=handle_non_serializable))
    return columns(["", "examples shown", "metric", "score", "standard error"], cells), record


def with_day(source: ModelSource, config: EvaluateConfig) -> tuple[ModelSource, str | None]:
    """Returns a model whose chat template, if tasks use it, writes one day; and the day, if any.

    Raises ConfigError if tasks need a template and the model has none.
    """
    if not config.chat:
        return source, None
    if source.chat.text is None:
        raise ConfigError(f"--chat: {source.name} has no chat template; leave --chat out")
    if not writes_day(source.chat.text):
        return source, None
    day = config.date or source.chat.day or datetime.date.today().isoformat()
    return replace(source, chat=replace(source.chat, day=day)), day


class TasksOfRun:
    """A callback of the trainer that runs tasks on the current weights and logs their scores."""

    def __init__(self, config: TrainConfig):
        if config.origin.build is not None and config.model.decoder is None:
            raise ConfigError(
                f"eval.tasks needs a jaxtp.Decoder, and the model is of {config.origin.build}"
            )
        if config.data.batches is not None and config.origin.from_hf is None:
            raise ConfigError(
                "eval.tasks: the batches are your own, and name no tokenizer; start from a model "
                "that has one (--model.from-hf), or train on data of jaxtp prepare"
            )
        settings = config.eval
        self._every = settings.tasks_every
        self._tasks = open_tasks(settings.tasks, settings.task_folder, "eval.")
        self._config = EvaluateConfig(
            tasks=settings.tasks,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            chat=settings.chat,
            # A micro-batch fits: this needs no gradients.
            batch_size=max(config.data.global_batch_size // config.train.accumulation, 1),
        )
        self._source: ModelSource | None = None

    def __call__(self, trainer: Any, step: Any) -> None:
        """Runs the tasks after a step, if it is their turn."""
        if self._source is None:
            # Not at the first turn: an error would come late.
            self._source = self._open(trainer)
        is_last = step.index == trainer.config.train.steps
        if not is_last and not (self._every and step.index % self._every == 0):
            return
        scores: dict[str, float] = {}
        interrupt = Interrupt()
        with interrupt, suppress(InterruptError), trainer.paused("tasks") as still_works:

            def check() -> None:
                still_works()
                interrupt.check()

            scores = self._scores(trainer, self._source, check)
        if interrupt.received is not None:
            # The run stops and saves.
            signal.raise_signal(signal.Signals[interrupt.received])
        if not scores:
            return
        trainer.log(scores)
        shown = ", ".join(f"{name} {score:.4g}" for name, score in scores.items())
        trainer.line(f"step {step.index}: {shown}")

    def _open(self, trainer: Any) -> ModelSource:
        model = trainer.model.config
        run = trainer.config.run.dir
        checkpoint = run / CHECKPOINTS / str(trainer.step)
        family = family_of_run(checkpoint)
        stored = StoredModel(checkpoint, model, model.precision.param, family, trainer.info)
        source, day = with_day(
            source_of(stored, str(run), self._config.source_options), self._config
        )
        if day is not None:
            trainer.line(f"the chat template of the tasks writes the day {day}")
        return source

    def _scores(
        self, trainer: Any, source: ModelSource, check: Callable[[], None]
    ) -> dict[str, float]:
        cp = mesh_sizes(trainer.mesh)[CP]
        config = replace(self._config, mesh=InferenceMeshConfig(cp=cp))
        merged = merge_adapters(trainer.model, dtype=source.config.precision.param)
        model = nnx.merge(abstract_decoder(source.config)[0], nnx.state(merged))
        lm = JaxtpLM(
            model,
            source,
            batch_size=config.batch_size,
            max_length=window_length(config, source),
            check=check,
        )
        # The harness seeds these generators, which a user's batches may use.
        python_state = random.getstate()
        numpy_state = np.random.get_state()
        try:
            # Standard errors would take processes, which JAX's threads do not survive.
            options = {"bootstrap_iters": 0, "torch_random_seed": None}
            # The harness's bars would cut the lines of the run.
            with redirect_stderr(io.StringIO()):
                results = run(lm, self._tasks, config, **options)
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        return {f"eval_{task}/{metric}": score for task, metric, score, _ in scores_of(results)}
