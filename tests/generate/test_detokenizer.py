"""Texts as they come: whole characters, never a part of a stop text, and in the end all of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import TEXT, byte_fallback, byte_level

from jaxtp.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from jaxtp.generate.request import Detokenizer, cut_at_stop

TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "byte level": HuggingFaceTokenizer(byte_level(), "byte level"),
    "byte fallback": HuggingFaceTokenizer(byte_fallback(), "byte fallback"),
}


def streamed(tokenizer, ids, prompt=()):
    stream = Detokenizer(tokenizer, prompt)
    return [*(stream.feed(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(st.text(st.sampled_from(TEXT), max_size=30))
def test_pieces_are_whole_characters_and_add_up(name, text):
    tokenizer = TOKENIZERS[name]
    prompt, ids = (found.tolist() for found in tokenizer.encode_batch(["a ", "a " + text]))
    ids = ids[len(prompt) :] if ids[: len(prompt)] == prompt else ids
    pieces = streamed(tokenizer, ids, prompt if len(ids) else ())
    assert all("\ufffd" not in piece for piece in pieces)
    whole = tokenizer.decode(np.array([*prompt, *ids])).decode()
    assert tokenizer.decode(np.array(prompt)).decode() + "".join(pieces) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_comes_with_its_last_byte(name):
    tokenizer = TOKENIZERS[name]
    (ids,) = tokenizer.encode_batch(["🙃"])
    stream = Detokenizer(tokenizer, [])
    *before, last = (stream.feed(token) for token in ids.tolist())
    assert (last, "".join(before)) == ("🙃", "")


def test_bytes_that_are_no_text_become_marks_at_once():
    assert streamed(TOKENIZERS["bytes"], [0x61, 0xFF, 0x62, 0xC3, 0x28, 0xF0, 0x9F]) == [
        "a", "\ufffd", "b", "", "\ufffd(", "", "", "\ufffd"
    ]  # fmt: skip


def test_bytes_that_become_no_character_are_held_for_three_tokens_at_most():
    tokenizer = TOKENIZERS["byte fallback"]
    start = 2  # of the bytes' ids
    pieces = streamed(tokenizer, [start + 0x80] * 8)
    assert "".join(pieces) == "\ufffd" * 8
    assert max(len(piece) for piece in pieces) <= 4


def test_a_space_before_the_first_word_is_kept():
    """A tokenizer of this kind drops the space of the first token that it decodes."""
    tokenizer = TOKENIZERS["byte fallback"]
    prompt, ids = (found.tolist() for found in tokenizer.encode_batch(["to", "to a cap"]))
    assert "".join(streamed(tokenizer, ids[len(prompt) :], prompt)) == " a cap"


def stopped(pieces, stops):
    """What is given out, piece by piece, and whether a stop text was found."""
    pending = ""
    given_out = []
    for piece in pieces:
        certain, pending, found = cut_at_stop(pending + piece, stops)
        given_out.append(certain)
        if found:
            return given_out, True
    return [*given_out, pending], False


few = st.text(st.sampled_from("ab"), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("ab"), max_size=3), max_size=12), st.lists(few, max_size=3))
def test_a_text_ends_before_the_first_stop_text_however_it_is_cut(pieces, stops):
    whole = "".join(pieces)
    given_out, found = stopped(pieces, stops)
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    assert found == bool(ends)
    assert "".join(given_out) == (whole[: min(ends)[1]] if ends else whole)


def test_only_what_may_begin_a_stop_text_is_held_back():
    assert stopped(["Hello", " <", "|", "x <|", "end|> more"], ["<|end|>"]) == (
        ["Hello", " ", "", "<|x ", ""],
        True,
    )
    assert stopped(["a", "b"], []) == (["a", "b", ""], False)
