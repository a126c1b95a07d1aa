"""`jaxtp prepare --preference`: pairs of answers to one prompt."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from corpora import (
    CHAT_TEMPLATE,
    dataset,
    output,
    prompts_and_answers,
    refusal,
    run,
    spelled,
    texts,
    write,
    write_chat_tokenizer,
)
from hypothesis import given, settings
from runs import SMALL, mesh
from support import assert_refused
from tables import assert_errors, read_json, read_table, write_json

from jaxtp.data.corpus import CorpusError, load_corpus
from jaxtp.data.manifest import read_manifest
from jaxtp.data.samples import Data, RowSettings
from jaxtp.data.store import open_dataset
from jaxtp.tools.evaluate.__main__ import main as evaluate
from jaxtp.train.__main__ import main as train

MANIFEST = Path("d/dataset.json")


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def pairs_of(line):
    """Prompt and answer of each document, as ids."""
    found = dataset(f"{line} --preference --held-out 0 --overwrite")
    assert found.splits["train"].has_pairs
    return prompts_and_answers(found)


def in_bytes(pairs):
    """Prompts and answers, with a tilde between them."""
    return [bytes([*prompt, *b"~", *text]).decode() for prompt, text in pairs]


def some(count):
    """Rows of pairs in which the rejected answer is `no` and the chosen one."""
    found = enumerate(texts(count))
    return [
        {"prompt": f"{i}?", "chosen": text, "rejected": f"no {text}"}
        for i, text in found
        if text.strip()
    ]


def test_texts_have_a_prompt_or_share_their_beginning():
    human = "\n\nHuman: naïve?\n\nAssistant: I see.\n\nHuman: so?\n\nAssistant:"
    rows = [
        {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"},
        {"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi!"},
        {"prompt": "", "chosen": "a", "rejected": "b"},
        {"chosen": f"{human} It is.", "rejected": f"{human} It was 🙂", "score": 1},
        {"prompt": None, "chosen": "What?\nYes", "rejected": "What?\nYesterday"},
        {"chosen": "Say it: well done", "rejected": "Say it: wrong"},
    ]
    write("a.jsonl", rows)
    expected = [
        "1 + 1 = ~2",
        "1 + 1 = ~3",
        "Hi~Hi there",
        "Hi~Hi!",
        "~a",
        "~b",
        f"{human}~ It is.",
        f"{human}~ It was 🙂",
        "What?\n~Yes",
        "What?\n~Yesterday",
        "Say it:~ well done",
        "Say it:~ wrong",
    ]
    assert in_bytes(pairs_of("a.jsonl")) == expected
    out = output("a.jsonl --preference --held-out 0 --overwrite")
    assert "layout      pairs of texts, 'chosen' and 'rejected'\n" in out
    assert "train       6 pairs, " in out
    write("b.parquet", [{"question": row["prompt"], **row, "prompt": "x"} for row in rows[:3]])
    assert in_bytes(pairs_of("b.parquet --prompt-field question")) == expected[:6]


def test_texts_are_tokenized_like_prompts_and_completions():
    write_chat_tokenizer()
    rows = [row | {"prompt": row["chosen"][:9]} for row in some(20)]
    write("a.jsonl", rows)
    found = pairs_of("a.jsonl --tokenizer t")
    for index, name in enumerate(("chosen", "rejected")):
        command = (
            f"a.jsonl --tokenizer t --prompt-field prompt --completion-field {name} "
            f"--held-out 0 --out {name}"
        )
        assert prompts_and_answers(dataset(command)) == found[index::2]


def layouts(prompt, chosen, rejected):
    """The ways in which hub datasets write one conversation and two answers."""
    both = {"chosen": [answer(chosen)], "rejected": [answer(rejected)]}
    whole = {name: [*prompt, *value] for name, value in both.items()}
    names = {"user": "human", "assistant": "gpt"}
    return [
        {"prompt": prompt, **both},
        {"prompt": prompt, "chosen": chosen, "rejected": rejected},
        {"prompt": prompt, "chosen": answer(chosen), "rejected": answer(rejected)},
        whole,
        {"prompt": prompt, **whole},
        {
            "prompt": [{"from": names[turn["role"]], "value": turn["content"]} for turn in prompt],
            **both,
        },
        {"prompt": prompt[0]["content"] + "\n" if len(prompt) == 1 else prompt, **whole},
    ]


CONVERSATIONS = [
    ([user("naïve?")], "yes", "no 🙂\n"),
    ([user("a <|stop|>"), answer("b"), user("c")], "<|turn|>d", "e"),
]


@pytest.mark.parametrize("number", range(7))
def test_conversations_have_the_tokens_of_their_answers_in_instruction_data(number):
    write_chat_tokenizer()
    write("a.jsonl", [layouts(*each)[number] for each in CONVERSATIONS])
    write(
        "b.jsonl",
        [{"messages": [*prompt, answer(text)]} for prompt, *both in CONVERSATIONS for text in both],
    )
    tuning = dataset("b.jsonl --messages messages --tokenizer t --held-out 0 --out e")
    found = pairs_of("a.jsonl --tokenizer t")
    answers = prompts_and_answers(tuning)
    assert found == [answers[index] for index in (0, 1, 3, 5)]
    assert open_dataset(Path("d")).tokenizer == tuning.tokenizer
    assert Path("d/chat_template.jinja").exists()


def test_a_system_message_and_texts_go_through_a_template():
    write_chat_tokenizer()
    rows = [
        {"system": "Be brief.", "prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "d", "chosen": "e", "rejected": "f"},
    ]
    write("x.jinja", CHAT_TEMPLATE)
    write("a.parquet", rows)
    found = [
        spelled(prompt + text)
        for prompt, text in pairs_of("a.parquet --tokenizer t --template x.jinja")
    ]
    system = "<|begin|><|turn|>system\nBe brief.<|stop|>\n"
    assert found[1] == f"{system}<|turn|>user\na<|stop|>\n<|turn|>assistant\nc<|stop|>\n"
    assert found[2] == "<|begin|><|turn|>user\nd<|stop|>\n<|turn|>assistant\ne<|stop|>\n"


MESSAGES = {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [answer("c")]}
TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}
MISTAKES = read_table(__file__, "mistaken_pairs")


@pytest.mark.parametrize(("kind", "like"), [("texts", TEXTS), ("messages", MESSAGES)])
def test_rows_that_are_no_pairs_are_refused_or_skipped(kind, like):
    write_chat_tokenizer()
    base = MESSAGES if kind == "messages" else {}
    rows = [base | row["row"] for row in MISTAKES[kind]]

    def error_of(row):
        write("a.jsonl", [like, base | row["row"]])
        return refusal("a.jsonl --tokenizer t --preference --overwrite").partition(
            "a.jsonl, line 2: "
        )[2]

    assert_errors(MISTAKES[kind], error_of)
    write("a.jsonl", [like, *rows])
    assert len(pairs_of("a.jsonl --tokenizer t --on-error skip")) == 2
    assert sum(read_manifest(Path("d")).skipped.values()) == len(rows)


def test_pairs_are_messages_if_the_first_row_has_them():
    write_chat_tokenizer()
    write("s.txt", "text")
    write("s.jsonl", "\n[]\nnot JSON\n" + json.dumps(MESSAGES))
    command = "s.txt s.jsonl --preference --on-error skip --held-out 0"
    out = output(f"{command} --tokenizer t")
    assert "layout      pairs of conversations, 'chosen' and 'rejected'\n" in out
    assert len(prompts_and_answers(open_dataset(Path("d")))) == 2
    command = "s.jsonl --on-error skip --held-out 0 --overwrite --tokenizer t"
    assert "layout      pairs of conversations, 'chosen' and 'rejected'\n" in output(command)


SAID = st.sampled_from([None, 3, "", "a", "a b", [], {}, ["a"]])
ROLE = st.sampled_from(["user", "assistant", "system", None])
MESSAGE = st.fixed_dictionaries({"role": ROLE}, optional={"content": SAID})
VALUE = SAID | MESSAGE | st.lists(MESSAGE, max_size=3)
ROW = st.fixed_dictionaries(
    {"chosen": VALUE, "rejected": VALUE}, optional={"prompt": VALUE, "system": SAID}
)


@given(st.lists(ROW, min_size=20, max_size=40), st.sampled_from([TEXTS, MESSAGES]))
@settings(max_examples=4, deadline=None)
def test_each_random_row_is_a_pair_or_a_problem(rows, first):
    write("x.jinja", "{% for m in messages %}[{{ m.content }}]{% endfor %}")
    write("a.jsonl", [first, *rows])
    found = pairs_of(f"a.jsonl --on-error skip {'--template x.jinja' if first is MESSAGES else ''}")
    assert len(found) // 2 + sum(read_manifest(Path("d")).skipped.values()) == len(rows) + 1
    for (prompt, chosen), (same, rejected) in zip(found[::2], found[1::2], strict=True):
        assert prompt == same
        assert chosen != rejected


def test_pairs_are_not_read_from_text_and_keep_the_beginning_of_the_template():
    write_chat_tokenizer()
    write("a.txt", "a")
    write("a.jsonl", [MESSAGES])
    assert "text has no fields; rows are read from JSONL and Parquet" in refusal(
        "a.txt --preference"
    )
    assert "--bos is for documents" in refusal("a.jsonl --preference --tokenizer t --bos none")


def test_a_pair_is_in_one_split_and_one_shard_and_once_with_dedup():
    rows = some(80)
    write("a.jsonl", [*rows, *rows])
    found = dataset("a.jsonl --preference --dedup --held-out 0.3 --shard-tokens 1500")
    assert len(list(found.folder.glob("train-*.tokens"))) > 3
    kept = []
    for name in ("train", "validation"):
        assert all(len(lengths) % 2 == 0 for lengths in found.splits[name].lengths())
        pairs = in_bytes(prompts_and_answers(found, name))
        assert len(pairs) > 30
        assert pairs[1::2] == [pair.replace("~", "~no ") for pair in pairs[::2]]
        kept += pairs[::2]
    assert sorted(kept) == sorted(f"{row['prompt']}~{row['chosen']}" for row in rows)


def test_the_manifest_has_format_2_and_contradictions_are_refused():
    write("a.jsonl", some(20))
    output("a.jsonl --preference --held-out 0")
    assert "no problems" in output("--verify d")
    record = read_json(MANIFEST)
    assert (record["format"], record["pairs"], record["prompts"]) == (2, True, True)
    (shard,) = record["splits"]["train"]["shards"]
    odd = shard | {"documents": shard["documents"] - 1}
    splits = record["splits"] | {"train": odd | {"shards": [odd]}}
    for change, message in (
        ({"format": 1}, "damaged: format 1 with pairs"),
        ({"pairs": False}, "damaged: format 2 without pairs"),
        ({"prompts": False}, "damaged: the file: pairs without prompts"),
        ({"splits": splits}, f"a shard of pairs has {odd['documents']} documents"),
    ):
        write_json(MANIFEST, record | change)
        code, out, _ = run("--verify d")
        assert (code, message in out) == (1, True), out
    del record["format"]
    write_json(MANIFEST, record)
    assert "damaged: format None with pairs" in run("--verify d")[1]


def test_pairs_are_not_mixed_with_other_data():
    write("a.jsonl", some(30))
    output("a.jsonl --preference --held-out 0.2 --out pairs")
    output("a.jsonl --preference --held-out 0 --out more")
    output("a.jsonl --prompt-field prompt --completion-field chosen --out tuning")
    pairs = Path("pairs")
    assert load_corpus(None, {"pairs": 1, "more": 2}, validation=pairs).has_pairs
    with pytest.raises(
        CorpusError, match=r"pairs has pairs .* but tuning does not: name datasets of one kind"
    ):
        load_corpus(None, {"tuning": 1, "pairs": 2})
    with pytest.raises(CorpusError, match=r"pairs has pairs .* but tuning does not"):
        load_corpus(pairs, validation=Path("tuning"))
    with pytest.raises(
        CorpusError, match=r"every pair is longer than data.sequence_length=2; use a larger"
    ):
        Data(load_corpus(pairs), RowSettings(2, 256, long_documents="drop"), 0)


LOSS = """
import jax.numpy as jnp

