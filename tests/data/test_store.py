"""Reading datasets: what is in them, without reading more than is asked for, and what is wrong
with them.
"""

import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from corpora import jsonl, prepared, texts, write
from numpy.testing import assert_array_equal
from structures import PLANTED, plant, watched
from tables import read_json, read_table, write_json

from jaxtp.data.manifest import MANIFEST, TokenizerInfo, read_manifest, totals
from jaxtp.data.packing import Packed
from jaxtp.data.store import DatasetError, open_dataset, verify

ROWS = [{"p": text[: i % 7], "c": text} for i, text in enumerate(texts(200))]
FLAGS = [
    "--prompt-field=p",
    "--completion-field=c",
    "--shard-tokens=5000",
    "--held-out=0.1",
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Bytes, in several shards, with prompts."""
    root = tmp_path_factory.mktemp("store")
    return prepared(root / "d", jsonl(root / "a.jsonl", ROWS), *FLAGS)


@pytest.fixture
def split(dataset):
    return dataset.splits["train"]


@pytest.fixture
def copy(dataset, folder):
    return Path(shutil.copytree(dataset.folder, "copy"))


def test_documents_tokens_and_positions_agree(dataset, split):
    assert len(list(dataset.folder.glob("train-*.tokens"))) > 3
    documents = [split.document(i) for i in range(split.num_documents)]
    everything = np.concatenate(documents)
    lengths = [len(document) for document in documents]
    assert everything.size == split.num_tokens
    assert read_manifest(dataset.folder).splits["train"].longest == max(lengths)
    assert np.concatenate(list(split.lengths())).tolist() == lengths
    owners = np.repeat(np.arange(split.num_documents), lengths)
    for position in range(0, split.num_tokens, 37):
        assert split.document_at(position) == owners[position]
        assert_array_equal(split.tokens(position, split.num_tokens), everything[position:])
    assert read_manifest(dataset.folder).splits["train"].text_bytes == split.num_tokens


def test_a_part_of_a_document_stays_in_it(split):
    whole = split.document(3)
    for start, stop in ((0, None), (2, 5), (0, 10**9), (len(whole) + 4, None), (3, 2)):
        assert_array_equal(split.document(3, start, stop), whole[start:stop])


def test_documents_are_views_of_the_files(split):
    document = split.document(0)
    assert type(document) is np.ndarray
    assert not document.flags.writeable
    assert not document.flags.owndata


def test_opening_reads_no_data(split, copy):
    opened = open_dataset(copy).splits["train"]
    for path in copy.glob("*-*.*"):
        path.unlink()
    assert opened.num_tokens == split.num_tokens
    with pytest.raises(
        DatasetError, match=r"train-00000\.documents: damaged dataset: .*No such file"
    ):
        opened.document(0)


def test_places_outside_of_the_data_are_an_index_error(split):
    for ask, *place in (
        (split.document, split.num_documents),
        (split.document, -1),
        (split.location, 10**6),
    ):
        with pytest.raises(IndexError, match="of"):
            ask(*place)


def test_places_name_shard_and_document(split):
    first = len(next(split.lengths()))
    assert split.location(first - 1).endswith(f"train-00000.tokens, document {first - 1}")
    assert split.location(first).endswith("train-00001.tokens, document 0")


def test_threads_and_pickles_read_the_same(split):
    pickled = pickle.dumps(split)
    assert len(pickled) < 20_000
    fresh = pickle.loads(pickled)
    numbers = [*range(split.num_documents)] * 3
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: fresh.document(i).tobytes(), numbers))
    assert found == [split.document(i).tobytes() for i in numbers]


def test_the_identity_follows_from_the_data(split):
    same = prepared("same", jsonl(Path("b.jsonl.gz"), ROWS), *FLAGS)
    other = prepared("other", jsonl(Path("c.jsonl"), ROWS[1:]), *FLAGS)
    assert same.splits["train"].identity == split.identity
    assert other.splits["train"].identity != split.identity


def test_ids_are_stored_in_the_smallest_dtype_that_holds_the_vocabulary():
    sizes = {
        size: TokenizerInfo("huggingface", "", size, None).dtype.itemsize
        for size in (256, 257, 65536, 65537)
    }
    assert sizes == {256: 1, 257: 2, 65536: 2, 65537: 4}


def test_verify_is_silent_of_a_whole_dataset(dataset):
    assert list(verify(dataset)) == []


@pytest.mark.parametrize("suffix", ["tokens", "documents", "prompts"])
def test_a_file_of_another_size_is_named(copy, suffix):
    path = copy / f"train-00001.{suffix}"
    content = path.read_bytes()
    for damaged, message in {
        content[:-1]: r"cut short: [\d,]+ bytes of",
        content + b"2": "too long",
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=rf"train-00001\.{suffix}: damaged: {message}"):
            open_dataset(copy)
    path.unlink()
    with pytest.raises(DatasetError, match=rf"train-00001\.{suffix}: damaged: No such file"):
        open_dataset(copy)


def test_damaged_offsets_are_named_before_they_are_used(copy):
    path = copy / "train-00001.documents"
    whole = np.fromfile(path, "<u8")
    for entry, value in ((0, 3), (5, 10**6), (5, 2**40), (5, 2**64 - 1), (5, 0), (-1, 2**62)):
        offsets = whole.copy()
        offsets[entry] = value
        offsets.tofile(path)
        with pytest.raises(
            DatasetError, match=r"train-00001\.documents: .*damaged dataset; .*--verify"
        ):
            Packed(open_dataset(copy).splits["train"], 32, 256)


@pytest.fixture
def manifest(copy):
    """The content of the manifest, which `save` writes back."""
    return read_json(copy / MANIFEST)


def save(copy, manifest):
    write_json(copy / MANIFEST, manifest)
    return copy


def test_verify_checks_ids_and_offsets_against_the_manifest(copy, manifest):
    manifest["tokenizer"]["vocab_size"] = 100
    train = manifest["splits"]["train"]
    train["shards"][0]["longest"] -= 1
    train["longest"] = max(shard["longest"] for shard in train["shards"])
    problems = list(verify(open_dataset(save(copy, manifest))))
    assert any("is beyond the vocabulary of 100" in problem for problem in problems)
    assert any("train-00000.documents: the longest document has" in problem for problem in problems)


CONTRADICTIONS = read_table(__file__) | {
    "splits secret": ({**totals([]), "shards": []}, "unknown split 'secret'"),
}


@pytest.mark.parametrize("place", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_refused(copy, manifest, place):
    value, message = CONTRADICTIONS[place]
    *above, last = (int(key) if key.isdigit() else key for key in place.split())
    inner = manifest
    for key in above:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(DatasetError, match=message):
        open_dataset(save(copy, manifest))


def test_folders_that_are_no_dataset_are_refused(folder):
    write("file", "x")
    write(f"deep/{MANIFEST}", "[" * 100_000)
    for name, message in {
        "nothing": "no such folder; make a dataset there by",
        ".": r"has no dataset\.json: it is not a dataset, or an unfinished one",
        "file": "is not a folder",
        "deep": "damaged: not JSON",
    }.items():
        with pytest.raises(DatasetError, match=message):
            open_dataset(folder / name)


@pytest.mark.parametrize(
    "name", ["dataset.json", "train-00001.tokens", "train-00000.documents", "train-00000.prompts"]
)
def test_a_planted_file_is_one_error(copy, name):
    """A pipe, a device, a link, ... in the place of a file of the dataset."""
    (copy.parent / "victim").write_text("{}")
    for kind in PLANTED:
        if (copy / name).is_dir():
            (copy / name).rmdir()
        plant(copy / name, kind)
        with watched(), pytest.raises(DatasetError) as caught:
            open_dataset(copy)
        assert str(copy) in str(caught.value), kind
        assert "\n" not in str(caught.value), kind


def test_a_manifest_has_a_maximum_size(copy):
    (copy / MANIFEST).write_bytes(b" " * (2**25 + 1))
    with pytest.raises(DatasetError, match="larger than 33,554,432 bytes"):
        read_manifest(copy)


def sparse(copy, manifest, documents, tokens):
    """A dataset whose files take no room on the disk."""
    shard = manifest["splits"]["train"]["shards"][0]
    shard |= {"documents": documents, "tokens": tokens, "longest": tokens - documents + 1}
    manifest["splits"]["train"] = {**shard, "shards": [shard]}
    del manifest["splits"]["train"]["sha256"]
    for suffix, size in {
        "tokens": tokens,
        "documents": 8 * (documents + 1),
        "prompts": 4 * documents,
        "origins": 8 * documents,
    }.items():
        path = copy / f"train-00000.{suffix}"
        path.write_bytes(b"")
        os.truncate(path, size)
    if documents == 1:
        np.array([0, tokens], "<u8").tofile(copy / "train-00000.documents")
    return open_dataset(save(copy, manifest)).splits["train"]


@pytest.mark.parametrize(
    ("documents", "tokens", "needed"),
    [(1, 2**41, 773), (2**37, 2**38, 6185)],
)
def test_rows_that_no_memory_could_plan_are_one_error(copy, manifest, documents, tokens, needed):
    """Of 45 bytes for each document, or for each row of one."""
    split = sparse(copy, manifest, documents, tokens)
    with (
        watched(),
        pytest.raises(
            DatasetError, match=f"need {needed:,} GB of memory to plan the rows"
        ) as caught,
    ):
        Packed(split, 128, 256)
    assert f"{documents:,} documents of {tokens:,} tokens" in str(caught.value)
    assert "--data.packing concatenated" in str(caught.value)


def test_offsets_are_checked_in_blocks(copy, manifest):
    split = sparse(copy, manifest, 2**30, 2**31)
    with (
        watched(memory=10**9),
        pytest.raises(DatasetError, match="the offsets do not ascend from 0"),
    ):
        next(split.lengths())
