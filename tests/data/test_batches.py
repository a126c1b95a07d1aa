"""Batches of a user's sources: exact resume, the rows of each process, short batches, and clear errors."""

import json
from collections import Counter
from dataclasses import asdict

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtp
from jaxtp.data.batches import Position
from jaxtp.data.columns import WEIGHTS, BatchError, EndOfDataError, checksum
from jaxtp.data.loader import on_mesh, split
from jaxtp.data.sources import open_batches
from jaxtp.tools.launch.__main__ import main as launch
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.init_source import InitSource
from jaxtp.train.run_data import open_data

B, ROWS = 8, 40


class Dataset:
    """A map-style dataset that counts its reads."""

    def __init__(self, rows=ROWS):
        self.rows, self.read = rows, Counter()

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        self.read[index] += 1
        return {"x": index, "y": [index, index + 0.5]}


class Stream:
    """Batches that can be read again; each epoch in another order."""

    def __init__(self, rows=ROWS, size=B, seed=0):
        self.rows, self.size, self.seed, self.read = rows, size, seed, 0

    def order(self, epoch):
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)

    def batches(self, order, first=0):
        for start in range(first, self.rows, self.size):
            self.read += 1
            yield {"x": order[start : start + self.size]}

    def __iter__(self):
        self.seed += 1
        return self.batches(self.order(0))


class Stateful(Stream):
    """With a state and epochs, as Hugging Face's streams have them; `lossy` forgets its shuffle buffer."""

    lossy = False

    def __init__(self, **settings):
        super().__init__(**settings)
        self.epoch, self.state, self.loaded = 0, {"epoch": 0, "row": 0}, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.loaded = state

    def __iter__(self):
        resumed = self.loaded is not None and self.loaded["epoch"] == self.epoch
        first = self.loaded["row"] if resumed else 0
        self.state = {"epoch": self.epoch, "row": first}
        order = self.order(self.epoch + 100 * bool(self.lossy and first))
        for batch in self.batches(order, first):
            self.state["row"] += self.size
            yield batch


class Lossy(Stateful):
    lossy = True


def by_step(step):
    return {"x": np.arange(B) + B * step}


def by_rows(step, rows):
    return {"x": rows + B * step}


