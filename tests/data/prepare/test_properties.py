"""What holds of any documents, in any order, in any batches."""

from itertools import count
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from corpora import dataset, decoded, output, prompts_and_answers, refusal, texts, write, write_bpe
from hypothesis import given
from runs import contents
from tables import read_json, write_json

from jaxtp.data.prepare import batches
from jaxtp.data.prepare.session import JOURNAL

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
QUICK = hypothesis.settings(
    max_examples=8, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
NUMBERS = count()


def fresh(flags):
    """A command line of a folder that no other example has."""
    return f"{flags} --out {next(NUMBERS)}"


def split(line):
    """The documents of both splits."""
    found = dataset(fresh(line))
    return [text.decode() for text in decoded(found)], [
        text.decode() for text in decoded(found, "validation")
    ]


@QUICK
@given(
    st.lists(TEXT, min_size=1),
    st.sampled_from(["", "--tokenizer t"]),
    st.integers(1, 60),
    st.integers(1, 9),
)
def test_documents_in_are_documents_out(rows, flags, shard_tokens, batch):
    write_bpe()
    write("a.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_DOCUMENTS", batch)
        patch.setattr(batches, "BATCH_BYTES", 100)
        found = dataset(fresh(f"a.jsonl {flags} --held-out 0 --shard-tokens {shard_tokens}"))
    assert decoded(found) == [row.encode() for row in rows]
    lengths = list(found.splits["train"].lengths())
    assert all(shard.sum() >= shard_tokens for shard in lengths[:-1])
    assert all(shard[:-1].sum() < shard_tokens for shard in lengths)


@QUICK
@given(st.lists(st.sampled_from(["a", "b", "aa", "A", "a ", "é", "e\u0301"]), min_size=1))
def test_dedup_keeps_the_first_of_each(rows):
    write("a.jsonl", rows)
    assert split("a.jsonl --dedup --held-out 0")[0] == list(dict.fromkeys(rows))


@QUICK
@given(
    st.lists(TEXT, min_size=2, unique=True),
    st.randoms(use_true_random=False),
    st.sampled_from([0.1, 0.5, 0.9]),
)
def test_with_many_documents_each_is_held_out_by_itself(rows, numbers, share):
    write("a.jsonl", rows)
    missing, *shuffled = numbers.sample(rows, len(rows))
    write("b.jsonl.gz", shuffled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "FEW", 0)
        whole = split(f"a.jsonl --held-out {share}")
        part = split(f"b.jsonl.gz --held-out {share}")
    assert [set(kept) for kept in part] == [set(kept) - {missing} for kept in whole]


@pytest.mark.wide
@QUICK
@given(
    st.lists(TEXT, min_size=1),
    st.randoms(use_true_random=False),
    st.sampled_from([0.01, 0.2, 0.5, 0.9]),
)
def test_of_few_documents_the_number_nearest_to_the_share_is_held_out(rows, numbers, share):
    write("a.jsonl", rows)
    unique = list(dict.fromkeys(rows))
    _, held_out = split(f"a.jsonl --dedup --held-out {share}")
    nearest = min(
        range(len(unique)), key=lambda number: (abs(number - share * len(unique)), -number)
    )
    assert len(held_out) == nearest
    write("b.jsonl", numbers.sample(unique, len(unique)))
    _, again = split(f"b.jsonl --dedup --held-out {share}")
    assert set(again) == set(held_out), "in any order"
    kept, copies = split(f"a.jsonl --held-out {share}")
    assert not set(kept) & set(copies), "copies are in one split"


def test_an_unfinished_dataset_of_an_older_version_resumes_with_the_share_itself(monkeypatch):
    rows = sorted({text + str(i) for i, text in enumerate(texts(60))})
    write("a.jsonl", [*rows, {"bad": 1}])
    command = "a.jsonl --held-out 0.3 --save-seconds 0"
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 20)
    with monkeypatch.context() as patch:
        patch.setattr(batches, "FEW", 0)
        output(f"{command} --on-error skip --out whole")
        refusal(command)
    journal = Path("d") / JOURNAL
    record = read_json(journal)
    del record["threshold"]
    write_json(journal, record)
    output(f"{command} --on-error skip")
    assert contents("d") == contents("whole")


def test_the_share_that_is_held_out_grows_by_documents():
    write("a.jsonl", sorted({text + str(i) for i, text in enumerate(texts(2000, longest=3))}))
    previous = set()
    for share in (0.01, 0.1, 0.5):
        _, held_out = split(f"a.jsonl --held-out {share}")
        assert abs(len(held_out) / 2000 - share) < 0.03
        assert previous <= set(held_out)
        previous = set(held_out)
    assert split("a.jsonl --held-out 0")[1] == []


def test_another_cut_between_prompt_and_completion_is_another_document():
    write("a.jsonl", [{"p": "ab", "c": "c"}, {"p": "a", "c": "bc"}, {"p": "ab", "c": "c"}])
    found = dataset("a.jsonl --prompt-field p --completion-field c --dedup --held-out 0")
    assert [len(prompt) for prompt, _ in prompts_and_answers(found)] == [2, 1]
