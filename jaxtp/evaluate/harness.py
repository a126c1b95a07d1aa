"""The model class for lm-evaluation-harness; importing this needs the extra `eval`, and registers it as `jaxtp`.

Requests that differ in nothing but their last token are one row: so the answers A to D to a question take one forward
pass. Rows are sorted by length and padded on the right to a few powers of two, each compiled once. Tokens, windows and
what comes before an empty context are as in the harness's own `hf` model, so that the numbers are the same.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from jaxtp.config import validate
from jaxtp.console import Display
from jaxtp.data.rows import Row, empty_row
from jaxtp.data.template import ChatTemplate
from jaxtp.entry import UserError
from jaxtp.evaluate.config import EvaluateConfig, check
from jaxtp.evaluate.lengths import request_length
from jaxtp.evaluate.scoring import Scorer
from jaxtp.evaluate.windows import row_of
from jaxtp.generate.config import open_mesh, request_devices
from jaxtp.generate.engine import Generator
from jaxtp.generate.loading import Source, open_source
from jaxtp.generate.settings import GenerationSettings
from jaxtp.interrupt import Interrupt
from jaxtp.mesh import AXES
from jaxtp.models.decoder import Decoder

NAME = "jaxtp"
"""Name of the model class in the harness."""

MAX_NEW_TOKENS = 256
"""Tokens of a generated text at most where a task does not say, as in the harness's own models."""

_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}

