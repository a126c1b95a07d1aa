"""Text that a chat template wrote: its special tokens become tokens, and what a message spells
stays text.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CHAT_TOKENS, begins_texts, byte_fallback
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxtp.data.chat_template import (
    ChatError,
    ChatTemplate,
    ChatTokenizer,
    without_marks,
)
from jaxtp.data.tokenizer import HuggingFaceTokenizer
from jaxtp.data.tokenizer_files import TokenizerError

CONTENTS = {"byte level": begins_texts(), "byte fallback": byte_fallback()}
LIBRARY = {name: Tokenizer.from_str(content.decode()) for name, content in CONTENTS.items()}


def ours(content):
    return ChatTokenizer(HuggingFaceTokenizer(content, "t"))


OURS = {name: ours(content) for name, content in CONTENTS.items()}
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<s><|turn|>{{ m.content | trim }}<|stop|> {% endfor %}", "t", {}
)
TEXT = st.text(st.sampled_from("ab é語🙂\n<|>")) | st.lists(
    st.sampled_from([*CHAT_TOKENS, "<s>", " a", "<"])
).map("".join)


def marked(name, contents):
    tokens = OURS[name]
    return tokens.mark(
        TEMPLATE.render(tokens.escape([{"content": content} for content in contents]))
    )


@given(
    st.sampled_from(sorted(CONTENTS)),
    st.lists(st.text(st.sampled_from("ab é語🙂\n.")), max_size=3),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=20)
def test_a_prompt_has_the_ids_that_it_has_alone_and_no_text_is_lost(name, contents, cut):
    text = marked(name, contents)
    while text[cut - 1 : cut + 1] and text[:cut].count("\ufdd0") > text[:cut].count("\ufdd1"):
        cut += 1  # a special token is in one part
    ((prompt, answer),) = OURS[name].encode([(text[:cut], text[cut:])])

    def ids_of(text):
        return LIBRARY[name].encode(without_marks(text), add_special_tokens=False).ids

    def spelled(ids):
        return LIBRARY[name].decode([*ids_of("a"), *ids], skip_special_tokens=False)

    whole = ids_of(text)
    assert prompt.tolist() == ids_of(text[:cut])
    assert spelled([*prompt, *answer]) == spelled(whole)
    if whole[: len(prompt)] == prompt.tolist():
        assert [*prompt, *answer] == whole


@given(st.sampled_from(sorted(CONTENTS)), st.lists(TEXT, min_size=1, max_size=3))
@settings(deadline=None, max_examples=30)
def test_the_template_alone_makes_special_tokens_and_no_text_is_lost(name, contents):
    text = marked(name, contents)
    ((ids, _),) = OURS[name].encode([(text, "")])
    special = OURS[name].special
    own = sum(token in special for token in ("<s>", "<|turn|>", "<|stop|>"))
    assert np.isin(ids, list(special.values())).sum() == own * len(contents)
    assert without_marks(text) == TEMPLATE.render([{"content": content} for content in contents])
    if name == "byte level":
        assert LIBRARY[name].decode(ids.tolist(), skip_special_tokens=False) == without_marks(text)


def test_what_is_no_text_is_refused():
    for text in ("\ufdd0", "a\ufdd3b", "\ud800"):
        with pytest.raises(ChatError, match="which is not a character"):
            OURS["byte level"].escape({"role": "user", "content": text})


def test_noncharacters_of_a_template_are_left_out():
    nines = "9" * 5000
    cut = "ab{{ messages[0].content[:2] }}"
    tokens = OURS["byte level"]
    for template in (
        "a\ufdd299\ufdd3b",
        "a\ufdd2\ufdd3b",
        f"a\ufdd2{nines}\ufdd3b",
        "a\ufdd0\ufdd1b",
        cut,
    ):
        rendered = ChatTemplate(template, "t", {}).render(tokens.escape([{"content": "<|turn|>"}]))
        assert set(tokens.mark(rendered)) <= set("ab0123456789"), template


def test_texts_and_keys_are_escaped_and_other_values_are_kept():
    tokens = OURS["byte level"]
    part = tokens.escape("<|turn|>")
    given = {"a": None, "b": [True, {"<|turn|>": "<|turn|>"}]}
    assert tokens.escape(given) == {"a": None, "b": [True, {part: part}]}
    assert (len(part), tokens.mark(part)) == (3, "<|turn|>")


def test_unigram_vocabularies_too():
    library = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("<", -2.0)], unk_id=0)
    )
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["</s>", "<unk>"])
    tokens = ours(library.to_str().encode())
    ((ids, _),) = tokens.encode([(tokens.mark(tokens.escape("a</s>") + "</s>"), "")])
    assert ids.tolist().count(1) == 1


def test_a_tokenizer_whose_tokens_cannot_be_told_apart_is_refused(monkeypatch):
    monkeypatch.setattr("jaxtp.data.chat_template.marks", lambda token: "x")
    with pytest.raises(TokenizerError, match="is indistinguishable from text that spells it"):
        ours(begins_texts())