def again():
    yield from ({"x": np.arange(B) + B * step} for step in range(ROWS // B))


FEW = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


def pipeline():
    return grain.MapDataset.range(ROWS).shuffle(seed=1).map(lambda x: {"x": x})


SOURCES = {
    "function": lambda: by_step,
    "function of rows": lambda: by_rows,
    "dataset": Dataset,
    "list": lambda: [{"x": row} for row in range(ROWS)],
    "grain map": pipeline,
    "grain iter": lambda: pipeline().repeat().batch(B).to_iter_dataset(FEW),
    "grain iterator": lambda: iter(pipeline().repeat().batch(B).to_iter_dataset(FEW)),
    "stream": Stream,
    "stateful": Stateful,
    "lossy": Lossy,
    "generator": lambda: iter([batch for _ in range(5) for batch in again()]),
    "generator function": lambda: again,
    "streams": lambda: [Stateful(rows=ROWS // 4, size=2, seed=10 * i) for i in range(4)],
    "lossy streams": lambda: [Lossy(rows=ROWS // 4, size=2, seed=10 * i) for i in range(4)],
}


def opened(source, *, with_weights=False, **options):
    batches = open_batches(source, **{"batch_size": B} | options)
    batches.with_weights = with_weights
    return batches


def read(source, position=Position(), count=None, rows=range(B), **options):
    """What is read of column x, and the positions, through JSON."""
    found = list(opened(source, **options).read(rows, position, count))
    positions = [Position(**json.loads(json.dumps(asdict(after)))) for _, after in found]
    return [batch["x"].tolist() for batch, _ in found], positions


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_that_resumes_at_any_step_reads_what_it_would_have_read(name):
    count = 13
    whole, positions = read(SOURCES[name](), count=count)
    assert [(each.step, each.sample) for each in positions] == [(n, n * B) for n in range(1, count + 1)]
    for step in (0, 1, 4, 5, 6, 11, 12):
        position = positions[step - 1] if step else Position()
        rest, after = read(SOURCES[name](), position, count - step)
        assert rest == whole[step:]
        assert [each.step for each in after] == [each.step for each in positions[step:]]


@pytest.mark.parametrize("name", SOURCES)
def test_reading_ahead_does_not_move_a_position(name):
    whole, _ = read(SOURCES[name](), count=4)
    _, position = next(opened(SOURCES[name]()).read(range(B), Position(), 10))
    assert read(SOURCES[name](), position, 3)[0] == whole[1:]


def huggingface(**options):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": list(range(ROWS))}, **options)


def shards():
    return [huggingface().to_iterable_dataset(num_shards=8).shard(8, index).batch(B // 8) for index in range(8)]


def loader(kind="torch.utils.data", stream=False, shuffle=None):
    torch = pytest.importorskip("torch")
    make = getattr(pytest.importorskip(kind), "DataLoader" if kind == "torch.utils.data" else "StatefulDataLoader")
    data = huggingface().to_iterable_dataset(num_shards=4) if stream else huggingface().with_format("torch")
    generator = torch.Generator()
    generator.manual_seed(1)
    return make(data, batch_size=B, shuffle=shuffle, generator=generator)


STATEFUL = "torchdata.stateful_dataloader"
REAL = {
    "datasets": huggingface,
    "datasets, streaming": lambda: huggingface().to_iterable_dataset(num_shards=4).batch(B),
    "datasets, shuffle buffer": lambda: (
        huggingface().to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=16).batch(B)
    ),
    "datasets, shards": shards,
    "torch": loader,
    "torch, shuffled": lambda: loader(shuffle=True),
    "torch, datasets streaming": lambda: loader(stream=True),
    "torchdata": lambda: loader(STATEFUL),
    "torchdata, datasets streaming": lambda: loader(STATEFUL, stream=True),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", REAL)
def test_sources_of_other_libraries_resume_in_any_epoch(name):
    whole, positions = read(REAL[name](), count=12)
    assert [sorted(np.ravel(whole[e : e + 5])) for e in (0, 5)] == [list(range(ROWS))] * 2
    for step in (1, 4, 5, 8):
        assert read(REAL[name](), positions[step - 1], 12 - step)[0] == whole[step:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchs_generator_is_saved_and_its_short_batch_is_seen_before_the_first(capsys):
    whole, positions = read(loader(STATEFUL, shuffle=True), count=5)
    unseeded = loader(STATEFUL, shuffle=True)
    unseeded.generator.manual_seed(7)
    assert read(unseeded, positions[1], 3)[0] == whole[2:]
    assert "read again" not in capsys.readouterr().out
    torch = pytest.importorskip("torch")
    short = torch.utils.data.DataLoader(list(range(ROWS + 3)), batch_size=B, collate_fn=lambda x: {"x": x})
    with pytest.raises(BatchError, match="its last batch has only 3 rows"):
        read(short, count=1)


@given(st.sampled_from(sorted(SOURCES)), st.permutations(range(B)), st.integers(1, B), st.integers(0, 6))
@settings(max_examples=25, deadline=None)
def test_processes_read_each_row_once_whatever_rows_they_hold(name, rows, first, step):
    """Two processes; the later one resumes from the positions of both."""
    whole, _ = read(SOURCES[name](), count=step + 3)
    parts = [sorted(part) for part in (rows[:first], rows[first:]) if part]
    positions = [read(SOURCES[name](), count=step, rows=part)[1][-1] if step else Position() for part in parts]
    streams = (
        [next(filter(None, each), None) for each in zip(*(p.streams for p in positions), strict=True)]
        if (positions[0].streams)
        else None
    )
    position = Position(step, step * B, streams)
    joined = [[None] * B for _ in range(3)]
    for part in parts:
        for batch, local in zip(joined, read(SOURCES[name](), position, 3, part)[0], strict=True):
            for row, value in zip(part, local, strict=True):
                batch[row] = value
    assert joined == whole[step:]


def test_an_epoch_of_a_dataset_is_each_row_once_and_a_process_reads_only_its_rows():
    dataset = Dataset()
    batches, _ = read(dataset, count=2 * ROWS // B)
    epochs = np.reshape(batches, (2, ROWS))
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert list(epochs[0]) != list(epochs[1])
    dataset.read.clear()
    read(dataset, count=5, rows=[1, 6])
    assert dataset.read.total() <= 5 * 2 + 1


def test_another_batch_size_goes_on_with_the_next_sample():
    whole = np.ravel(read(Dataset(), count=10)[0]).tolist()
    position = read(Dataset(), count=3)[1][-1]
    rest = read(Dataset(), position, 14, rows=range(4), batch_size=4)[0]
    assert np.ravel(rest).tolist() == whole[3 * B :]


def test_a_process_reads_only_the_streams_of_its_rows():
    streams = [Stateful(rows=10, size=2) for _ in range(4)]
    _, positions = read(streams, count=3, rows=[2, 3, 5])
    assert [stream.read for stream in streams][3] == 0
    assert streams[1].read >= 3 <= streams[2].read
    assert [record is not None for record in positions[-1].streams] == [False, True, True, False]


def test_a_lossy_state_is_found_out_and_the_stream_read_again(capsys):
    position = read(Lossy(), count=3)[1][-1]
    assert read(Lossy(), position, 4)[0] == read(Lossy(), count=7)[0][3:]
    assert "omits something (a shuffle buffer?), so its first 3 batches are read again" in capsys.readouterr().out
    read(Stateful(), position, 4)
    assert not capsys.readouterr().out


def test_a_stream_that_lost_its_state_is_read_again(capsys):
    _, positions = read(Stateful(seed=1), count=4)
    stateless = Stream()
    stateless.seed = 0  # its first order is that of seed 1
    assert read(stateless, positions[-1], 1)[0] == read(Stateful(seed=1), count=5)[0][4:]
    assert "has no state, so its first 4 batches" in capsys.readouterr().out


def test_an_order_that_changed_is_an_error():
    position = read(Stream(), count=3)[1][-1]
    with pytest.raises(BatchError, match="batch 3 is not the checkpoint's"):
        read(Stream(seed=7), position, 4)


def test_an_iterator_that_ends_early_says_how_much_it_had():
    found = []
    with pytest.raises(EndOfDataError, match="ended after 5 batches"):
        found.extend(batch for batch, _ in opened(again()).read(range(B), Position(), 9))
    assert len(found) == 5
    position = read(again(), count=3)[1][-1]
    with pytest.raises(EndOfDataError, match=r"step 6: the iterator ended after 5 batches"):
        read(again(), position, 6)


def test_arrays_that_a_source_fills_again_are_not_disturbed_by_reading_ahead():
    array = np.zeros(B, np.int32)

    def fill(step, rows=range(B)):
        array[:] = step
        return {"x": array}

    def stream():
        yield from (fill(step) for step in range(9))

    class Filled(Dataset):
        def __getitem__(self, index):
            return {"x": fill(index)["x"][0, None]}

    for source in (lambda step: fill(step), lambda step, rows: fill(step), stream):
        assert read(source, count=9)[0] == [[step] * B for step in range(9)]
    ((batch, _),) = opened(Filled(), once=True).read(range(B), Position(), 1)
    assert batch["x"].tolist() == [[row] for row in range(B)]


@pytest.mark.parametrize(
    "source", [lambda: Dataset(ROWS - 4), lambda: Stream(ROWS - 4), lambda: [Stream(9, 2) for _ in range(4)]]
)
def test_a_short_batch_is_padded_with_rows_without_weight(source):
    batches = [batch for batch, _ in opened(source(), with_weights=True, once=True).read(range(B), Position())]
    assert all(batch["x"].shape == batch[WEIGHTS].shape == (B,) for batch in batches)
    x, weights = (np.concatenate([batch[name] for batch in batches]) for name in ("x", WEIGHTS))
    assert weights.sum() == ROWS - 4
    assert not x[weights == 0].any()


def test_weights_of_ones_own_are_0_in_rows_that_pad():
    def batches():
        yield {"x": np.ones((4, 3)), "weights": np.full((4, 3), 0.5)}
        yield {"x": np.ones((1, 3)), "weights": np.full((1, 3), 0.5)}

    source = opened(batches, with_weights=True)
    (_, (last, _)) = source.read(range(4), Position(), 2)
    np.testing.assert_array_equal(last["weights"], [[0.5] * 3, *[[0.0] * 3] * 3])
    assert source.shapes["weights"].shape == (4, 3)


def test_without_weights_a_short_batch_stops_training_and_an_evaluation_leaves_it_out():
    with pytest.raises(BatchError, match=r"drop_last=True.*batch\['weights'\]"):
        read(Stream(rows=ROWS + 3), count=9)
    for source in (Stream(rows=ROWS + 3), Dataset(rows=ROWS + 3)):
        evaluation = opened(source, once=True)
        for _ in range(2):
            assert len(list(evaluation.read(range(B), Position()))) == ROWS // B
    with pytest.raises(BatchError, match="a batch of 8 rows has only 5 rows"):
        list(opened(Dataset(rows=5), once=True).read(range(B), Position()))


@pytest.mark.parametrize("name", ["dataset", "list", "grain map", "stateful", "generator function", "streams"])
def test_an_evaluation_reads_each_row_once_and_each_time_the_same(name):
    evaluation = opened(SOURCES[name](), once=True, with_weights=True)
    first, second = ([batch["x"].tolist() for batch, _ in evaluation.read(range(B), Position())] for _ in range(2))
    assert first == second
    if name != "streams":
        assert sorted(np.ravel(first)) == list(range(ROWS))


WIDE = {
    "function": lambda: lambda step: {"x": np.arange(32)},
    "function of rows": lambda: lambda step, rows: {"x": 3 * rows},
    "dataset": Dataset,
    "streams": lambda: [Stateful(size=8, seed=10 * i) for i in range(4)],
}
SIZES = [(1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8)]


@given(st.sampled_from(SIZES), st.sampled_from([1, 2, 4]), st.sampled_from(sorted(WIDE)))
@settings(max_examples=12, deadline=None)
def test_a_micro_batch_is_the_same_rows_on_every_mesh(sizes, micro_batches, name):
    mesh, size = jaxtp.make_mesh(*sizes), 32
    source = opened(WIDE[name](), batch_size=size)
    ((expected, _),) = opened(WIDE[name](), batch_size=size).read(range(size), Position(), 1)
    ((batch, position),) = on_mesh(source, mesh, Position(), 1, micro_batches=micro_batches)
    devices = sizes[0] * sizes[1]
    micro = np.asarray(batch["x"]).reshape(devices, micro_batches, -1).swapaxes(0, 1)  # as the step splits them
    np.testing.assert_array_equal(micro.reshape(-1), expected["x"])
    assert position == Position(1, size, position.streams)
    for column, spec in split(source.shapes, mesh).items():
        assert (batch[column].shape, batch[column].dtype) == (spec.shape, spec.dtype)
        assert batch[column].sharding == spec.sharding


def test_rows_that_do_not_divide_are_an_error():
    with pytest.raises(BatchError, match=r"8 rows cannot be split over 8 devices .* 2 micro-batches"):
        next(on_mesh(opened(by_step), jaxtp.make_mesh(1, 8, 1), Position(), 1, micro_batches=2))


def changing(key, value):
    return lambda step: {"x": np.zeros((4, 2)), "y": np.zeros(4)} | ({key: value} if step == 2 else {})


WRONG = {
    "another shape": (changing("x", np.zeros((4, 3))), r"step 3: column 'x' is float32\[3\].*was float32\[2\]"),
    "another dtype": (changing("x", np.zeros((4, 2), int)), r"step 3: column 'x' is int32\[2\].*float32\[2\]"),
    "another column": (changing("z", np.zeros(4)), "step 3: has the columns .*'z'"),
    "unequal rows": (changing("y", np.zeros(3)), r"step 3: columns differ .*x \[4, 2\], y \[3\]"),
    "more rows": (lambda step: {"x": np.zeros(4 + step)}, "step 2: has 5 rows, more than the 4"),
    "numbers": (lambda step: {"x": 1}, "these are samples"),
    "text": (lambda step: {"t": ["a", "b"]}, "column 't' is text"),
    "ragged": (lambda step: {"t": [[1], [1, 2]]}, "column 't'.*pad its rows"),
    "beyond 32 bits": (lambda step: {"x": [2**40]}, "1099511627776, which int32 does not hold"),
    "a bare array": (lambda step: np.zeros(4), "gives a ndarray; it must give a dict"),
    "nothing": (lambda step: {}, "gives no columns"),
    "an error": (
        lambda step: {"x": [1 // (1 - step)]},
        r"step 2 fails .*test_batches.py, line \d+: .*ZeroDivisionError",
    ),
    "an error of a dataset": ([{"x": 1}, {}] * 4, "step 1: gives no columns"),
    "another sample": ([{"x": 1}, {"x": [1]}] * 4, "step 1: column 'x' is int32"),
    "nothing in a dataset": ([{"x": None}] * 8, "column 'x' has None"),
    "no rows": ([], "has no rows"),
    "an empty stream": (lambda: iter([]), "has no batches"),
    "parameters": (lambda step, shard: {}, r"takes \(step, shard\)"),
    "rows alone": (lambda rows: {"x": np.zeros(8)}, r"takes \(rows\)"),
    "one batch": (lambda: {"x": np.zeros(4)}, "is a dict of x.*give a function of the step"),
    "splits": ({"train": [], "test": []}, "train, test: choose one split"),
    "a dict in a batch": (
        lambda step: {"x": {"ids": np.zeros(4), "mask": np.ones(4)}},
        "column 'x' is a dict of ids, mask, and a column is one array; .* such as 'x_ids'",
    ),
    "a dict in a tuple": (lambda step: ({"ids": np.zeros(4)}, np.ones(4)), "column '0' is a dict of ids"),
    "a dict in a sample": ([{"x": {"ids": 1}}] * 8, "column 'x' is a dict of ids"),
    "equal names": (lambda step: {0: np.zeros(4), "0": np.ones(4)}, "has columns 0 and '0', which have one name"),
    "a path": ("data.jsonl", "is a str"),
    "fewer rows than asked": (lambda step, rows: {"x": np.zeros(3)}, "returned 3 rows, and was called with 8"),
    "datasets for streams": ([Dataset(), Dataset()], "dataset of samples"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_error(name):
    source, message = WRONG[name]

    def use():
        batches = opened(source)
        return list(batches.read(range(batches.global_batch_size), Position(), 4))

    with pytest.raises(BatchError, match=message):
        use()


def test_a_checksum_depends_on_every_row_and_name():
    columns = {"x": np.random.default_rng(0).random((16, 300, 300), np.float32)}
    first = checksum(columns)
    assert checksum({"y": columns["x"]}) != first
    for row in range(16):
        changed = columns["x"].copy()
        changed[row] = 0
        assert checksum({"x": changed}) != first


def test_64_bit_numbers_become_32_bit_ones_and_tuples_are_numbered():
    batches = opened(lambda step: (np.zeros(4, np.int64), np.zeros((4, 2)), [True] * 4))
    assert {name: (spec.shape, spec.dtype.name) for name, spec in batches.shapes.items()} == {
        "0": ((4,), "int32"),
        "1": ((4, 2), "float32"),
        "2": ((4,), "bool"),
    }
    assert isinstance(batches.shapes["0"], jax.ShapeDtypeStruct)


TWO_PROCESSES = """
import dataclasses, json
from jaxtp.distributed.joining import join_processes
join_processes()
import jax, numpy as np, jaxtp
from jaxtp.data.batches import Position
from jaxtp.data.columns import BatchError
from jaxtp.data.loader import on_mesh
from jaxtp.data.sources import open_batches
from jaxtp.tools.launch.__main__ import main as launch

class Stream:
    def __init__(self, index, rows=8):
        self.index, self.rows, self.first, self.read = index, rows, 0, 0
    def state_dict(self):
        return {"first": self.first}
    def load_state_dict(self, state):
        self.first = state["first"]
    def __iter__(self):
        while self.first < self.rows:
            start, self.first = self.first, self.first + 2
            self.read += 1
            yield {"x": 100 * self.index + np.arange(start, min(self.first, self.rows))}
        self.first = 0

mesh = jaxtp.make_mesh(1, 8, 1)
process = jax.process_index()

def total(batch, name="x"):
    return int(jax.jit(lambda x: x.sum())(batch[name]))

def streams(rows=(8,) * 8):
    return [Stream(index, rows[index]) for index in range(8)]

mine = [4 * process <= index < 4 * process + 4 for index in range(8)]
made = streams()
found = list(on_mesh(open_batches(made), mesh, Position(), 2))
assert [stream.read > 0 for stream in made] == mine
position = found[-1][1]
assert [record is not None for record in position.streams] == mine
position = Position(**json.loads(json.dumps(dataclasses.asdict(position.gathered()))))
assert None not in position.streams

# On another mesh, process 0 has the devices and so the streams that process 1 had.
swapped = jaxtp.make_mesh(1, 8, 1, devices=[*jax.devices()[4:], *jax.devices()[:4]])
resumed = [total(batch) for batch, _ in on_mesh(open_batches(streams()), swapped, position, 2)]
expected = [sum(100 * index + row for index in range(8) for row in (first, first + 1)) for first in (4, 6)]

# Evaluations of streams that end at other steps in each process.
uneven = streams([8, 8, 8, 8, 3, 3, 3, 3])
source = open_batches(uneven, once=True)
source.with_weights = True
weights = [total(batch, "weights") for batch, _ in on_mesh(source, mesh, Position())]
source.with_weights = False
whole = len(list(on_mesh(source, mesh, Position())))

def rows_of_process(step):
    return {"x": np.arange(16) + process}

try:
    next(on_mesh(open_batches(rows_of_process), mesh, Position(), 1))
    refused = "no"
except BatchError as error:
    refused = str(error)
with open(f"{process}.json", "w") as file:
    json.dump([resumed == expected, weights, whole, refused], file)
"""


@pytest.mark.journey
def test_two_processes_read_their_streams_and_notice_different_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(["--processes", "2", "--devices", "4", "--", "-c", TWO_PROCESSES]) == 0
    for process in range(2):
        *found, refused = json.loads((tmp_path / f"{process}.json").read_text())
        assert found == [True, [16, 12, 8, 8], 1]
        assert "rows_of_process" in refused
        assert "step 1: processes read different rows" in refused


def test_a_function_that_changed_is_refused_on_resume():
    _, positions = read(by_step, count=3)
    with pytest.raises(BatchError, match="step 3: its batch is not the checkpoint's"):
        read(lambda step: by_step(step + 1), positions[-1], 1)
    assert read(by_step, positions[-1], 1, with_weights=True)[0] == [by_step(3)["x"].tolist()]


def test_token_data_have_weights_if_a_loss_reads_them(tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 100)
    tokens = DataConfig(path=tmp_path / "text.txt", sequence_length=16, global_batch_size=B)
    data = open_data(TrainConfig(data=tokens), InitSource(), jaxtp.Task())
    data.pad_short_batches(True)
    mesh = jaxtp.make_mesh(1, 8, 1)
    for batch in (next(data.batches(mesh, Position(), 1))[0], next(data.validation_batches(mesh, 1))):
        assert batch.keys() == data.train.shapes.keys()
        assert batch[WEIGHTS].tolist() == [1.0] * B


def test_rows_need_a_batch_size():
    for source in (Dataset(), by_rows):
        with pytest.raises(BatchError, match="batch_size"):
            opened(source, batch_size=None)
