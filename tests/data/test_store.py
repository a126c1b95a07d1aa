"""Reading datasets: what is in them, without reading more than is asked for, and what is wrong with them."""

import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from corpora import jsonl, prepared, texts
from structures import PLANTED, plant, watched

from jaxtp.data.manifest import MANIFEST, TokenizerInfo, read_manifest
from jaxtp.data.packing import Packed
from jaxtp.data.store import DatasetError, open_dataset, verify


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Bytes, in several shards, with prompts."""
    root = tmp_path_factory.mktemp("store")
    rows = [{"p": text[: i % 7], "c": text} for i, text in enumerate(texts(200))]
    fields = ["--prompt-field", "p", "--completion-field", "c"]
    return prepared(root / "d", jsonl(root / "a.jsonl", rows), *fields, "--shard-tokens", 5000, "--held-out", 0.1)


@pytest.fixture
def copy(dataset, tmp_path):
    return shutil.copytree(dataset.folder, tmp_path / "copy")


def test_documents_tokens_and_positions_agree(dataset):
    split = dataset.splits["train"]
    assert len(list(dataset.folder.glob("train-*.tokens"))) > 3
    documents = [split.document(i) for i in range(split.num_documents)]
    everything = np.concatenate(documents)
    assert everything.size == split.num_tokens
    assert split.longest == max(map(len, documents))
    assert np.concatenate(list(split.lengths())).tolist() == list(map(len, documents))
    np.testing.assert_array_equal(split.tokens(0, split.num_tokens), everything)
    owners = np.repeat(np.arange(split.num_documents), list(map(len, documents)))
    for position in range(0, split.num_tokens, 37):
        assert split.document_at(position) == owners[position]
        np.testing.assert_array_equal(split.tokens(position, split.num_tokens), everything[position:])
    assert split.tokens(5, 5).size == 0
    assert read_manifest(dataset.folder).splits["train"].text_bytes == split.num_tokens


def test_a_part_of_a_document_stays_in_it(dataset):
    split = dataset.splits["train"]
    whole = split.document(3)
    for start, stop in ((0, None), (2, 5), (0, 10**9), (len(whole) + 4, None), (3, 2)):
        np.testing.assert_array_equal(split.document(3, start, stop), whole[start:stop])


def test_prompts(dataset):
    split = dataset.splits["train"]
    assert split.has_prompts
    for index in range(split.num_documents):
        prompt = split.prompt_length(index)
        document = split.document(index).tobytes()
        assert document[prompt:].startswith(document[:prompt])


def test_documents_are_views_of_the_files(dataset):
    document = dataset.splits["train"].document(0)
    assert type(document) is np.ndarray
    assert not document.flags.writeable
    assert not document.flags.owndata
    assert dataset.splits["train"].tokens(0, 9).base is not None


def test_opening_reads_no_data(dataset, copy):
    opened = open_dataset(copy)
    for path in copy.glob("*-*.*"):
        path.unlink()
    assert opened.splits["train"].num_tokens == dataset.splits["train"].num_tokens
    with pytest.raises(DatasetError, match=r"train-00000\.documents: damaged dataset: .*No such file"):
        opened.splits["train"].document(0)


def test_what_is_not_there_is_an_index_error(dataset):
    split = dataset.splits["train"]
    for ask in (
        lambda: split.document(split.num_documents),
        lambda: split.document(-1),
        lambda: split.document_at(split.num_tokens),
        lambda: split.tokens(0, split.num_tokens + 1),
        lambda: split.tokens(3, 2),
        lambda: split.location(10**6),
    ):
        with pytest.raises(IndexError, match="of"):
            ask()


def test_places_name_shard_and_document(dataset):
    split = dataset.splits["train"]
    first = len(next(split.lengths()))
    assert split.location(first - 1).endswith(f"train-00000.tokens, document {first - 1}")
    assert split.location(first).endswith("train-00001.tokens, document 0")


def test_threads_and_pickles_read_the_same(dataset):
    split = dataset.splits["train"]
    expected = [split.document(i).tobytes() for i in range(split.num_documents)]
    fresh = pickle.loads(pickle.dumps(split))
    assert len(pickle.dumps(split)) < 20_000
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: fresh.document(i).tobytes(), list(range(split.num_documents)) * 3))
    assert found == expected * 3


def test_identity_is_of_the_data(dataset, tmp_path):
    rows = [{"p": text[: i % 7], "c": text} for i, text in enumerate(texts(200))]
    fields = ["--prompt-field", "p", "--completion-field", "c", "--shard-tokens", 5000, "--held-out", 0.1]
    same = prepared(tmp_path / "same", jsonl(tmp_path / "b.jsonl.gz", rows), *fields)
    other = prepared(tmp_path / "other", jsonl(tmp_path / "c.jsonl", rows[1:]), *fields)
    assert same.splits["train"].identity == dataset.splits["train"].identity
    assert other.splits["train"].identity != dataset.splits["train"].identity


@pytest.mark.parametrize(("size", "itemsize"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_the_smallest_dtype_that_holds_the_vocabulary(size, itemsize):
    assert TokenizerInfo("huggingface", "", size, None).dtype.itemsize == itemsize


def test_verify_is_silent_of_a_whole_dataset(dataset):
    assert list(verify(dataset)) == []


@pytest.mark.parametrize("suffix", ["tokens", "documents", "prompts"])
def test_a_file_that_is_cut_short_is_named(copy, suffix):
    path = copy / f"train-00001.{suffix}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=rf"train-00001\.{suffix}: damaged dataset: cut short: [\d,]+ bytes of"):
        open_dataset(copy)
    path.write_bytes(path.read_bytes() + b"22")
    with pytest.raises(DatasetError, match=rf"train-00001\.{suffix}: damaged dataset: too long"):
        open_dataset(copy)
    path.unlink()
    with pytest.raises(DatasetError, match=rf"train-00001\.{suffix}: damaged dataset: No such file"):
        open_dataset(copy)


@pytest.mark.parametrize("suffix", ["tokens", "documents", "prompts"])
def test_verify_finds_a_flipped_bit(copy, suffix):
    path = copy / f"train-00001.{suffix}"
    content = bytearray(path.read_bytes())
    content[-9] ^= 64  # of the offsets, in the highest byte of one
    path.write_bytes(content)
    problems = list(verify(open_dataset(copy)))
    assert any(f"train-00001.{suffix}: its sha256 is" in problem for problem in problems)
    assert any("do not ascend" in problem for problem in problems) == (suffix == "documents")


@pytest.mark.parametrize(
    ("entry", "value"), [(0, 3), (5, 10**6), (5, 2**40), (5, 2**64 - 1), (5, 0), (-1, 2**62)], ids=str
)
def test_damaged_offsets_are_named_before_they_are_used(copy, entry, value):
    path = copy / "train-00001.documents"
    offsets = np.fromfile(path, "<u8")
    offsets[entry] = value
    offsets.tofile(path)
    with pytest.raises(DatasetError, match=r"train-00001\.documents: .*damaged dataset; .*--verify"):
        Packed(open_dataset(copy).splits["train"], 32, 256)


def edited(folder, edit):
    record = json.loads((folder / MANIFEST).read_text())
    edit(record)
    (folder / MANIFEST).write_text(json.dumps(record))
    return folder


def test_verify_checks_ids_and_offsets_against_the_manifest(copy):
    def edit(record):
        record["tokenizer"]["vocab_size"] = 100
        shard = record["splits"]["train"]["shards"][0]
        shard["longest"] -= 1
        record["splits"]["train"]["longest"] = max(s["longest"] for s in record["splits"]["train"]["shards"])

    problems = list(verify(open_dataset(edited(copy, edit))))
    assert any("is beyond the vocabulary of 100" in problem for problem in problems)
    assert any("train-00000.documents: the longest document has" in problem for problem in problems)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r.update(format=3), "format 3; this version of jaxtp reads formats 1 and 2"),
        (lambda r: r.pop("splits"), "damaged: splits: Field required"),
        (lambda r: r["splits"]["train"].update(tokens=3), "tokens of train does not match its shards"),
        (lambda r: r["splits"].update(secret=r["splits"].pop("train")), "unknown split 'secret'"),
        (lambda r: r["tokenizer"].update(kind="mine"), "tokenizer.kind = 'mine'"),
        (lambda r: r["tokenizer"].update(eos_id=256), "token 256 is beyond vocab_size = 256"),
        (lambda r: r["tokenizer"].update(vocab_size=True), "tokenizer.vocab_size = True: "),
        (lambda r: r.update(prompts=False), "a shard has the files"),
        (lambda r: r["splits"]["train"]["shards"][0].update(documents=-1), "documents = -1"),
        (lambda r: r["splits"]["train"]["shards"][0].update(documents=0), "a shard has 0 documents"),
    ],
)
def test_a_manifest_that_does_not_hold_is_refused(copy, edit, message):
    with pytest.raises(DatasetError, match=message):
        open_dataset(edited(copy, edit))


def test_what_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="no such folder; make a dataset there by"):
        open_dataset(tmp_path / "nothing")
    with pytest.raises(DatasetError, match=r"has no dataset\.json: it is not a dataset, or an unfinished one"):
        open_dataset(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatasetError, match="is not a folder"):
        open_dataset(tmp_path / "file")
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(DatasetError, match="damaged: not JSON"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["dataset.json", "train-00001.tokens", "train-00000.documents", "train-00000.prompts"])
def test_what_is_no_file_of_the_dataset_is_one_error(copy, kind, name):
    (copy.parent / "victim").write_text("{}")
    plant(copy / name, kind)
    with watched(), pytest.raises(DatasetError) as caught:
        open_dataset(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_manifest_has_a_maximum_size(copy):
    (copy / MANIFEST).write_bytes(b" " * (2**25 + 1))
    with pytest.raises(DatasetError, match="larger than 33,554,432 bytes"):
        read_manifest(copy)


def sparse(folder, documents, tokens):
    """A dataset whose files take no room on the disk."""
    record = json.loads((folder / MANIFEST).read_text())
    (shard, *_) = record["splits"]["train"]["shards"]
    shard |= {"documents": documents, "tokens": tokens, "longest": tokens - documents + 1}
    record["splits"]["train"] = {**shard, "shards": [shard]}
    del record["splits"]["train"]["sha256"]
    (folder / MANIFEST).write_text(json.dumps(record))
    sizes = {"tokens": tokens, "documents": 8 * (documents + 1), "prompts": 4 * documents}
    for suffix, size in sizes.items():
        (folder / f"train-00000.{suffix}").unlink()
        with (folder / f"train-00000.{suffix}").open("wb") as file:
            file.truncate(size)
    if documents == 1:
        np.array([0, tokens], "<u8").tofile(folder / "train-00000.documents")
    return open_dataset(folder).splits["train"]


@pytest.mark.parametrize(("documents", "tokens"), [(1, 2**41), (2**37, 2**38)])
def test_rows_that_no_memory_could_plan_are_one_error(copy, documents, tokens):
    split = sparse(copy, documents, tokens)
    with watched(), pytest.raises(DatasetError, match=r"need [\d,]+ GB of memory to plan the rows") as caught:
        Packed(split, 128, 256)
    assert f"{documents:,} documents of {tokens:,} tokens" in str(caught.value)
    assert "--data.packing concatenated" in str(caught.value)


def test_offsets_are_checked_in_blocks(copy):
    split = sparse(copy, 2**30, 2**31)
    with watched(memory=10**9):
        assert next(split._offset_problems(0)).endswith("the offsets do not ascend from 0")