def loss(model, batch, key):
    labels = jnp.where(batch["pairs"] > 0, batch["labels"], -100)
    total, _ = model.loss(batch["inputs"], labels, segments=batch["segments"])
    return total, batch["pairs"].max(-1).sum()
"""


@pytest.fixture
def command():
    """Flags of a run on pairs, some of which are too long."""
    write("a.jsonl", some(99))
    output("a.jsonl --preference --held-out 0.2")
    size = ["--data.path=d", "--data.sequence-length=300", "--data.long-documents=drop"]
    return [*SMALL, *mesh(1, 2, 1), *size, "--run.dir=run"]


def test_the_loss_of_a_run_on_pairs_must_be_one_for_pairs(command, capsys):
    assert_refused(
        train, command, "d: pairs need a loss for them: --train.loss jaxtp.losses:DPO", capsys
    )


@pytest.mark.wide
def test_a_run_counts_pairs(command, capsys):
    write("mine.py", LOSS)
    assert train([*command, "--train.steps=2", "--train.loss=mine.py:loss"]) == 0
    lengths = [len(prompt + text) for prompt, text in prompts_and_answers(open_dataset(Path("d")))]
    fits = [sum(pair) <= 300 for pair in zip(lengths[::2], lengths[1::2], strict=True)]
    assert f"pairs: {fits.count(True)}, {fits.count(False)} left out" in capsys.readouterr().out
    assert_refused(evaluate, ["--model=run", "--data=d"], "d has pairs of answers", capsys)
