"""Runs lm-evaluation-harness tasks; importing it needs the extra `eval`.

Requests that differ only in their last token, for example the answers A to D to a question, share a
row. Rows are sorted by length and padded on the right to a few powers of two, each compiled once.
Tokens, windows and the prefix of an empty context are as in the harness's `hf` model, so results
agree.
"""

import itertools
import json
import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
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
    make_table,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from jaxtp.config.entry import Interrupt
from jaxtp.config.hints import closest
from jaxtp.config.schema import ConfigError, nearest_file, validate
from jaxtp.data.chat_template import ChatTemplate
from jaxtp.data.rows import empty_row
from jaxtp.generate.engine import Generator
from jaxtp.generate.loading import ModelSource
from jaxtp.generate.sampling import Settings
from jaxtp.models.decoder import Decoder
from jaxtp.tools.evaluate.evaluation_settings import EvaluateConfig
from jaxtp.tools.evaluate.inputs import check_ids
from jaxtp.tools.evaluate.measure import Scorer, row_length

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
      interrupt: checked after each batch.
    """

    tokenizer_name = ""  # part of the key of cached requests, which are off

    def __init__(
        self,
        model: Decoder,
        source: ModelSource,
        *,
        batch_size: int,
        max_length: int,
        interrupt: Interrupt,
    ):
        super().__init__()
        self.source = source
        self.max_length = max_length
        self._model = model
        self._scorer = Scorer(model, batch_size)
        self._interrupt = interrupt

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
                    self._interrupt.check()
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
                self._interrupt.check()
        return [answers[index] for index in range(len(requests))]

    def _batches(
        self, rows: Iterable[tuple[int, ...]]
    ) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        """Yields batches of rows that are padded to one length, the longest first."""
        longest_first = sorted(rows, key=lambda inputs: (-len(inputs), inputs))
        by_length = itertools.groupby(
            longest_first, lambda inputs: row_length(len(inputs), self.max_length)
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


def open_tasks(names: Sequence[str], folders: Sequence[Path]) -> TaskManager:
    """Finds and loads tasks of the harness and of folders; downloads only data that a task names.

    Raises:
      ConfigError: a task or folder does not exist or cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--task-folder {folder}: no such folder{nearest_file(folder)}")
    paths = list(map(str, folders))
    in_folders = TaskManager(include_path=paths, include_defaults=False).all_tasks if paths else []
    tasks = _Tasks(include_path=paths or None, include_defaults=not set(names) <= set(in_folders))
    for name in names:
        if name not in tasks.all_tasks:
            close = closest(name, tasks.all_tasks)
            hint = "`lm_eval ls tasks` lists the tasks of the harness"
            if close:
                hint = f"did you mean {close}?"
            raise ConfigError(f"--tasks {name}: no such task; {hint}")
    try:
        tasks.load(list(names))
    except Exception as error:  # from YAML, datasets, or a task's code
        message = str(error).strip().partition("\n")[0][:300]
        raise ConfigError(f"--tasks {' '.join(names)}: {type(error).__name__}: {message}") from None
    return tasks


def run(
    model: Decoder, source: ModelSource, tasks: TaskManager, config: EvaluateConfig, length: int
) -> tuple[str, dict[str, object]]:
    """Runs tasks; `length` is the maximum tokens of a request.

    Returns:
      the table of the harness's command, and the results for JSON.

    Raises:
      ConfigError: the model cannot run a task.
    """
    with Interrupt(signal.SIGINT) as interrupt:  # waits for the batch
        results = simple_evaluate(
            JaxtpLM(
                model, source, batch_size=config.batch_size, max_length=length, interrupt=interrupt
            ),
            tasks=list(config.tasks),
            task_manager=tasks,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.chat,
            log_samples=False,
            batch_size=config.batch_size,
        )
    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    names = ("results", "groups", "n-shot", "n-samples", "versions")
    shown = {name: results[name] for name in names if name in results}
    record = json.loads(json.dumps(shown, default=handle_non_serializable))
    return "\n".join(tables).rstrip(), record
