"""What each document begins and ends with, and that runs and what is generated from them keep to
it.
"""

import json
from pathlib import Path

import pytest
from corpora import (
    BEGIN,
    END,
    STOP,
    TURN,
    dataset,
    output,
    prompts_and_answers,
    refusal,
    run,
    texts,
    write,
)
from runs import SMALL, mesh
from small_tokenizers import begins_texts
from support import assert_refused
from tables import read_json, write_json

from jaxtp.data.corpus import CorpusError, load_corpus
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import HuggingFaceTokenizer
from jaxtp.generate.loading import open_source
from jaxtp.train.__main__ import main as train

ROWS = texts(40, seed=2)
TOKENIZER = HuggingFaceTokenizer(begins_texts(), "t", eos="<|end|>")
MANIFEST = Path("d/dataset.json")


@pytest.fixture(autouse=True)
def _rows(folder):
    write("t/tokenizer.json", begins_texts())
    write("a.jsonl", ROWS)


COMMAND = "--tokenizer t/tokenizer.json --eos '<|end|>' --held-out 0.3"


def made(flags="", rows="a.jsonl"):
    return dataset(f"{rows} {COMMAND} {flags}")


def both_splits(dataset):
    return [*prompts_and_answers(dataset), *prompts_and_answers(dataset, "validation")]


def ids_of(dataset):
    return [prompt + rest for prompt, rest in both_splits(dataset)]


def test_documents_begin_as_the_tokenizer_says():
    begun = made()
    plain = made("--bos none --out plain")
    assert (begun.tokenizer.prefix, plain.tokenizer.prefix) == ((BEGIN,), ())
    assert ids_of(begun) == [[BEGIN, *ids] for ids in ids_of(plain)]
    assert sorted(ids_of(plain)) == sorted(
        [*ids.tolist(), END] for ids in TOKENIZER.encode_batch(ROWS)
    )


def test_the_first_token_is_part_of_a_prompt():
    write("p.jsonl", [{"p": row, "c": "yes"} for row in ROWS])
    found = made("--prompt-field p --completion-field c", "p.jsonl")
    expected = [[BEGIN, *ids.tolist()] for ids in TOKENIZER.encode_batch(ROWS)]
    assert sorted(prompt for prompt, _ in both_splits(found)) == sorted(expected)


def test_a_beginning_that_the_text_spells_is_not_doubled():
    write("s.jsonl", ["<|begin|>a", "a"])
    first, second = ids_of(made("--special-tokens --held-out 0", "s.jsonl"))
    assert first == second
    assert first.count(BEGIN) == 1


def test_bytes_have_no_first_token():
    assert dataset("a.jsonl").tokenizer.prefix == ()


def test_datasets_of_different_first_or_last_tokens_are_told_apart():
    made()
    assert f"tokenizer.prefix: ({BEGIN},) -> ()" in refusal(f"a.jsonl {COMMAND} --bos none")
    made("--bos none --out none")
    made("--eos '<|stop|>' --out stop")
    for name, how in {
        "none": rf"before them \[{BEGIN}\] and \[\]",
        "stop": f"after them {END} and {STOP}",
    }.items():
        with pytest.raises(
            CorpusError, match=rf"begin or end with different tokens .*{how}.*--bos and --eos"
        ):
            load_corpus(None, {"d": 1.0, name: 1.0})


def test_a_manifest_of_an_earlier_version_has_other_settings_and_no_first_tokens():
    tokenizer = made("--bos none").tokenizer
    record = read_json(MANIFEST)
    del record["tokenizer"]["prefix"]
    record["arguments"]["bpe_sample"] = 2**28
    write_json(MANIFEST, record)
    assert open_dataset(Path("d")).tokenizer == tokenizer
    assert "is finished; there is nothing to do" in output(f"a.jsonl {COMMAND} --bos none")
    assert "prefix" not in load_corpus(Path("d")).describe()


def test_a_damaged_prefix_is_found():
    made()
    record = read_json(MANIFEST)
    for prefix in (7, ["a"], [True], [-1], [10**6]):
        record["tokenizer"]["prefix"] = prefix
        write_json(MANIFEST, record)
        code, out, _ = run("--verify d")
        assert (code, "damaged: t" in out) == (1, True), prefix


@pytest.mark.journey
def test_a_run_generates_as_its_data_begin(capsys):
    made()
    command = [
        *SMALL,
        f"--model.vocab-size={TOKENIZER.info.vocab_size}",
        *mesh(1, 1, 1),
        "--run.dir=run",
        "--data.path=d",
        "--train.steps=2",
    ]
    assert train(command) == 0
    assert open_source(Path("run")).prefix == (BEGIN,)
    assert train([*command, "--train.steps=3"]) == 0
    assert "resumed from the checkpoint at step 2" in capsys.readouterr().out
    made("--bos none --out none")
    assert_refused(
        train,
        [*command, "--data.path=none", "--train.steps=4"],
        f"data: prefix: [{BEGIN}] -> None",
        capsys,
    )


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (
            {
                "tokenizer_config.json": {"eos_token": "<|stop|>"},
                "config.json": {"eos_token_id": 7},
            },
            STOP,
        ),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|turn|>"}}}, TURN),
        (
            {"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": STOP}},
            STOP,
        ),
        ({"generation_config.json": {"eos_token_id": [TURN, STOP]}}, TURN),
    ],
)
def test_the_end_token_is_that_of_the_folder(beside, expected):
    for name, record in beside.items():
        write(f"t/{name}", json.dumps(record))
    out = output("a.jsonl --tokenizer t")
    assert f"documents   begin with <|begin|> ({BEGIN}); end with " in out
    assert f" ({expected})\n" in out
    assert open_dataset(Path("d")).tokenizer.eos_id == expected
    assert f"end with <|end|> ({END})\n" in output(f"a.jsonl {COMMAND} --out named")


def test_an_end_token_that_nothing_tells_or_that_is_not_there_is_refused():
    assert "which token ends a document? Name it by --eos TOKEN" in refusal("a.jsonl --tokenizer t")
    for name, content, message in (
        ("config.json", '{"eos_token_id": 9999}', "has no token with the id 9999"),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', "has no token '</s>'; it has "),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is a list, not an object"),
    ):
        write(f"t/{name}", content)
        assert message in refusal("a.jsonl --tokenizer t")
    Path("empty").mkdir()
    assert "empty/tokenizer.json: No such file" in refusal("a.jsonl --tokenizer empty")
