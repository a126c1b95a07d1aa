"""Batches of a user's sources: exact resume, the rows of each process, short batches, and clear
errors.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from support import mesh_by_size
from tables import read_table

import jaxtp
from jaxtp.data.batches import Position
from jaxtp.data.columns import WEIGHTS, BatchError, EndOfDataError, checksum
from jaxtp.data.loader import on_mesh, split
from jaxtp.data.sources import open_batches
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.init_source import InitSource
from jaxtp.train.parts import Parts
from jaxtp.train.run_data import open_data

B = 8
ROWS = 40


@dataclass(eq=False)
class Dataset:
    """A map-style dataset that counts its reads."""

    rows: int = ROWS
    read: Counter = field(default_factory=Counter)

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        self.read[index] += 1
        return {"x": index, "y": [index, index + 0.5]}


@dataclass(eq=False)
class Stream:
    """Batches that can be read again; each epoch in another order."""

    rows: int = ROWS
    size: int = B
    seed: int = 0
    read: int = 0

    def batches(self, epoch, first=0):
        order = default_rng([self.seed, epoch]).permutation(self.rows)
        for start in range(first, self.rows, self.size):
            self.read += 1
            yield {"x": order[start : start + self.size]}

    def __iter__(self):
        self.seed += 1
        return self.batches(0)


@dataclass(eq=False)
class Stateful(Stream):
    """With a state and epochs, as Hugging Face's streams have them; `lossy` forgets its shuffle
    buffer.
    """

    epoch: int = 0
    loaded: dict = field(default_factory=dict)
    lossy: bool = False

    def __post_init__(self):
        self.state = {"epoch": 0, "row": 0}

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.loaded = state

    def __iter__(self):
        first = self.loaded["row"] if self.loaded.get("epoch") == self.epoch else 0
        self.state = {"epoch": self.epoch, "row": first}
        for batch in self.batches(self.epoch + 100 * bool(self.lossy and first), first):
            self.state["row"] += self.size
            yield batch


def streams(lossy=False):
    return [Stateful(rows=ROWS // 4, size=2, seed=10 * i, lossy=lossy) for i in range(4)]


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
    "lossy": lambda: Stateful(lossy=True),
    "generator": lambda: iter([batch for _ in range(5) for batch in again()]),
    "generator function": lambda: again,
    "streams": streams,
    "lossy streams": lambda: streams(lossy=True),
}


def opened(source, *, with_weights=False, **options):
    batches = open_batches(source, **{"batch_size": B} | options)
    batches.with_weights = with_weights
    return batches


def read(source, position=Position(), count=None, rows=range(B), **options):
    """What is read of column x, and the positions, through JSON."""
    xs = []
    positions = []
    for batch, after in opened(source, **options).read(rows, position, count):
        xs.append(batch["x"].tolist())
        positions.append(Position(**json.loads(json.dumps(asdict(after)))))
    return xs, positions


def assert_resumes(make, steps, count=13):
    """Compares what a run reads that resumes at some steps with what one reads that goes on."""
    whole, positions = read(make(), count=count)
    assert [(each.step, each.sample) for each in positions] == [
        (n, n * B) for n in range(1, count + 1)
    ]
    for step in steps:
        assert read(make(), positions[step - 1], count - step)[0] == whole[step:]
    return whole


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_resumes_at_any_step_however_far_it_was_read_ahead(name):
    whole = assert_resumes(SOURCES[name], (1, 5, 6, 12))
    _, position = next(opened(SOURCES[name]()).read(range(B), Position(), 10))
    assert read(SOURCES[name](), position, 3)[0] == whole[1:4]


def huggingface():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": list(range(ROWS))})


def streamed():
    return huggingface().to_iterable_dataset(num_shards=4)


def shards():
    return [
        huggingface().to_iterable_dataset(num_shards=8).shard(8, index).batch(B // 8)
        for index in range(8)
    ]


def loader(kind=("torch.utils.data", "DataLoader"), stream=False, shuffle=None):
    torch = pytest.importorskip("torch")
    module, name = kind
    make = getattr(pytest.importorskip(module), name)
    data = streamed() if stream else huggingface().with_format("torch")
    return make(data, batch_size=B, shuffle=shuffle, generator=torch.Generator().manual_seed(1))


STATEFUL = ("torchdata.stateful_dataloader", "StatefulDataLoader")
REAL = {
    "datasets": huggingface,
    "datasets, streaming": lambda: streamed().batch(B),
    "datasets, shuffle buffer": lambda: streamed().shuffle(seed=1, buffer_size=16).batch(B),
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
    whole = assert_resumes(REAL[name], (4, 5, 8), count=12)
    assert [sorted(np.ravel(whole[e : e + 5])) for e in (0, 5)] == [list(range(ROWS))] * 2


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchs_generator_is_saved_and_its_short_batch_is_seen_before_the_first(capsys):
    whole, positions = read(loader(STATEFUL, shuffle=True), count=5)
    another = loader(STATEFUL, shuffle=True)
    another.generator.manual_seed(7)
    assert read(another, positions[1], 3)[0] == whole[2:]
    assert "read again" not in capsys.readouterr().out
    torch = pytest.importorskip("torch")
    short = torch.utils.data.DataLoader(
        list(range(ROWS + 3)), batch_size=B, collate_fn=lambda x: {"x": x}
    )
    with pytest.raises(BatchError, match="its last batch has only 3 rows"):
        read(short, count=1)


@pytest.mark.wide
@given(
    st.sampled_from(sorted(SOURCES)),
    st.permutations(range(B)),
    st.integers(1, B),
    st.integers(0, 6),
)
@settings(max_examples=10, deadline=None)
def test_processes_read_each_row_once_whatever_rows_they_hold(name, rows, first, step):
    """Two processes; the later one resumes from the positions of both."""
    whole, _ = read(SOURCES[name](), count=step + 3)
    parts = [sorted(part) for part in (rows[:first], rows[first:]) if part]
    positions = [
        read(SOURCES[name](), count=step, rows=part)[1][-1] if step else Position()
        for part in parts
    ]
    records = zip(*(each.streams or [] for each in positions), strict=True)
    streams = [next(filter(None, each), None) for each in records]
    position = Position(step, step * B, streams or None)
    joined = np.full((3, B), -1)
    for part in parts:
        joined[:, part] = read(SOURCES[name](), position, 3, part)[0]
    assert joined.tolist() == whole[step:]


def test_an_epoch_of_a_dataset_is_each_row_once_and_a_process_reads_only_its_rows():
    first, second = np.reshape(read(Dataset(), count=2 * ROWS // B)[0], (2, ROWS)).tolist()
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    dataset = Dataset()
    read(dataset, count=5, rows=[1, 6])
    assert dataset.read.total() <= 5 * 2 + 1


def test_another_batch_size_goes_on_with_the_next_sample():
    whole = np.ravel(read(Dataset(), count=10)[0]).tolist()
    position = read(Dataset(), count=3)[1][-1]
    rest = read(Dataset(), position, 14, rows=range(4), batch_size=4)[0]
    assert np.ravel(rest).tolist() == whole[3 * B :]


def test_a_lossy_state_is_found_out_and_the_stream_read_again(capsys):
    lossy = SOURCES["lossy"]
    position = read(lossy(), count=3)[1][-1]
    assert read(lossy(), position, 4)[0] == read(lossy(), count=7)[0][3:]
    assert (
        "omits something (a shuffle buffer?), so its first 3 batches are read again"
        in capsys.readouterr().out
    )
    read(Stateful(), position, 4)
    assert not capsys.readouterr().out
    # Nor has a stream without a state more than its batches; its first order is that of the next
    # seed.
    assert read(Stream(seed=-1), position, 1)[0] == read(Stateful(), count=4)[0][3:]
    assert "has no state, so its first 3 batches" in capsys.readouterr().out


def test_a_source_that_changed_is_refused_on_resume():
    position = read(Stream(), count=3)[1][-1]
    with pytest.raises(BatchError, match="batch 3 is not the checkpoint's"):
        read(Stream(seed=7), position, 4)
    position = read(by_step, count=3)[1][-1]
    with pytest.raises(BatchError, match="step 3: its batch is not the checkpoint's"):
        read(lambda step: by_step(step + 1), position, 1)
    assert read(by_step, position, 1, with_weights=True)[0] == [by_step(3)["x"].tolist()]


def test_an_iterator_that_ends_early_says_how_much_it_had():
    position = read(again(), count=5)[1][2]
    for where in (Position(), position):
        with pytest.raises(EndOfDataError, match="ended after 5 batches"):
            read(again(), where, 9)
    source = opened(again())
    list(source.read(range(B), Position(), 1))
    with pytest.raises(BatchError, match="can be read only once"):
        list(source.read(range(B), Position(), 1))


def test_arrays_that_a_source_fills_again_are_not_disturbed_by_reading_ahead():
    array = np.zeros(B, np.int32)

    def fill(step):
        array[:] = step
        return {"x": array}

    def stream():
        yield from map(fill, range(9))

    class Filled(Dataset):
        def __getitem__(self, index):
            return {"x": fill(index)["x"][:1]}

    for source in (lambda step: fill(step), lambda step, rows: fill(step), stream):
        assert read(source, count=9)[0] == [[step] * B for step in range(9)]
    assert read(Filled(), once=True, count=1)[0] == [[[row] for row in range(B)]]


@pytest.mark.parametrize("name", ["dataset", "stream", "streams"])
def test_a_short_batch_is_padded_with_rows_without_weight(name):
    sources = {
        "dataset": Dataset(ROWS - 4),
        "stream": Stream(ROWS - 4),
        "streams": [Stream(9, 2) for _ in range(4)],
    }
    batches = [
        batch
        for batch, _ in opened(sources[name], with_weights=True, once=True).read(
            range(B), Position()
        )
    ]
    x = np.stack([batch["x"] for batch in batches])
    weights = np.stack([batch[WEIGHTS] for batch in batches])
    assert x.shape == weights.shape == (len(batches), B)
    assert weights.sum() == ROWS - 4
    assert not x[weights == 0].any()


def test_weights_of_ones_own_are_0_in_rows_that_pad():
    batches = [{"x": np.ones(rows), "weights": np.full((rows, 3), 0.5)} for rows in (4, 1)]
    source = opened(lambda: iter(batches), with_weights=True)
    _, (last, _) = source.read(range(4), Position(), 2)
    assert last["weights"].tolist() == [[0.5] * 3, *[[0.0] * 3] * 3]


def test_without_weights_a_short_batch_stops_training_and_an_evaluation_leaves_it_out():
    with pytest.raises(BatchError, match=r"drop_last=True.*batch\['weights'\]"):
        read(Stream(rows=ROWS + 3), count=9)
    for source in (Stream(rows=ROWS + 3), Dataset(rows=ROWS + 3)):
        assert len(read(source, once=True)[0]) == ROWS // B
    with pytest.raises(BatchError, match="a batch of 8 rows has only 5 rows"):
        read(Dataset(rows=5), once=True)
    with pytest.raises(BatchError, match="has no end"):
        opened(pipeline().repeat(), once=True)


@pytest.mark.parametrize(
    "name", ["dataset", "list", "grain map", "stateful", "generator function", "streams"]
)
def test_an_evaluation_reads_each_row_once_and_each_time_the_same(name):
    evaluation = opened(SOURCES[name](), once=True, with_weights=True)
    first, second = (
        [batch["x"].tolist() for batch, _ in evaluation.read(range(B), Position())]
        for _ in range(2)
    )
    assert first == second
    if name != "streams":
        assert sorted(np.ravel(first)) == list(range(ROWS))


SIZES = [(1, 2, 1), (2, 1, 2), (1, 1, 8)]


@given(
    st.sampled_from(SIZES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["function", "function of rows", "streams"]),
)
@settings(max_examples=6, deadline=None)
def test_a_micro_batch_is_the_same_rows_on_every_mesh(sizes, micro_batches, name):
    mesh = mesh_by_size(*sizes)
    source = opened(SOURCES[name]())
    ((expected, _),) = source.read(range(B), Position(), 1)
    ((batch, position),) = on_mesh(source, mesh, Position(), 1, micro_batches=micro_batches)
    devices = sizes[0] * sizes[1]
    # as the step splits them
    micro = np.asarray(batch["x"]).reshape(devices, micro_batches, -1).swapaxes(0, 1)
    assert_array_equal(micro.reshape(-1), expected["x"])
    assert (position.step, position.sample) == (1, B)
    spec = split(source.shapes, mesh)["x"]
    assert batch["x"].sharding == spec.sharding
    assert (batch["x"].shape, batch["x"].dtype) == (spec.shape, spec.dtype)


def test_rows_that_do_not_divide_are_an_error():
    with pytest.raises(
        BatchError, match=r"8 rows cannot be split over 8 devices .* 2 micro-batches"
    ):
        next(on_mesh(opened(by_step), jaxtp.make_mesh(fsdp=8), Position(), 1, micro_batches=2))


def changing(key, value):
    return lambda step: (
        {"x": np.zeros((B, 2)), "y": np.zeros(B)} | {key: value if step == 2 else np.zeros((B, 2))}
    )


def always(batch):
    return lambda step: batch


TABLES = read_table(__file__)
WRONG = TABLES["datasets"] | {
    name: (always(batch), message) for name, (batch, message) in TABLES["batches"].items()
}
WRONG |= {
    "another shape": (
        changing("x", np.zeros((B, 3))),
        r"step 3: column 'x' is float32\[3\].*was float32\[2\]",
    ),
    "another dtype": (
        changing("x", np.zeros((B, 2), int)),
        r"step 3: column 'x' is int32\[2\].*float32\[2\]",
    ),
    "another column": (
        lambda step: {"x": np.zeros(B), f"z{step // 2}": np.zeros(B)},
        "step 3: has the columns .*z1",
    ),
    "unequal rows": (changing("y", np.zeros(3)), r"step 3: columns differ .*x \[8, 2\], y \[3\]"),
    "more rows": (lambda step: {"x": np.zeros(B + step)}, "step 2: has 9 rows, more than the 8"),
    "a bare array": (lambda step: np.zeros(B), "gives a ndarray; it must give a dict"),
    "an error": (
        lambda step: {"x": [1 // (1 - step)]},
        r"step 2 fails .*test_batches.py, line \d+: .*ZeroDivisionError",
    ),
    "an empty stream": (lambda: iter([]), "has no batches"),
    "parameters": (lambda step, shard: {}, r"takes \(step, shard\)"),
    "rows alone": (lambda rows: {"x": np.zeros(8)}, r"takes \(rows\)"),
    "one batch": (lambda: {"x": np.zeros(4)}, "is a dict of x.*give a function of the step"),
    "a dict in a batch": (
        lambda step: {"x": {"ids": np.zeros(4), "mask": np.ones(4)}},
        "column 'x' is a dict of ids, mask, and a column is one array; .* such as 'x_ids'",
    ),
    "equal names": (
        lambda step: {0: np.zeros(4), "0": np.ones(4)},
        "has columns 0 and '0', which have one name",
    ),
    "fewer rows than asked": (
        lambda step, rows: {"x": np.zeros(3)},
        "returned 3 rows, but was called with 8",
    ),
    "a state of objects": (type("Own", (Stateful,), {"state_dict": set})(), "cannot be saved"),
    "datasets for streams": ([Dataset(), Dataset()], "dataset of samples"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_error(name):
    source, message = WRONG[name]
    with pytest.raises(BatchError, match=message):
        read(source, count=4)


def test_rows_need_a_batch_size():
    for source in (Dataset(), by_rows):
        with pytest.raises(BatchError, match="batch_size"):
            opened(source, batch_size=None)


def test_a_checksum_depends_on_every_row_and_name():
    x = default_rng(0).random((16, 300, 300), np.float32)
    sums = {checksum({"x": x}), checksum({"y": x})}
    for row in range(16):
        changed = x.copy()
        changed[row] = 0
        sums.add(checksum({"x": changed}))
    assert len(sums) == 18


def test_64_bit_numbers_become_32_bit_ones_and_tuples_are_numbered():
    batches = opened(lambda step: (np.zeros(4, np.int64), np.zeros((4, 2)), [True] * 4))
    found = {name: f"{spec.dtype} {spec.shape}" for name, spec in batches.shapes.items()}
    assert found == {"0": "int32 (4,)", "1": "float32 (4, 2)", "2": "bool (4,)"}


def test_token_data_have_weights_if_a_loss_reads_them(tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 100)
    tokens = DataConfig(path=tmp_path / "text.txt", sequence_length=16, global_batch_size=B)
    data = open_data(TrainConfig(data=tokens), InitSource(), Parts())
    data.pad_short_batches(True)
    mesh = jaxtp.make_mesh()
    for batch in (
        next(data.batches(mesh, Position(), 1))[0],
        next(data.validation_batches(mesh, 1)),
    ):
        assert batch.keys() == data.train.shapes.keys()
        assert batch[WEIGHTS].tolist() == [1.0] * B
