"""`jaxtp prepare --preference`: pairs of answers to one prompt."""

import json
import signal

import hypothesis.strategies as st
import numpy as np
import pytest
from corpora import jsonl, parquet, prepared, refused, texts
from hypothesis import given, settings
from runs import SMALL, contents, mesh
from small_tokenizers import begins_texts
from tokenizers import Tokenizer

from jaxtp.data.corpus import CorpusError, load_corpus
from jaxtp.data.manifest import MANIFEST, DatasetError, read_manifest
from jaxtp.data.prepare import batches
from jaxtp.data.prepare.__main__ import main
from jaxtp.data.rows import IGNORE
from jaxtp.data.samples import Data, RowSettings, make_rows
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.tools.evaluate.__main__ import main as evaluate
from jaxtp.train.__main__ import main as train

LIBRARY = Tokenizer.from_str(begins_texts().decode())
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
NAMED = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
FLAGS = ["--preference", "--held-out", 0]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").write_bytes(begins_texts())
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps(NAMED))
    return tmp_path


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def documents(dataset, name="train"):
    """Prompt and answer of each document."""
    split = dataset.splits[name]
    assert split.has_pairs
    for index in range(split.num_documents):
        ids, cut = split.document(index).tolist(), split.prompt_length(index)
        yield ids[:cut], ids[cut:]


def in_bytes(dataset):
    return [tuple(bytes(part).decode() for part in document) for document in documents(dataset)]


