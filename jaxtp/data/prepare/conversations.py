"""Converts conversations to documents.

A document is an answer of the assistant; everything before it is its prompt.

A template may render an earlier answer differently from the last one. With one document per answer,
training sees exactly the input of inference, but reads the beginning of a conversation several
times.
"""

import datetime
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxtp.config.files import write_atomically
from jaxtp.config.reading import truncate
from jaxtp.data.chat_template import (
    ASSISTANT,
    SPANS,
    WORD,
    ChatError,
    ChatTemplate,
    ChatTokenizer,
    Message,
    RenderError,
    without_marks,
    writes_day,
)
from jaxtp.data.documents import Tokens
from jaxtp.data.prepare.messages import (
    MARKS,
    RESERVED,
    arguments_of,
    as_messages,
    calls_of,
    checked,
    is_learned,
    messages_of,
    no_answer,
    with_arguments,
    with_system,
)
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import (
    NO_CONVERSATION,
    BadInputError,
    Documents,
    Row,
    Turn,
    text_of,
    too_large,
)
from jaxtp.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_file
from jaxtp.data.tokenizer_files import (
    TEMPLATE,
    TEMPLATE_ARGUMENTS,
    TEMPLATE_DAY,
    TOKENIZER_CONFIG,
    chat_template,
    read_template,
    special_tokens,
)

T = TypeVar("T")

NO_ANSWER = "answer marked as not learned"
EMPTY_ANSWER = "empty answer"
GREETING = "answer without a prompt"
"""Kinds of answers that are left out, as `dataset.json` counts them."""
_TAG = r"(?:<\|channel>thought\n|<channel\|>|[<\[][^<>\[\]\s]*think[^<>\[\]\s]*[>\]])"
THOUGHT = re.compile(_TAG, re.IGNORECASE)
OPENED = re.compile(rf"{_TAG}(?:{_TAG}|\s)*\Z", re.IGNORECASE)
"""A tag of reasoning, and such tags at the end of a prompt, as Qwen, DeepSeek, Mistral, Cohere and
Gemma write them."""
_TAGS = re.compile(f"({_TAG})", re.IGNORECASE)
_LONGEST_OPENED = 200
_WITHIN = re.compile(r"\w\w|[-.]\d|\d\.\d")
"""Two characters that do not separate words or numbers."""
_WRITTEN = {"role", "content", "tool_calls", "reasoning_content", "thinking", "reasoning"}
"""Keys of messages that `_turn` compares with the text."""
_GENERATION = re.compile(r"{%[-+]?\s*generation\b")
_TOKEN = re.compile(r"<[^<>\s]+>")
"""A text that looks like a special token."""
_MAX_KEYS = 100
_MAX_KNOWN = 10_000
_PROBE = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": WORD}]
_TOOL = {"name": "a", "description": "a", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _TOOL}]


class NotWrittenError(ChatError):
    """A template leaves out a part of a conversation."""


