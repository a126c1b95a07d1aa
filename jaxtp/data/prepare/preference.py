"""Converts preference data to pairs of documents: a chosen and a rejected answer to a prompt.

A row has texts, or lists of messages for the chat template. In a row without a prompt, `chosen` and
`rejected` start with the prompt: all messages except the last, or the beginning that the texts
share.
"""

from collections.abc import Sequence

from jaxtp.data.chat_template import ASSISTANT, ChatError, Message
from jaxtp.data.prepare.conversations import EMPTY_ANSWER, Conversations, is_empty, naming
from jaxtp.data.prepare.messages import as_messages, with_system
from jaxtp.data.prepare.prepare_config import CHOSEN, REJECTED
from jaxtp.data.prepare.readers import BadInputError, Documents, Row, Turn, text_of

_NO_PAIR = "no pair"
_EQUAL_ANSWERS = "equal answers"
"""Kinds of problems, as `dataset.json` counts them."""
_ANSWER = "\n\nAssistant:"
"""The start of each answer in the texts of Anthropic's HH. The answers of a pair begin at the last
mark that both texts share."""


class PairsOfConversations(Conversations):
    """Renders and tokenizes two answers to one conversation."""

    def of_row(self, row: Row) -> Documents:
        """Returns the chosen and the rejected answer; raises `BadInputError`."""
        with naming(self._config.prompt_name):
            prompt = self._prompt(row)
            arguments = self.arguments_of(row)
        prompts = []
        turns: list[Turn] = []
        for name in (CHOSEN, REJECTED):
            with naming(name):
                whole = with_system(
                    self._whole(row, name, prompt), row.get("system") and text_of(row, "system")
                )
                prompts.append(whole[:-1])
                if is_empty(whole[-1]):
                    raise _empty(name)
                turns += self._turns(whole, [len(whole) - 1], arguments)
        if prompts[0] != prompts[1]:
            raise BadInputError(
                _NO_PAIR,
                f"{CHOSEN!r} and {REJECTED!r} differ in message {num_shared(*prompts) + 1}, "
                "before the answer; only their last messages may differ",
            )
        chosen, rejected = turns
        return Documents(self._limited(_different(chosen, rejected)))

    def _prompt(self, row: Row) -> list[Message]:
        prompt = row.get(self._config.prompt_name)
        if prompt is None:
            return []
        return self._checked(as_messages(prompt, "user"))

    def _whole(self, row: Row, name: str, prompt: list[Message]) -> list[Message]:
        """Returns the conversation that ends with an answer; raises `ChatError`."""
        messages = self._checked(as_messages(row[name], ASSISTANT))
        if messages[0]["role"] == ASSISTANT:
            messages = [*prompt, *messages]
        elif not _has(messages, prompt):
            raise ChatError(
                f"it starts with a message of the role {messages[0]['role']!r}, but not with "
                "the prompt"
            )
        role = messages[-1]["role"]
        if role != ASSISTANT:
            raise ChatError(
                f"the last message has the role {role!r}; it should be the answer of {ASSISTANT!r}"
            )
        if len(messages) == 1:
            raise _no_prompt(self._config.prompt_name)
        return messages


def pair_of_texts(prompt_name: str, row: Row) -> Documents:
    """Returns the chosen and the rejected answer of a row of texts, which needs no template."""
    chosen = text_of(row, CHOSEN)
    rejected = text_of(row, REJECTED)
    if row.get(prompt_name) is not None:
        prompt = text_of(row, prompt_name)
    else:
        cut = _shared(chosen, rejected)
        if cut <= 0:
            raise _no_prompt(prompt_name)
        prompt = chosen[:cut]
        chosen = chosen[cut:]
        rejected = rejected[cut:]
    for name, text in ((CHOSEN, chosen), (REJECTED, rejected)):
        if not text.strip():
            raise _empty(name)
    return Documents(_different(Turn(prompt, chosen), Turn(prompt, rejected)))


def _shared(chosen: str, rejected: str) -> int:
    """Returns the position at which the answers start.

    Without HH's mark, this is after the last whole word or line that both texts share.
    """
    prompt = chosen[: num_shared(chosen, rejected)]
    mark = prompt.rfind(_ANSWER)
    if mark >= 0:
        return mark + len(_ANSWER)
    return max(prompt.rfind(" "), prompt.rfind("\n") + 1)


def num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Returns the number of items with which both begin."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _different(chosen: Turn, rejected: Turn) -> tuple[Turn, Turn]:
    if chosen.text == rejected.text:
        raise BadInputError(_EQUAL_ANSWERS, f"{CHOSEN!r} and {REJECTED!r} are the same answer")
    return chosen, rejected


def _has(messages: Sequence[Message], prompt: Sequence[Message]) -> bool:
    """Returns whether a conversation has the prompt's messages, one after the other."""
    texts = [(message["role"], message["content"].strip()) for message in messages]
    prompt_texts = [(message["role"], message["content"].strip()) for message in prompt]
    return any(texts[i : i + len(prompt)] == prompt_texts for i in range(len(texts)))


def _empty(name: str) -> BadInputError:
    return BadInputError(EMPTY_ANSWER, f"{name!r}: the answer is empty")


def _no_prompt(name: str) -> BadInputError:
    return BadInputError(
        _NO_PAIR,
        f"there is no {name!r}, and {CHOSEN!r} and {REJECTED!r} do not start with one; "
        "--prompt-field NAME names it",
    )
