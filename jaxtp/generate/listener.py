"""The ids of a conversation: what a model reads of it."""

from collections.abc import Sequence

import numpy as np

from jaxtp.data.chat_tokenizer import SpecialTokens, rendered_tokenizer
from jaxtp.data.template import ASSISTANT, ChatTemplate, Message
from jaxtp.data.tokenizer import Tokenizer


class Listener:
    """Turns a conversation into ids for the model: the template's special tokens are tokens, and a special token that a
    message spells, also one of the model's, is text.

    Earlier answers keep the ids that were generated, for as long as the template writes them as they were given. From
    the first on that it writes otherwise, such as without its reasoning, the text is encoded anew. Answers that are
    taken back are forgotten; those before them are not.

    Args:
      tokenizer: the tokenizer of the model.
      template: writes the conversation as one text.
      special_tokens: special tokens that messages spell become tokens too, but for those of the model's messages.

    Raises:
      TokenizerError: the tokenizer's special tokens cannot be told from text.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, special_tokens: bool = False):
        self._tokenizer, self._template = tokenizer, template
        self._rendered = rendered_tokenizer(tokenizer)
        self._entered = SpecialTokens(self._rendered.tokens, keep=special_tokens)
        self._answered = SpecialTokens(self._rendered.tokens)
        self._asked: tuple[str, list[int]] = "", []
        self._known: list[tuple[str, list[int]]] = [("", [])]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of the conversation, up to where the model answers.

        Raises:
          ChatError: the template refuses it, or a message holds a code point that is no character.
        """
        escaped = [
            (self._answered if message["role"] == ASSISTANT else self._entered).escape(message) for message in messages
        ]
        marked = self._entered.mark(self._template.render(escaped))
        while not (marked.startswith(text := self._known[-1][0]) and self._goes_on(marked.removeprefix(text))):
            self._known.pop()  # the first is empty, and stays
        text, ids = self._known[-1]
        self._asked = marked, [*ids, *self._encode(marked.removeprefix(text))]
        return self._asked[1]

    def answered(self, answer: str, ids: Sequence[int]) -> None:
        """Remembers the ids of the answer to the conversation that `ids` was last called with.

        Args:
          answer: the text that was given; it may be shorter than the generated one, as before a stop text.
          ids: the ids that were generated.
        """
        whole = self._tokenizer.decode(np.array(ids, np.int64)).decode(errors="replace") if ids else ""
        text, asked = self._asked
        if whole == answer:
            self._known.append((text + answer, [*asked, *ids]))

    def _goes_on(self, rest: str) -> bool:
        """Returns whether the rest of a text gives the same ids alone and after the answer that was remembered last."""
        return len(self._known) == 1 or self._rendered.begins_afresh(rest)

    def _encode(self, marked: str) -> list[int]:
        ((ids, _),) = self._rendered.encode_batch([(marked, "")])
        return list(ids.tolist())