class Conversations:
    """Renders and tokenizes conversations.

    Without a `template`, it reads the configured one, and sets the tokenizer's prefix and end token
    to the template's.

    Args:
      trusts_answers: whether answers, too, may spell special tokens where the settings let messages
        do so.
    """

    checksum = ""
    """A hash of a configured template and its special tokens, to detect changes."""

    def __init__(
        self,
        config: PrepareConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        trusts_answers: bool = True,
    ):
        self._config = config
        self._trusts_answers = trusts_answers
        self._fields = config.fields
        self.notes = set[str]()
        """Sentences about the prompts, for the summary of the command."""
        self.ignored = set[tuple[str, str]]()
        """Keys of messages that the template does not write, with the role of the messages."""
        self._keys = set[tuple[str, str]]()
        """All keys that `_find_ignored` has tried."""
        self._known: dict[object, frozenset[int]] = {}
        """The results of `_doubtful`, by what decides them."""
        self._tokens = ChatTokenizer(tokenizer)
        self._compared: set[object] | None = None
        """The shapes of conversations whose spans are those of the template; None without spans."""
        if template is not None:
            self.template = template
            return
        text, name = _template_of(config)
        tokens: dict[str, str] = {}
        if config.tokenizer is not None:
            tokens = special_tokens(tokenizer_file(config.tokenizer).parent)
        self.checksum = hashlib.sha256(json.dumps([text, tokens]).encode()).hexdigest()
        self.template = ChatTemplate(text, name, _ends(tokenizer) | tokens, config.date)
        turn = self._probe
        ((first, _),) = self._tokens.encode([(turn.prompt or "", "")])
        if isinstance(tokenizer, HuggingFaceTokenizer):
            prefix = tokenizer.info.prefix
            if not np.array_equal(first[: len(prefix)], prefix):
                tokenizer.info = replace(tokenizer.info, prefix=())
            if self.ends and config.eos is None and not config.no_eos:
                tokenizer.info = replace(tokenizer.info, eos_id=self.ends[-1])
        self.notes.clear()
        self._compared = set() if _GENERATION.search(text) else None
        end = turn.text.rpartition(WORD)[2].strip()
        if not end:
            self.notes.add(
                "the template writes no end after an answer, so a model would not learn to stop"
            )
        elif _TOKEN.fullmatch(end) and not self.ends:
            self.notes.add(
                f"the template ends an answer by {end}, which is no token of this tokenizer, but "
                f"several; --add-tokens {shlex.quote(end)} makes it one"
            )

    @cached_property
    def _probe(self) -> Turn:
        """A short answer; raises `ChatError` where the template cannot write it."""
        arguments = self._config.template_arguments
        try:
            (turn,) = self.turns(_PROBE, arguments)
        except ChatError as error:
            problem = error
            # Templates for rows with tools may need them.
            with suppress(ChatError):
                (turn,) = self.turns(_PROBE, {**arguments, "tools": _TOOLS})
                return turn
            if isinstance(problem, NotWrittenError):
                problem = ChatError(
                    f"{self.template.name} does not write a message whose content is a text; give "
                    "another one by --template FILE"
                )
            raise problem from None
        return turn

    @cached_property
    def ends(self) -> list[int]:
        """The special tokens that the template writes after an answer."""
        try:
            end = self._probe.text.rpartition(WORD)[2]
        except ChatError:
            # A template may refuse the probe, such as one without a system message.
            return []
        ((last, _),) = self._tokens.encode([(end, "")])
        return [token for token in last.tolist() if token in self._tokens.special.values()]

    def chat(
        self, messages: object, tools: object = None, documents: object = None, **arguments: object
    ) -> list[int]:
        """Returns the ids of the prompt of the next answer; raises `ChatError`."""
        row = {"tools": tools, "documents": documents, "chat_template_kwargs": arguments}
        return self.prompt(*self.read({self._fields.text: messages, **row}))

    def read(self, row: Row) -> tuple[list[Message], dict[str, object]]:
        """Returns a row's messages, and what the template gets beside them; raises `ChatError`."""
        try:
            # A row of Alpaca's that has no answer yet
            messages = self._checked(messages_of({self._fields.text: "", **row}, self._fields))
        except BadInputError as error:
            # The remedy is a flag of `jaxtp prepare`.
            raise ChatError(str(error).partition(";")[0]) from None
        return messages, self.arguments_of(row)

    def prompt(self, messages: list[Message], arguments: Mapping[str, object]) -> list[int]:
        """Returns the ids of the prompt of the next answer; raises `ChatError`.

        A dataset that contains the answer has the same ids before it.
        """
        text = self._with_calls(messages, arguments, self._rendered_prompt)
        ((ids, _),) = self._tokens.encode([(self._tokens.mark(text), "")])
        return ids.tolist()

    def arguments_of(self, row: Row) -> dict[str, object]:
        """Returns what the template gets beside a row's messages; raises `ChatError`."""
        config = self._config
        return arguments_of(row, config.template_arguments, config.tools_field)

    def of_row(self, row: Row) -> Documents:
        """Returns a row's answers; raises `ChatError` or `BadInputError`."""
        if self._config.completion_field is not None:
            return self._of_completion(row)
        messages = messages_of(row, self._fields)
        return self._answers(self._checked(messages), 0, self.arguments_of(row))

    def turns(
        self, messages: object, arguments: Mapping[str, object] | None = None
    ) -> tuple[Turn, ...]:
        """Returns a conversation's answers; raises `ChatError` or `BadInputError`."""
        return self._answers(self._checked(messages), 0, arguments or {}).turns

    def _of_completion(self, row: Row) -> Documents:
        """Returns the answers in the completion; raises `ChatError` or `BadInputError`."""
        parts = []
        for name, role in zip(self._fields.names[:2], ("user", ASSISTANT), strict=True):
            with naming(name):
                parts.append(self._checked(as_messages(row[name], role)))
        prompt = with_system(parts[0], row.get("system") and text_of(row, "system"))
        arguments = self.arguments_of(row)
        return self._answers([*prompt, *parts[1]], len(prompt), arguments)

    def _answers(
        self, conversation: list[Message], start: int, arguments: Mapping[str, object]
    ) -> Documents:
        """Returns the answers from a position on."""
        roles = [message["role"] for message in conversation]
        answers = [index for index in range(start, len(roles)) if roles[index] == ASSISTANT]
        if not answers:
            raise no_answer(roles[start:])
        if self._config.answers == "last":
            answers = answers[-1:]
        learned = []
        left_out = []
        for index in answers:
            if not is_learned(conversation[index], index + 1):
                left_out.append(NO_ANSWER)
            elif is_empty(conversation[index]):
                left_out.append(EMPTY_ANSWER)
            elif not index and not self._has_empty_prompt(arguments):
                left_out.append(GREETING)
            else:
                learned.append(index)
        turns = self._turns(conversation, learned, arguments) if learned else ()
        return Documents(turns, tuple(left_out))

    def _has_empty_prompt(self, arguments: Mapping[str, object]) -> bool:
        """Returns whether the template writes a prompt without messages."""
        try:
            self.template.render([], arguments=arguments)
        except ChatError:
            return False
        return True

    def _checked(self, messages: object) -> list[Message]:
        return checked(messages, self.template.text, self._config.media_as_text)

    def encode(self, turns: Sequence[Turn]) -> list[tuple[Tokens, Tokens]]:
        """Returns prompt ids and answer ids of each turn."""
        return self._tokens.encode([(turn.prompt or "", turn.text) for turn in turns])

    def first_day(self) -> str | None:
        """Returns the day that the template writes in a new dataset, by default today.

        None if the template writes no day.
        """
        if not writes_day(self.template.text):
            return None
        return self._config.date or datetime.date.today().isoformat()

    def save(self, folder: Path) -> None:
        """Writes the template, its special tokens and its day, for `jaxtp generate --chat`."""
        described: dict[str, object] = dict(self.template.special_tokens)
        if self._config.template_arguments:
            described[TEMPLATE_ARGUMENTS] = self._config.template_arguments
        if self.template.day is not None:
            described[TEMPLATE_DAY] = self.template.day
        write_atomically(folder / TEMPLATE, self.template.text.encode())
        write_atomically(
            folder / TOKENIZER_CONFIG, (json.dumps(described, indent=1) + "\n").encode()
        )

    def _turns(
        self, messages: list[Message], answers: Sequence[int], arguments: Mapping[str, object]
    ) -> tuple[Turn, ...]:
        """Returns the answers at some positions."""
        return self._with_calls(messages, arguments, partial(self._rendered, answers))

    def _with_calls(
        self,
        messages: list[Message],
        arguments: Mapping[str, object],
        render: Callable[[list[Message], Mapping[str, object]], T],
    ) -> T:
        """Renders escaped messages and arguments.

        Templates write the arguments of tool calls as JSON; most of them get objects, others get
        the JSON. The first of both that a template writes once is right.
        """
        for name in arguments.keys() - RESERVED:
            if not _reads(self.template.text, name):
                self.notes.add(f"the template reads no argument {name!r}")
        escaped = self._tokens.escape(arguments, keep=self._config.special_tokens)
        try:
            return render(self._escaped(messages, as_text=False), escaped)
        except ChatError as error:
            if not any(message.get("tool_calls") for message in messages):
                raise
            problem = error
        try:
            return render(self._escaped(messages, as_text=True), escaped)
        except ChatError as error:
            # The template's own error may be about the objects.
            if isinstance(problem, RenderError) and isinstance(error, NotWrittenError):
                problem = error
            raise problem from None

    def _rendered_prompt(self, messages: list[Message], arguments: Mapping[str, object]) -> str:
        text = self.template.render(messages, arguments=arguments)
        answer = {"role": ASSISTANT, "content": WORD}
        doubtful = self._doubtful([*messages, answer], 0, arguments)
        self._require_prompt(messages, 0, text, arguments, doubtful)
        return text

    def _rendered(
        self,
        answers: Sequence[int],
        messages: list[Message],
        arguments: Mapping[str, object],
    ) -> tuple[Turn, ...]:
        """Returns the answers at some positions of escaped messages."""
        # What precedes an answer was checked with the answer before it.
        starts = (0, *(index + 1 for index in answers))
        turns = self._limited(
            self._turn(messages[: index + 1], start, arguments)
            for start, index in zip(starts, answers, strict=False)
        )
        self._find_ignored(messages[: answers[-1] + 1], arguments)
        return turns

    def _find_ignored(self, messages: list[Message], arguments: Mapping[str, object]) -> None:
        """Notes the keys of messages without which the template writes the same.

        The first message of each role that has a key decides.
        """
        for index, message in enumerate(messages):
            for name in message.keys() - _WRITTEN:
                key = (name, message["role"])
                if key in self._keys or len(self._keys) == _MAX_KEYS:
                    continue
                self._keys.add(key)
                changed = list(messages)
                changed[index] = {other: message[other] for other in message if other != name}
                whole = self.template.render(messages, answer=False, arguments=arguments)
                if self._writes(whole, changed, False, arguments):
                    self.ignored.add(key)

    def _escaped(self, messages: list[Message], *, as_text: bool) -> list[Message]:
        """Returns messages for the template.

        Args:
          as_text: whether the arguments of tool calls are JSON.
        """
        escaped = []
        for message in messages:
            is_trusted = self._trusts_answers or message["role"] != ASSISTANT
            keep = self._config.special_tokens and is_trusted
            # As in transformers, a key of a message that is null is absent.
            present = {
                key: value
                for key, value in with_arguments(message, as_text=as_text).items()
                if value is not None and key not in MARKS
            }
            written = self._tokens.escape(present, keep=keep)
            if message["role"] == ASSISTANT and not keep:
                # Tags of reasoning in an answer are the tokens that the model writes.
                parts = _TAGS.split(message["content"])
                parts[::2] = self._tokens.escape(parts[::2])
                written["content"] = "".join(parts)
            escaped.append(written)
        return escaped

    def _limited(self, turns: Iterable[Turn]) -> tuple[Turn, ...]:
        limited = []
        size = 0
        max_bytes = self._config.max_document_bytes
        for turn in turns:
            limited.append(turn)
            size += sum(len((text or "").encode()) for text in turn[:2])
            if size > max_bytes:
                raise too_large(max_bytes, "its answers with their prompts: ")
        return tuple(limited)

    def _turn(self, messages: list[Message], start: int, arguments: Mapping[str, object]) -> Turn:
        """Returns the last message as an answer; raises `ChatError` where a part is missing.

        Args:
          start: the number of messages that have been checked.
        """
        prompt, whole = self.template.render_turn(messages, arguments)
        doubtful = self._doubtful(messages, start, arguments)
        self._require_prompt(messages[:-1], start, prompt, arguments, doubtful)
        if not whole.startswith(prompt):
            prompt = self._shared_prompt(prompt, whole, len(messages))
        answer = whole[len(prompt) :]
        require_answer(messages[-1], len(messages), answer)
        if len(messages) - 1 in doubtful:
            self._require_content(messages, whole, False, arguments, len(messages) - 1)
        self._require_each_call(messages, arguments)
        self._compare_spans(messages, prompt, answer, arguments)
        return Turn(self._tokens.mark(prompt), self._tokens.mark(answer), is_rendered=True)

    def _compare_spans(
        self, messages: list[Message], prompt: str, answer: str, arguments: Mapping[str, object]
    ) -> None:
        """Adds a note if the template marks another part of an answer as generated.

        Of each shape of conversations the first is compared, until an answer differs.
        """
        shape = tuple(map(_shape, messages))
        if self._compared is None or shape in self._compared or len(self._compared) == _MAX_KNOWN:
            return
        self._compared.add(shape)
        text = self.template.render(messages, answer=False, arguments=arguments, with_spans=True)
        generated = ""
        end = 0
        for index, part in enumerate(SPANS.split(text)):
            end += len(part)
            # Parts with an odd index are inside marks. Earlier answers end before the prompt does.
            if index % 2 and end > len(prompt):
                generated += part
        if generated.strip() != answer.strip():
            self._compared = None
            learned, marked = (
                truncate(without_marks(self._tokens.mark(part.strip())), 40)
                for part in (answer, generated)
            )
            self.notes.add(
                f"{learned} is learned, which is all that follows the prompt, though the template "
                f"marks {marked} as generated"
            )

    def _shared_prompt(self, prompt: str, whole: str, number: int) -> str:
        """Returns a prompt without the tags of reasoning at its end, which the answer lacks."""
        start = max(len(prompt) - _LONGEST_OPENED, 0)
        opened = OPENED.search(prompt, start)
        if opened is not None:
            before = prompt[: opened.start()]
            for shared in (before, before.rstrip()):
                if whole.startswith(shared):
                    self.notes.add(
                        f"prompts end before {opened[0].strip()!r}, with which the template opens "
                        "the reasoning, where an answer has none"
                    )
                    return shared
        raise ChatError(
            f"message {number}: the template starts this answer differently from its "
            f"generation prompt, {without_marks(self._tokens.mark(prompt))[-40:]!r}; give "
            "another template by --template FILE"
        )

    def _doubtful(
        self, messages: list[Message], start: int, arguments: Mapping[str, object]
    ) -> frozenset[int]:
        """Returns the positions from `start` on whose contents a template may leave out.

        In messages like these it leaves out words that nothing else has. A short content may stand
        elsewhere in the text.
        """
        key = (start, tuple(map(_shape, messages)), tuple(arguments))
        if key not in self._known:
            changed = list(messages)
            words = {}
            for index in range(start, len(messages)):
                if messages[index]["content"]:
                    words[index] = f"{WORD}{index}x"
                    changed[index] = {**messages[index], "content": words[index]}
            try:
                prompt, whole = self.template.render_turn(changed, arguments)
            except ChatError:
                words = {}
            last = len(messages) - 1
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            self._known[key] = frozenset(
                index
                for index, word in words.items()
                if word not in (whole if index == last else prompt)
            )
        return self._known[key]

    def _require_content(
        self,
        messages: list[Message],
        text: str,
        answer: bool,
        arguments: Mapping[str, object],
        index: int,
    ) -> None:
        """Raises `ChatError` if the template writes a text whatever the content of a message."""
        changed = list(messages)
        changed[index] = {**messages[index], "content": f"{messages[index]['content']} {WORD}"}
        if self._writes(text, changed, answer, arguments):
            raise NotWrittenError(
                f"message {index + 1}: the template does not write it, whose role is "
                f"{messages[index]['role']!r}"
            )

    def _require_prompt(
        self,
        messages: list[Message],
        start: int,
        prompt: str,
        arguments: Mapping[str, Any],
        doubtful: frozenset[int],
    ) -> None:
        """Raises `ChatError` if a prompt lacks a message from `start` on, or a tool or documents.

        Reasoning is not required, because many templates write it for the last answer only.
        """
        if not start:
            require_tools(arguments.get("tools") or (), prompt)
            for name in ("tools", "documents"):
                without = {**arguments, name: None}
                if arguments.get(name) and self._writes(prompt, messages, True, without):
                    raise NotWrittenError(
                        f"the template does not write {name!r}; leave them out, or give "
                        "another template by --template FILE"
                    )
        for index, message in enumerate(messages[start:], start):
            if index in doubtful or not _is_written(message["content"], prompt):
                if message["role"] == ASSISTANT:
                    # A template may leave out what an earlier answer has before its calls.
                    ended = messages[: index + 1]
                    text = self.template.render(ended, answer=False, arguments=arguments)
                    self._require_content(ended, text, False, arguments, index)
                else:
                    self._require_content(messages, prompt, True, arguments, index)
            require_calls(message, index + 1, prompt)
            self._require_each_call(messages[: index + 1], arguments)

    def _require_each_call(self, messages: list[Message], arguments: Mapping[str, object]) -> None:
        """Raises `ChatError` if the template writes the last message the same without a call."""
        *before, last = messages
        calls = last.get("tool_calls") or ()
        if len(calls) < 2:
            return
        whole = self.template.render(messages, answer=False, arguments=arguments)
        for index, call in enumerate(calls):
            remaining = [*calls[:index], *calls[index + 1 :]]
            changed = [*before, {**last, "tool_calls": remaining}]
            if self._writes(whole, changed, False, arguments):
                raise NotWrittenError(
                    f"message {len(messages)}: the template does not write call {index + 1} of "
                    f"{len(calls)}, of {truncate(call['function']['name'], 40)}"
                )

    def _writes(
        self, text: str, messages: list[Message], answer: bool, arguments: Mapping[str, object]
    ) -> bool:
        """Returns whether the template writes a text for messages, which it may refuse."""
        try:
            return self.template.render(messages, answer=answer, arguments=arguments) == text
        except ChatError:
            return False