T = TypeVar("T")
Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""Context and continuation as texts, None of a window, and as tokens."""


class HarnessError(UserError):
    """Tasks that do not exist, or ask for what the model cannot."""


@register_model(NAME)
class JaxtpLM(TemplateLM):
    """A model on its mesh, as the harness calls it.

    Args:
      model: the model.
      source: what was opened, its tokenizer among it.
      batch_size: number of rows that are read together.
      max_length: the most tokens that are read together.
      interrupt: asked after each batch whether to go on.
    """

    def __init__(
        self,
        model: Decoder,
        source: Source,
        *,
        batch_size: int,
        max_length: int,
        interrupt: Interrupt | None = None,
    ):
        super().__init__()
        self.source, self.max_length = source, max_length
        self._model, self._scorer = model, Scorer(model, batch_size)
        self._interrupt = interrupt or Interrupt()
        self._template: ChatTemplate | None = None

    @cached_property
    def _generator(self) -> Generator:
        """The generator, which takes memory for the weights once more: few tasks generate."""
        source, rows = self.source, self._scorer.batch_size
        return Generator(self._model, source.tokenizer, end_ids=source.end_ids, prefix=(), batch_size=rows)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "JaxtpLM":
        """Returns the model that `--model jaxtp --model_args model=DIR,tp=2` of the harness's own command asks for.

        Args:
          arg_dict: settings of `EvaluateConfig`, and sizes of the mesh by the names of its axes.
          additional_config: what other flags say; of these the batch size counts.

        Raises:
          ValueError: a user's mistake.
        """
        given = dict(arg_dict)
        axes = {axis: given.pop(axis) for axis in AXES if axis in given}
        size = (additional_config or {}).get("batch_size")
        if str(size).isdecimal():  # auto leaves it to the model
            given.setdefault("batch_size", int(str(size)))
        config = validate(EvaluateConfig, {**given, "mesh": axes, "tasks": (NAME,)}, source="model_args")
        check(config)
        assert config.model is not None
        request_devices(config.mesh)
        source = open_source(config.model, config.of_model)
        length, mesh = request_length(config, source), open_mesh(config.mesh, source.config)
        return cls(source.load(mesh), source, batch_size=config.batch_size, max_length=length)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "JaxtpLM":
        """Returns what `create_from_arg_obj` does, from `model=DIR,tp=2`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._named("eos_token", min(self.source.end_ids, default=None))

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: the first of a text, or the one that ends the text before."""
        return self._named("bos_token", next(iter(self.source.prefix), self.eot_token_id))

    @property
    def tokenizer_name(self) -> str:
        """A name that no other tokenizer has."""
        return self.source.tokenizer.info.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the tokens of a text, behind those that the model expects before one."""
        ids = self.source.tokenizer.encode_batch([string])[0].tolist()
        prefix = list(self.source.prefix)
        if add_special_tokens is False or (add_special_tokens is None and ids[: len(prefix)] == prefix):
            return ids
        return [*prefix, *ids]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, in windows of `max_length` tokens that do not overlap."""
        texts = [request.args[0] for request in requests]
        windows: list[Request] = []
        owners = []
        for owner, text in enumerate(texts):
            tokens = self.tok_encode(text)
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        found = self._loglikelihood_tokens(windows, disable_tqdm)
        sums = np.bincount(owners, [logprob for logprob, _ in found], len(texts)).tolist()
        for text, value in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), value)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that goes on from each context, up to one of its stop texts."""
        found: dict[int, str] = {}
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(index)
        with self._progress("texts", len(requests), disable_tqdm) as progress:
            for indices in by_settings.values():
                asked = requests[indices[0]].args[1]
                settings, stops = self._settings(asked)
                room = self.max_length - settings.max_tokens
                if room < 1:
                    raise HarnessError(
                        f"a task asks for texts of {settings.max_tokens:,} tokens, and the model reads "
                        f"{self.max_length:,} with the context; a larger --sequence-length reads more, where the model "
                        "was made for it"
                    )
                prompts = {index: self.tok_encode(requests[index].args[0])[-room:] for index in indices}
                for piece in self._generator.stream([prompts[index] for index in indices], settings):
                    if piece.result is None:
                        continue
                    index, ids = indices[piece.index], np.array(piece.result.ids, np.int32)
                    text = self.source.tokenizer.decode(ids).decode(errors="replace")
                    found[index] = postprocess_generated_text(text, stops, None)
                    self.cache_hook.add_partial("generate_until", (requests[index].args[0], asked), found[index])
                    progress(len(found))
                    self._interrupt.check()
        return [found[index] for index in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation as text, by the model's chat template."""
        text = self._chat.render(chat_history, answer=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()  # which the model goes on from
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the model's chat template, if one is asked for."""
        return self.source.template if chat_template else None

    @property
    def _chat(self) -> ChatTemplate:
        if self._template is None:
            if self.source.template is None:
                raise HarnessError(f"{self.source.name} has no chat template; leave --chat out")
            name = f"the chat template of {self.source.name}"
            self._template = ChatTemplate(self.source.template, name, self.source.special_tokens)
        return self._template

    def _named(self, name: str, otherwise: int | None) -> int:
        """Returns the special token of a name, else another one, else a line break."""
        text = self.source.special_tokens.get(name)
        ids = [] if text is None else self.source.tokenizer.encode_batch([text])[0].tolist()
        if len(ids) == 1:
            return int(ids[0])
        return int(self.source.tokenizer.encode_batch(["\n"])[0][-1]) if otherwise is None else otherwise

    def _settings(self, asked: dict[str, Any]) -> tuple[GenerationSettings, list[str]]:
        """Returns how texts are generated, and the texts that end them, as a task says it."""
        given = dict(normalize_gen_kwargs(asked, MAX_NEW_TOKENS))
        eos = self.source.special_tokens.get("eos_token")
        stops = handle_stop_sequences(given.pop("until", None), eos)
        most, sampled = given.pop("max_gen_toks"), given.pop("do_sample", False)
        if unknown := given.keys() - _SAMPLING:
            raise HarnessError(
                f"a task asks to generate with {', '.join(sorted(unknown))}; known are {', '.join(sorted(_SAMPLING))}, "
                "do_sample, until and max_gen_toks"
            )
        kept = given if sampled else {k: v for k, v in given.items() if k == "repetition_penalty"}
        values = {**kept, "max_tokens": most, "stop": tuple(stop for stop in stops if stop)}
        return validate(GenerationSettings, values, source="generation_kwargs"), stops

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether each of its tokens is the likeliest."""
        found: dict[int, tuple[float, bool]] = {}
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            self._check(context, continuation)
            groups.setdefault(self._inputs(context, continuation), []).append(index)
        shared = {inputs for inputs, members in groups.items() if len({requests[i][2][-1] for i in members}) > 1}
        with self._progress("requests", len(requests), disable_tqdm) as progress:
            for several in (False, True):
                alike = [inputs for inputs in groups if (inputs in shared) is several]
                for some, length in self._batches(alike):
                    answers = self._answers(
                        some, length, [[requests[i] for i in groups[each]] for each in some], several
                    )
                    for index, answer in zip((i for each in some for i in groups[each]), answers, strict=True):
                        found[index] = answer
                        if (pair := requests[index][0]) is not None:
                            self.cache_hook.add_partial("loglikelihood", pair, answer)
                    progress(len(found))
                    self._interrupt.check()
        return [found[index] for index in range(len(requests))]

    def _check(self, context: Sequence[int], continuation: Sequence[int]) -> None:
        if not (context and continuation):
            raise HarnessError("a task asks for a continuation, or goes on from a context, that has no token")
        if len(continuation) > self.max_length:
            raise HarnessError(
                f"a continuation has {len(continuation):,} tokens, and the model reads {self.max_length:,}; a larger "
                "--sequence-length reads more, where the model was made for it"
            )
        if (largest := max(*context, *continuation)) >= (size := self._scorer.config.vocab_size):
            raise HarnessError(f"the token {largest} is beyond the {size:,} of {self.source.name}")

    def _inputs(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """Returns what the model reads: all tokens but the last, and of these the last that fit."""
        return tuple([*context, *continuation][-(self.max_length + 1) :][:-1])

    def _batches(self, groups: list[tuple[int, ...]]) -> Iterator[tuple[list[tuple[int, ...]], int]]:
        """Yields inputs whose rows have one length, the longest first, as many as a batch holds; and that length."""
        longest_first = sorted(groups, key=lambda inputs: (-len(inputs), inputs))
        for length, alike in itertools.groupby(longest_first, lambda inputs: row_of(len(inputs), self.max_length)):
            for some in _batched(list(alike), self._scorer.batch_size):
                yield some, length

    def _answers(
        self, inputs: list[tuple[int, ...]], length: int, requests: list[list[Request]], several: bool
    ) -> list[tuple[float, bool]]:
        """Returns the answers to the requests of each row of a batch.

        Args:
          inputs: tokens of each row.
          length: T.
          requests: those of each row, which differ in their last token if `several`.
          several: whether they do.
        """
        batch = self._batch(inputs, length, [of_row[0][2][-1] for of_row in requests])
        if several:
            last = np.array([len(ids) - 1 for ids in inputs], np.int32)
            scores, next_logprobs = self._scorer.following(batch, np.resize(last, self._scorer.batch_size))
            following = np.asarray(next_logprobs)
        else:
            scores = self._scorer(batch)
        losses, likeliest = np.asarray(scores.losses, np.float64), np.asarray(scores.likeliest)
        answers = []
        for row, of_row in enumerate(requests):
            end = len(inputs[row])
            for _, _, continuation in of_row:
                begin = end - len(continuation)
                if several:
                    token, logprobs = continuation[-1], following[row]
                    logprob = float(logprobs[token]) - losses[row, begin : end - 1].sum()
                    best = bool(likeliest[row, begin : end - 1].all() and logprobs[token] >= logprobs.max())
                else:
                    logprob, best = -losses[row, begin:end].sum(), bool(likeliest[row, begin:end].all())
                answers.append((float(logprob), best))
        return answers

    def _batch(self, inputs: list[tuple[int, ...]], length: int, last: list[int]) -> Row:
        """Returns rows of tokens, each labelled with the token that follows."""
        rows = [empty_row(length) for _ in range(self._scorer.batch_size)]
        for row, ids, token in zip(rows, inputs, last, strict=False):
            row["inputs"][: len(ids)] = ids
            row["labels"][: len(ids)] = [*ids[1:], token]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _progress(self, what: str, total: int, disabled: bool) -> "_Progress":
        return _Progress(what, total, quiet=disabled)


def _batched(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class _Progress(Display):
    """A progress bar on standard error, where there is a terminal."""

    def __init__(self, what: str, total: int, *, quiet: bool):
        super().__init__(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {what}", quiet=quiet, stream=sys.stderr)
        self._total = total

    def __enter__(self) -> Any:
        self.begin(0, self._total)
        super().__enter__()
        return lambda done: self.move(done, "")
