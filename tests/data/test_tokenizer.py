"""Text into tokens and back."""

import json
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import small_tokenizers
from corpora import dataset, decoded, texts, write
from numpy.testing import assert_array_equal
from tokenizers import (
    Tokenizer,
    models,
    pre_tokenizers,
    processors,
)

from jaxtp.data import tokenizer as module
from jaxtp.data import worker_process
from jaxtp.data.manifest import TOKENIZER
from jaxtp.data.store import verify
from jaxtp.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    IsolatedTokenizer,
    load_tokenizer,
)
from jaxtp.data.tokenizer_files import TokenizerError

END = "<|endoftext|>"


def byte_level(specials=(END, "<|im_start|>")):
    """Returns a tokenizer of 400 tokens, whose special tokens are the first."""
    return Tokenizer.from_buffer(small_tokenizers.byte_level(texts(300), 400, specials))


LIBRARY = byte_level()
CONTENT = LIBRARY.to_str().encode()
TRAINED = HuggingFaceTokenizer(CONTENT, "x")


@hypothesis.given(st.lists(st.text()), st.integers(0, 40))
@hypothesis.settings(max_examples=10)
def test_byte_level_and_bytes_decode_to_the_bytes_of_any_text(batch, cut):
    """Also where the ids are cut."""
    for tokenizer in (TRAINED, ByteTokenizer()):
        for ids, text in zip(tokenizer.encode_batch(batch), batch, strict=True):
            assert tokenizer.decode(ids[:cut]) + tokenizer.decode(ids[cut:]) == text.encode()
            assert ids.dtype == tokenizer.info.dtype


def ours(library, **settings):
    return HuggingFaceTokenizer(library.to_str().encode(), "x", **settings)


def test_texts_that_are_encoded_in_groups_keep_their_order(monkeypatch):
    batch = texts(20)
    alone = [TRAINED.encode_batch([text])[0].tolist() for text in batch]
    monkeypatch.setattr(module, "GROUP", 10)
    assert [ids.tolist() for ids in TRAINED.encode_batch(batch)] == alone


def test_the_settings_of_the_file_change_no_tokens():
    library = Tokenizer.from_str(CONTENT.decode())
    library.enable_truncation(3)
    library.enable_padding(length=50)
    library.post_processor = processors.TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, 0)]
    )
    library.model.dropout = 0.9
    (expected,) = TRAINED.encode_batch([" ".join(texts(20))])
    (found,) = ours(library).encode_batch([" ".join(texts(20))])
    assert_array_equal(found, expected)


def test_special_tokens_in_text_are_text_unless_asked_for():
    text = f"a{END}b<|im_start|>c"
    for special_tokens, found, decoded_text in (
        (False, [], text),
        (True, [0, 1], "ab<|im_start|>c"),
    ):
        (ids,) = HuggingFaceTokenizer(CONTENT, "x", special_tokens=special_tokens).encode_batch(
            [text]
        )
        assert ids[ids < 2].tolist() == found
        assert TRAINED.decode(ids) == decoded_text.encode()


def test_the_end_token_is_named_or_well_known():
    assert TRAINED.info.eos_id == 0
    assert HuggingFaceTokenizer(CONTENT, "x", eos="<|im_start|>").info.eos_id == 1
    assert ours(byte_level(specials=["#"])).info.eos_id is None
    with pytest.raises(TokenizerError, match=r"x: has no token 'END'; it has .*<\|endoftext\|>"):
        HuggingFaceTokenizer(CONTENT, "x", eos="END")


def test_gaps_in_the_ids_count_for_the_vocabulary():
    record = json.loads(CONTENT)
    record["model"]["vocab"]["gap"] = 70_000
    tokenizer = HuggingFaceTokenizer(json.dumps(record).encode(), "x")
    assert tokenizer.info.vocab_size == 70_001
    assert tokenizer.info.dtype.itemsize == 4
    with pytest.raises(TokenizerError, match="no token has the id 60000"):
        tokenizer.decode(np.array([60_000]))


def test_a_tokenizer_that_is_not_byte_level_decodes_as_the_library_does():
    library = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = ours(library)
    (ids,) = tokenizer.encode_batch(["a b c"])
    assert tokenizer.decode(np.append(ids, 2)) == b"a b ?"