def test_texts(tmp_path, capsys):
    hh = "\n\nHuman: naïve?\n\nAssistant: I see.\n\nHuman: so?\n\nAssistant:"
    rows = [
        {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"},
        {"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi!"},
        {"prompt": "", "chosen": "a", "rejected": "b"},
        {"chosen": f"{hh} It is.", "rejected": f"{hh} It was 🙂", "score": 1},
        {"prompt": None, "chosen": "What?\nYes", "rejected": "What?\nYesterday"},
        {"chosen": "Say it: well done", "rejected": "Say it: wrong"},
    ]
    expected = [
        *[("1 + 1 = ", "2"), ("1 + 1 = ", "3"), ("Hi", "Hi there"), ("Hi", "Hi!"), ("", "a"), ("", "b")],
        *[(hh, " It is."), (hh, " It was 🙂"), ("What?\n", "Yes"), ("What?\n", "Yesterday")],
        *[("Say it:", " well done"), ("Say it:", " wrong")],
    ]
    assert in_bytes(prepared(tmp_path / "d", jsonl(tmp_path / "a.jsonl", rows), *FLAGS)) == expected
    out = capsys.readouterr().out
    assert "layout      pairs of texts, 'chosen' and 'rejected'\n" in out
    assert "train       6 pairs, " in out
    named = [{"question": row.get("prompt"), **row, "prompt": "x"} for row in rows[:3]]
    path = parquet(tmp_path / "b.parquet", named)
    assert in_bytes(prepared(tmp_path / "e", path, *FLAGS, "--prompt-field", "question")) == expected[:6]
    assert "pairs of texts, 'chosen' and 'rejected'; not read: \"prompt\"\n" in capsys.readouterr().out


def test_texts_are_tokenized_like_prompts_and_completions(folder):
    rows = [
        {"prompt": text[:9], "chosen": text, "rejected": text[::-1]}
        for text in dict.fromkeys(texts(20))
        if text.strip()
    ]
    rows = [row for row in rows if row["chosen"] != row["rejected"]]
    tokenizer = ["--tokenizer", folder / "t", "--held-out", 0]
    pairs = prepared(folder / "d", jsonl(folder / "a.jsonl", rows), "--preference", *tokenizer)
    plain = [{"p": row["prompt"], "c": row[name]} for row in rows for name in ("chosen", "rejected")]
    fields = ["--prompt-field", "p", "--completion-field", "c"]
    tuning = prepared(folder / "e", jsonl(folder / "b.jsonl", plain), *fields, *tokenizer).splits["train"]
    assert list(documents(pairs)) == [
        (ids[: tuning.prompt_length(i)].tolist(), ids[tuning.prompt_length(i) :].tolist())
        for i, ids in enumerate(map(tuning.document, range(2 * len(rows))))
    ]


def layouts(prompt, chosen, rejected):
    """The ways in which hub datasets write one conversation and two answers."""
    both = {"chosen": [answer(chosen)], "rejected": [answer(rejected)]}
    yield {"prompt": prompt, **both}
    yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    yield {"prompt": prompt, "chosen": answer(chosen), "rejected": answer(rejected)}
    whole = {name: [*prompt, *value] for name, value in both.items()}
    yield whole
    yield {"prompt": prompt, **whole}
    if len(prompt) == 1:
        yield {"prompt": prompt[0]["content"] + "\n", **whole}
    yield {
        "prompt": [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in prompt],
        **both,
    }


CONVERSATIONS = [
    ([user("naïve?")], "yes", "no 🙂\n"),
    ([user("a <|stop|>"), answer("b"), user("c")], "<|turn|>d", "e"),
]


@pytest.mark.parametrize("number", range(7))
def test_conversations_have_the_tokens_of_their_answers_in_instruction_data(folder, number):
    rows = [list(layouts(*each))[min(number, 5 if len(each[0]) == 3 else 6)] for each in CONVERSATIONS]
    sft = [{"messages": [*prompt, answer(text)]} for prompt, *both in CONVERSATIONS for text in both]
    tokenizer = ["--tokenizer", folder / "t", "--held-out", 0]
    dataset = prepared(folder / "d", jsonl(folder / "a.jsonl", rows), "--preference", *tokenizer)
    tuning = prepared(folder / "e", jsonl(folder / "b.jsonl", sft), "--messages", "messages", *tokenizer).splits[
        "train"
    ]
    last = [tuning.document(i).tolist() for i in (0, 1, 3, 5)]
    found = list(documents(dataset))
    assert [prompt + text for prompt, text in found] == last
    assert [len(prompt) for prompt, _ in found] == [tuning.prompt_length(i) for i in (0, 1, 3, 5)]
    assert found[0][0] == found[1][0]
    assert dataset.tokenizer == open_dataset(folder / "e").tokenizer
    assert (dataset.folder / "chat_template.jinja").exists()


def test_parquet_a_system_message_and_texts_for_a_template(folder):
    rows = [
        {"system": "Be brief.", "prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "d", "chosen": "e", "rejected": "f"},
    ]
    (folder / "x.jinja").write_text(TEMPLATE)
    flags = [*FLAGS, "--tokenizer", folder / "t", "--template", folder / "x.jinja"]
    dataset = prepared(folder / "d", parquet(folder / "a.parquet", rows), *flags)
    spelled = [LIBRARY.decode(prompt + text, skip_special_tokens=False) for prompt, text in documents(dataset)]
    assert spelled[1] == (
        "<|begin|><|turn|>system\nBe brief.<|stop|>\n<|turn|>user\na<|stop|>\n<|turn|>assistant\nc<|stop|>\n"
    )
    assert spelled[2] == "<|begin|><|turn|>user\nd<|stop|>\n<|turn|>assistant\ne<|stop|>\n"


MESSAGES = {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [answer("c")]}
TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("like", "row", "message"),
    [
        (TEXTS, {"prompt": "a", "chosen": "b"}, "no field 'rejected'; fields: 'prompt', 'chosen'"),
        (TEXTS, {**TEXTS, "chosen": "c"}, "'chosen' and 'rejected' are the same answer"),
        (TEXTS, {**TEXTS, "chosen": " \n"}, "'chosen': the answer is empty"),
        (
            TEXTS,
            {"chosen": "b", "rejected": "c"},
            "no 'prompt', and 'chosen' and 'rejected' do not start with one; --prompt",
        ),
        (TEXTS, {"chosen": "\n\nAssistant:", "rejected": "\n\nAssistant: c"}, "'chosen': the answer is empty"),
        (TEXTS, MESSAGES, "'chosen' is not a string, but [{"),
        (TEXTS, {**TEXTS, "chosen": 3}, "'chosen' is not a string, but 3"),
        (MESSAGES, {**MESSAGES, "chosen": "c\n"}, "'chosen' and 'rejected' are the same answer"),
        (MESSAGES, {**MESSAGES, "rejected": [answer(" ")]}, "'rejected': the answer is empty"),
        (MESSAGES, {**MESSAGES, "prompt": []}, "'prompt': the list of messages is empty"),
        (MESSAGES, {**MESSAGES, "chosen": None}, "'chosen': not a list of messages, but null"),
        (MESSAGES, {"chosen": "b", "rejected": "c"}, "there is no 'prompt'"),
        (
            MESSAGES,
            {**MESSAGES, "chosen": [user("x"), answer("b")]},
            "'chosen': it starts with a message of the role 'user', but",
        ),
        (MESSAGES, {**MESSAGES, "chosen": [user("a")]}, "'chosen': the last message has the role 'user'; it should be"),
        (
            MESSAGES,
            {
                "chosen": [user("a"), answer("b"), user("c"), answer("d")],
                "rejected": [user("a"), answer("x"), user("c"), answer("y")],
            },
            "'chosen' and 'rejected' differ in message 2, before the answer",
        ),
        (MESSAGES, {**MESSAGES, "system": 3}, "'system' is not a string, but 3"),
    ],
)
def test_rows_that_are_no_pairs(folder, capsys, like, row, message):
    jsonl(folder / "a.jsonl", [like, row])
    command = [folder / "a.jsonl", "--tokenizer", folder / "t", *FLAGS]
    error = refused(capsys, *command, "--out", folder / "d")
    assert "a.jsonl, line 2: " in error
    assert message in error
    assert prepared(folder / "d", *command, "--on-error", "skip").splits["train"].num_documents == 2
    assert sum(read_manifest(folder / "d").skipped.values()) == 1


SAID = st.sampled_from([None, 3, "", "a", "a b", [], {}, ["a"]])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", None])}, optional={"content": SAID}
)
VALUE = SAID | MESSAGE | st.lists(MESSAGE, max_size=3)
ROW = st.fixed_dictionaries({"chosen": VALUE, "rejected": VALUE}, optional={"prompt": VALUE, "system": SAID})