@cache
def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _template_of(config: PrepareConfig) -> tuple[str, str]:
    """Returns the template and its name in messages; raises `ChatError` if missing."""
    if config.template is not None:
        return read_template(config.template), str(config.template)
    if config.tokenizer is None:
        raise ChatError("bytes come with no chat template; give one by --template FILE")
    folder = tokenizer_file(config.tokenizer).parent
    template = chat_template(folder)
    if template is None:
        raise ChatError(f"{folder} has no chat template; give one by --template FILE")
    return template, f"the chat template of {folder}"


def _ends(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the tokens that start and end documents, as a template names them."""
    tokens: dict[str, str] = {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        info = tokenizer.info
        if info.prefix:
            tokens["bos_token"] = tokenizer.spelling(info.prefix[0])
        if info.eos_id is not None:
            tokens["eos_token"] = tokenizer.spelling(info.eos_id)
    return tokens


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Names a field of a row in errors about its messages."""
    try:
        yield
    except ChatError as error:
        raise BadInputError(NO_CONVERSATION, f"{field!r}: {error}") from None


def _shape(message: Message) -> tuple[str, ...]:
    """Returns a message's role and the names of its parts."""
    return (message["role"], *(name for name, part in message.items() if part))


def is_empty(message: Message) -> bool:
    """Returns whether an answer has neither text, nor reasoning, nor tool calls."""
    texts = (message["content"], message.get("reasoning_content") or "")
    return not any(text.strip() for text in texts) and not message.get("tool_calls")


def require_answer(message: Message, number: int, answer: str) -> None:
    """Raises `ChatError` if an answer lacks a part of its message."""
    for name in ("content", "reasoning_content"):
        # A template may write the reasoning in a text between tags of its own.
        for part in THOUGHT.split(message.get(name) or ""):
            if not _is_written(part, answer):
                raise NotWrittenError(
                    f"message {number}: the template does not write all of its {name!r}: "
                    f"{truncate(part.strip(), 40)}"
                )
    require_calls(message, number, answer)


def require_calls(message: Message, number: int, text: str) -> None:
    """Raises `ChatError` if a text lacks a call of a message, or its arguments."""
    for name, values in calls_of(message):
        if not _is_written(name, text) or not _are_written(values, text):
            raise NotWrittenError(
                f"message {number}: the template does not write the call of {truncate(name, 40)} "
                "with its arguments as JSON"
            )


def require_tools(tools: Iterable[Mapping[str, Any]], prompt: str) -> None:
    """Raises `ChatError` if a prompt lacks a tool."""
    for tool in tools:
        function = tool["function"]
        for part in (function["name"], function.get("description")):
            if isinstance(part, str) and not _is_written(part, prompt):
                raise NotWrittenError(
                    f"the template does not write the tool {truncate(function['name'], 40)}; leave "
                    "'tools' out, or give another template by --template FILE"
                )


def _is_written(part: str, text: str) -> bool:
    stripped = part.strip()
    return stripped in text or json.dumps(stripped, ensure_ascii=False)[1:-1] in text


def _are_written(values: Mapping[str, object], text: str) -> bool:
    """Returns whether the arguments of a call are in a text, and neither as Python writes them nor
    as JSON in a string of JSON."""
    spellings = [
        json.dumps(values, ensure_ascii=False, separators=separators)
        for separators in (None, (",", ":"))
    ]
    if not values or any(spelling in text for spelling in spellings):
        return True
    quoted = [json.dumps(key, ensure_ascii=False) for key in values]
    if str(values) in text or any(json.dumps(key)[1:-1] in text for key in quoted):
        return False
    return all(_is_value(value, text) for value in _leaves(values))


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _is_value(value: object, text: str) -> bool:
    spellings = {str(value), json.dumps(value, ensure_ascii=False)}
    if isinstance(value, str):
        stripped = value.strip()
        escaped = (json.dumps(part, ensure_ascii=False)[1:-1] for part in (value, stripped))
        # LFM2 writes strings between single quotes.
        quoted = value.replace("\\", r"\\").replace("'", r"\'").replace("\n", r"\n")
        spellings = {value, stripped, quoted, *escaped}
    return any(_has_whole(spelling, text) for spelling in spellings)


def _has_whole(part: str, text: str) -> bool:
    """Returns whether a text has a part that is not within a longer word or number."""
    start = text.find(part)
    while start >= 0:
        end = start + len(part)
        around = (text[max(start - 1, 0) : start + 1], text[max(end - 1, 0) : end + 2])
        if not part or not any(map(_WITHIN.match, around)):
            return True
        start = text.find(part, start + 1)
    return False
