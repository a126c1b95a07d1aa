"""What each document begins and ends with, and that runs and what is generated from them keep to it."""

import json

import pytest
from corpora import jsonl, prepared, refused, texts
from runs import SMALL, mesh
from small_tokenizers import CHAT_TOKENS, begins_texts
from tokenizers import Tokenizer

from jaxtp.data.corpus import CorpusError, load_corpus
from jaxtp.data.prepare.__main__ import main
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import HuggingFaceTokenizer
from jaxtp.generate.loading import open_source
from jaxtp.train.__main__ import main as train

ROWS = texts(40, seed=2)
TOKENIZER = HuggingFaceTokenizer(begins_texts(), "t", eos="<|end|>")
FIRST, END, TURN, STOP = map(Tokenizer.from_str(begins_texts().decode()).token_to_id, CHAT_TOKENS)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer and texts."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").write_bytes(begins_texts())
    jsonl(tmp_path / "a.jsonl", ROWS)
    return tmp_path


def make(folder, name, *flags, rows="a.jsonl"):
    command = [folder / rows, "--tokenizer", folder / "t/tokenizer.json", "--eos", "<|end|>", "--held-out", 0.3]
    return prepared(folder / name, *command, *flags)


def documents(dataset):
    return [split.document(i).tolist() for split in dataset.splits.values() for i in range(split.num_documents)]


def test_documents_begin_as_the_tokenizer_says(folder):
    dataset, plain = make(folder, "auto"), make(folder, "none", "--bos", "none")
    assert (dataset.tokenizer.prefix, plain.tokenizer.prefix) == ((FIRST,), ())
    assert documents(dataset) == [[FIRST, *document] for document in documents(plain)]
    assert sorted(documents(plain)) == sorted([*ids.tolist(), END] for ids in TOKENIZER.encode_batch(ROWS))
    assert json.loads((dataset.folder / "dataset.json").read_text())["tokenizer"]["prefix"] == [FIRST]


def test_prompts_begin_so_too_and_the_first_token_is_part_of_them(folder):
    jsonl(folder / "p.jsonl", [{"p": row, "c": "yes"} for row in ROWS])
    dataset = make(folder, "d", "--prompt-field", "p", "--completion-field", "c", rows="p.jsonl")
    expected = {(FIRST, *ids.tolist()) for ids in TOKENIZER.encode_batch(ROWS)}
    for split in dataset.splits.values():
        found = {tuple(split.document(i, stop=split.prompt_length(i)).tolist()) for i in range(split.num_documents)}
        assert found <= expected


def test_a_beginning_that_the_text_spells_is_not_doubled(folder):
    jsonl(folder / "s.jsonl", ["<|begin|>a", "a"])
    dataset = make(folder, "d", "--special-tokens", "--held-out", 0, rows="s.jsonl")
    first, second = documents(dataset)
    assert first == second
    assert first.count(FIRST) == 1


def test_bytes_and_tokenizers_trained_here_begin_with_the_text(folder):
    for name, flags in {"bytes": [], "bpe": ["--train-bpe", 300]}.items():
        assert prepared(folder / name, folder / "a.jsonl", *flags).tokenizer.prefix == ()


def test_another_beginning_is_another_dataset(folder, capsys):
    make(folder, "d")
    command = [folder / "a.jsonl", "--tokenizer", folder / "t/tokenizer.json", "--eos", "<|end|>", "--held-out", 0.3]
    error = refused(capsys, *command, "--bos", "none", "--out", folder / "d")
    assert f"tokenizer.prefix: ({FIRST},) -> ()" in error
    make(folder, "none", "--bos", "none")
    make(folder, "stop", "--eos", "<|stop|>")
    for name, how in {"none": rf"before them \[{FIRST}\] and \[\]", "stop": f"after them {END} and {STOP}"}.items():
        with pytest.raises(CorpusError, match=rf"begin or end with different tokens .*{how}.*--bos and --eos"):
            load_corpus(None, {str(folder / "d"): 1.0, str(folder / name): 1.0})


def test_a_dataset_from_before_is_read_and_found_finished(folder, capsys):
    """Its manifest says nothing of prefixes."""
    dataset = make(folder, "d", "--bos", "none")
    path = dataset.folder / "dataset.json"
    record = json.loads(path.read_text())
    del record["tokenizer"]["prefix"]
    path.write_text(json.dumps(record))
    assert open_dataset(dataset.folder).tokenizer == dataset.tokenizer
    make(folder, "d", "--bos", "none")
    assert "is finished; there is nothing to do" in capsys.readouterr().out
    assert "prefix" not in load_corpus(dataset.folder).describe()


@pytest.mark.parametrize("prefix", [7, ["a"], [True], [-1], [10**6]])
def test_a_damaged_prefix_is_said_to_be(folder, capsys, prefix):
    path = make(folder, "d").folder / "dataset.json"
    record = json.loads(path.read_text())
    record["tokenizer"]["prefix"] = prefix
    path.write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["--verify", str(folder / "d")]) == 1
    assert "damaged: t" in capsys.readouterr().out


@pytest.mark.journey
def test_a_run_generates_as_its_data_begin(folder, capsys):
    make(folder, "d")
    flags = [
        *SMALL,
        "--model.vocab-size",
        str(TOKENIZER.info.vocab_size),
        *mesh(1, 1, 1),
        "--run.dir",
        str(folder / "run"),
    ]
    command = [*flags, "--data.path", str(folder / "d"), "--train.steps", "2"]
    assert train(command) == 0
    assert open_source(folder / "run").prefix == (FIRST,)
    assert train([*command, "--train.steps", "3"]) == 0
    assert "resumed from the checkpoint at step 2" in capsys.readouterr().out
    make(folder, "none", "--bos", "none")
    assert train([*command, "--data.path", str(folder / "none"), "--train.steps", "4"]) == 2
    assert f"data: prefix: [{FIRST}] -> None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|stop|>"}, "config.json": {"eos_token_id": 7}}, STOP),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|turn|>"}}}, TURN),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": STOP}}, STOP),
        ({"generation_config.json": {"eos_token_id": [TURN, STOP]}}, TURN),
    ],
)
def test_the_end_token_is_that_of_the_folder(folder, capsys, beside, expected):
    for name, record in beside.items():
        (folder / "t" / name).write_text(json.dumps(record))
    dataset = prepared(folder / "d", folder / "a.jsonl", "--tokenizer", folder / "t")
    assert dataset.tokenizer.eos_id == expected
    out = capsys.readouterr().out
    assert f"documents   begin with <|begin|> ({FIRST}); end with " in out
    assert f" ({expected})\n" in out
    assert make(folder, "e").tokenizer.eos_id == END
    assert f"end with <|end|> ({END})\n" in capsys.readouterr().out


def test_an_end_token_that_nothing_tells_or_that_is_not_there(folder, capsys):
    command = [folder / "a.jsonl", "--tokenizer", folder / "t", "--out", folder / "d"]
    assert "which token ends a document? Name it by --eos TOKEN" in refused(capsys, *command)
    (folder / "t/config.json").write_text('{"eos_token_id": 9999}')
    assert "has no token with the id 9999" in refused(capsys, *command)
    (folder / "t/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert "has no token '</s>'; it has " in refused(capsys, *command)
    (folder / "t/tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json is a list, not an object" in refused(capsys, *command)
    assert "out/tokenizer.json: No such file" in refused(capsys, *command[:2], folder, "--out", folder / "d").replace(
        str(folder), "out"
    )