@given(st.lists(ROW, min_size=20, max_size=40), st.sampled_from([TEXTS, MESSAGES]))
@settings(max_examples=4, deadline=None)
def test_of_any_rows_each_is_a_pair_or_a_problem(tmp_path_factory, rows, first):
    root = tmp_path_factory.mktemp("any")
    (root / "x.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    flags = [*FLAGS, "--on-error", "skip", *(["--template", root / "x.jinja"] if first is MESSAGES else [])]
    split = prepared(root / "d", jsonl(root / "a.jsonl", [first, *rows]), *flags).splits["train"]
    assert split.num_documents // 2 + sum(read_manifest(root / "d").skipped.values()) == len(rows) + 1
    for index in range(0, split.num_documents, 2):
        one, other = (split.document(i)[: split.prompt_length(i)].tobytes() for i in (index, index + 1))
        assert one == other
        assert split.document(index).tobytes() != split.document(index + 1).tobytes()


def test_text_files_and_other_settings_are_refused(folder, capsys):
    (folder / "a.txt").write_text("a")
    out = ["--preference", "--out", folder / "d"]
    assert "text has no fields; pairs are read from JSONL and Parquet" in refused(capsys, folder / "a.txt", *out)
    error = refused(capsys, "x", *out, "--messages", "m", "--field", "f", "--train-bpe", 300)
    assert (
        "--preference reads prompt (or --prompt-field NAME), chosen and rejected; leave --messages, --field out"
        in error
    )
    assert "--tokenizer instead of --train-bpe" in error
    assert "leave --completion-field out" in refused(
        capsys, "x", *out, "--prompt-field", "p", "--completion-field", "c"
    )
    path = jsonl(folder / "a.jsonl", [MESSAGES])
    assert "--bos is for documents" in refused(capsys, path, *out, "--tokenizer", folder / "t", "--bos", "none")
    assert "did you mean --preference" in refused(capsys, path, "--preferences", "--out", folder / "d")


def some(count):
    return [
        {"prompt": f"{i}?", "chosen": text, "rejected": f"no {text}"}
        for i, text in enumerate(texts(count))
        if text.strip()
    ]


def test_a_pair_is_in_one_split_and_one_shard_and_once_with_dedup(tmp_path):
    rows = some(80)
    path = jsonl(tmp_path / "a.jsonl", [*rows, *rows])
    dataset = prepared(tmp_path / "d", path, "--preference", "--dedup", "--held-out", 0.3, "--shard-tokens", 1500)
    assert len(list(dataset.folder.glob("train-*.tokens"))) > 3
    kept = []
    for name in ("train", "validation"):
        split = dataset.splits[name]
        assert split.num_documents > 30
        assert all(len(lengths) % 2 == 0 for lengths in split.lengths())
        for index in range(0, split.num_documents, 2):
            one, other = (bytes(split.document(i)).decode() for i in (index, index + 1))
            prompt = one[: split.prompt_length(index)]
            assert other == f"{prompt}no {one.removeprefix(prompt)}"
            kept.append(one)
    assert sorted(kept) == sorted(row["prompt"] + row["chosen"] for row in rows)


def test_resumed_it_is_the_same_to_the_byte(tmp_path, monkeypatch, capsys):
    path = parquet(tmp_path / "a.parquet", some(40))
    command = [path, "--preference", "--shard-tokens", 900, "--held-out", 0.2, "--save-seconds", 0]
    whole = contents(prepared(tmp_path / "whole", *command).folder)
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 7)
    encode = ByteTokenizer.encode_batch
    left = [4]

    def interrupted(self, some):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return encode(self, some)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", interrupted)
    assert main([*map(str, command), "--out", str(tmp_path / "d")]) == 130
    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode)
    assert contents(prepared(tmp_path / "d", *command).folder) == whole
    assert "resuming after 0 of 1 inputs, item 21 of the next" in capsys.readouterr().out