def test_a_text_without_a_token_is_an_error():
    library = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="?"))
    for kind in (HuggingFaceTokenizer, IsolatedTokenizer):
        with pytest.raises(TokenizerError, match=r"x: cannot encode a text: .*UNK"):
            kind(library.to_str().encode(), "x").encode_batch(["b"])


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"\xff\xfe", CONTENT[:-20], Tokenizer(models.BPE()).to_str().encode()],
)
def test_files_that_are_no_tokenizer_are_refused(content):
    with pytest.raises(TokenizerError, match=r"x: not a tokenizer\.json|without a vocabulary"):
        HuggingFaceTokenizer(content, "x")


def test_the_tokenizer_of_a_dataset_is_the_one_that_made_it():
    write("t.json", CONTENT)
    write("a.jsonl", texts(9))
    made = dataset("a.jsonl --tokenizer t.json --held-out 0")
    assert load_tokenizer(made.folder).info == made.tokenizer
    assert len(decoded(made)) == 9
    write(f"d/{TOKENIZER}", CONTENT + b" ")
    with pytest.raises(TokenizerError, match="is not the tokenizer that made the dataset"):
        load_tokenizer(made.folder)
    (made.folder / TOKENIZER).unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: No such file"):
        load_tokenizer(made.folder)
    assert list(verify(made)) == [f"d/{TOKENIZER}: No such file or directory"]


def test_without_the_library_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        TokenizerError, match=r"x needs the library tokenizers: pip install 'jaxtp\[data\]'"
    ):
        HuggingFaceTokenizer(CONTENT, "x")


@pytest.mark.parametrize("special_tokens", [False, True])
def test_a_worker_encodes_the_same(special_tokens):
    rows = [*texts(50, seed=4), "", "a" * 100_000]
    here = HuggingFaceTokenizer(CONTENT, "x", special_tokens=special_tokens)
    there = IsolatedTokenizer(CONTENT, "x", special_tokens=special_tokens)
    for expected, found in zip(here.encode_batch(rows), there.encode_batch(rows), strict=True):
        assert_array_equal(found, expected, strict=True)
    assert (there.info.prefix, there.encode_batch([])) == (here.info.prefix, [])


TOO_MUCH = {
    "MEMORY": r"encoding a text ends the tokenizer's process .* at most 0 MiB",
    "SECONDS": r"encoding a text ends the tokenizer's process .*SIGPROF.*at most 0 s of computing",
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_worker_that_takes_too_much_is_an_error_and_another_one_starts(monkeypatch, kind):
    tokenizer = IsolatedTokenizer(CONTENT, "x")
    with monkeypatch.context() as patched:
        patched.setattr(module, f"FIXED_{kind}", 0.05 if kind == "SECONDS" else 0)
        patched.setattr(module, f"{kind}_OF_TEXT", 0)
        with pytest.raises(TokenizerError, match=f"^x: ({TOO_MUCH[kind]})"):
            tokenizer.encode_batch(["ab " * 2**20])
    assert_array_equal(tokenizer.encode_batch(["ab"])[0], TRAINED.encode_batch(["ab"])[0])


def test_a_text_that_the_library_cannot_copy_is_a_lack_of_memory(monkeypatch):
    """tokenizers 0.21 calls it an invalid type."""

    class Library:
        def encode_batch_fast(self, texts, add_special_tokens):
            raise TypeError("TextEncodeInput must be Union[TextInputSequence, ...]")

    monkeypatch.setitem(worker_process._LOADED, "k", Library())
    request = {"key": "k", "content": None, "texts": ["ab"], "is_whole": True, "settings": {}}
    with pytest.raises(MemoryError):
        worker_process._encodings(**request)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_grow_a_text_are_refused(part):
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}

    def content(step):
        return json.dumps({**json.loads(CONTENT), part: step}).encode()

    for kind in (HuggingFaceTokenizer, IsolatedTokenizer):
        with pytest.raises(
            TokenizerError, match=f"its {part} makes 1,000,000,000,000 characters out of one"
        ):
            kind(content({"type": "Sequence", f"{part}s": [replace] * 4}), "x")
    doubled = HuggingFaceTokenizer(content({**replace, "content": "aa"}), "x")
    assert doubled.decode(np.array([5])) is not None