def test_the_manifest_has_format_2_and_damage_is_named(tmp_path, capsys):
    dataset = prepared(tmp_path / "d", jsonl(tmp_path / "a.jsonl", some(20)), *FLAGS)
    assert main(["--verify", str(dataset.folder)]) == 0
    file = dataset.folder / MANIFEST
    record = json.loads(file.read_text())
    assert (record["format"], record["pairs"], record["prompts"]) == (2, True, True)
    (shard,) = record["splits"]["train"]["shards"]
    number = {"documents": shard["documents"] - 1}
    odd = {**record["splits"]["train"], **number, "shards": [{**shard, **number}]}
    for change, message in (
        ({"format": 1}, "damaged: format 1 with pairs"),
        ({"pairs": False}, "damaged: format 2 without pairs"),
        ({"prompts": False}, "damaged: the file: pairs without prompts"),
        ({"splits": {**record["splits"], "train": odd}}, f"a shard of pairs has {odd['documents']} documents"),
    ):
        file.write_text(json.dumps({**record, **change}))
        with pytest.raises(DatasetError, match=message):
            open_dataset(dataset.folder)
        assert main(["--verify", str(dataset.folder)]) == 1
        assert message in capsys.readouterr().out
    file.write_text(json.dumps({key: value for key, value in record.items() if key != "format"}))
    with pytest.raises(DatasetError, match="damaged: format None with pairs"):
        open_dataset(dataset.folder)


def test_other_data_keeps_format_1(tmp_path):
    fields = ["--prompt-field", "prompt", "--completion-field", "chosen"]
    dataset = prepared(tmp_path / "d", jsonl(tmp_path / "a.jsonl", some(9)), *fields)
    record = json.loads((dataset.folder / MANIFEST).read_text())
    assert record["format"] == 1
    assert "pairs" not in record


def test_rows_and_mixtures(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", some(30))
    pairs = prepared(tmp_path / "pairs", path, "--preference", "--held-out", 0.2).folder
    more = prepared(tmp_path / "more", path, *FLAGS).folder
    tuning = prepared(tmp_path / "sft", path, "--prompt-field", "prompt", "--completion-field", "chosen").folder
    assert load_corpus(None, {str(pairs): 1, str(more): 2}, validation=pairs).has_pairs
    with pytest.raises(CorpusError, match=f"{pairs} has pairs .* and {tuning} has not: name datasets of one kind"):
        load_corpus(None, {str(tuning): 1, str(pairs): 2})
    with pytest.raises(CorpusError, match=f"{pairs} has pairs .* and {tuning} has not"):
        load_corpus(pairs, validation=tuning)
    with pytest.raises(CorpusError, match=r"every pair is longer than data.sequence_length=2; use a larger"):
        Data(load_corpus(pairs), RowSettings(2, 256, long_documents="drop"), 0)
    split = open_dataset(more).splits["train"]
    rows = make_rows(split, RowSettings(2000, 256))
    answers = [
        bytes(row["labels"][(row["pairs"] == sign) & (row["labels"] != IGNORE)].astype(np.uint8))
        for row in rows
        for sign in (1, -1)
    ]
    assert all(answers[i + 1] == b"no " + answers[i] for i in range(0, len(answers), 2))


LOSS = """
import jax.numpy as jnp

def loss(model, batch, key):
    labels = jnp.where(batch["pairs"] > 0, batch["labels"], -100)
    total, _ = model.loss(batch["inputs"], labels, segments_BT=batch["segments"])
    return total, batch["pairs"].max(-1).sum()
"""


@pytest.fixture
def run(tmp_path):
    """Flags of a run on pairs, some of which are too long."""
    dataset = prepared(tmp_path / "d", jsonl(tmp_path / "a.jsonl", some(99)), "--preference", "--held-out", 0.2)
    command = [*SMALL, *mesh(1, 2, 1), "--data.path", dataset.folder, "--data.sequence-length", 300]
    return [*map(str, command), "--run.dir", str(tmp_path / "run"), "--data.long-documents", "drop"]


def test_the_loss_of_a_run_must_be_one_for_pairs(run, tmp_path, capsys):
    assert train(run) == 2
    assert f"{tmp_path / 'd'}: pairs need a loss for them: --train.loss jaxtp:DPO" in capsys.readouterr().err


@pytest.mark.wide
def test_a_run_counts_pairs(run, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(LOSS)
    assert train([*run, "--train.steps", "2", "--train.loss", f"{tmp_path / 'mine.py'}:loss"]) == 0
    lengths = np.concatenate(list(open_dataset(tmp_path / "d").splits["train"].lengths())).reshape(-1, 2).sum(1)
    kept = int((lengths <= 300).sum())
    assert 0 < kept < len(lengths)
    assert f"pairs: {kept}, {len(lengths) - kept} left out" in capsys.readouterr().out
    assert evaluate(["--model", str(tmp_path / "run"), "--data", str(tmp_path / "d")]) == 2
    assert "d has pairs of answers" in capsys.readouterr().err
