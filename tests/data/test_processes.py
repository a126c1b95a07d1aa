"""Batches of two processes: each reads what its devices need, and different rows are noticed."""

import json
from pathlib import Path

import pytest
from tables import read_json, read_table

from jaxtp.tools.launch.__main__ import main as launch

STREAMS = """
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

mesh = jaxtp.make_mesh(fsdp=8)
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
swapped = jaxtp.make_mesh(fsdp=8, devices=[*jax.devices()[4:], *jax.devices()[:4]])
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
with open(f"streams{process}.json", "w") as file:
    json.dump([resumed == expected, weights, whole, refused], file)
"""  # noqa: E501


ROWS = """
from collections import Counter
import grain
from jaxtp.data.batches import token_batches

class Source:
    read = Counter()
    def __len__(self):
        return 100
    def __getitem__(self, index):
        Source.read[int(index)] += 1
        return {"inputs": np.full(4, index, np.int32)}

found = []
for mesh in json.loads(%r):
    Source.read = Counter({0: -1})  # the first is also read for its columns
    devices = [jax.devices()[index] for index in mesh["devices"]]
    sizes = dict(zip(("dp", "fsdp", "tp"), mesh["sizes"]))
    mesh = jaxtp.make_mesh(**sizes, devices=devices)
    total = 0
    samples = grain.MapDataset.source(Source())
    for step, (batch, _) in enumerate(on_mesh(token_batches(samples, 8), mesh, Position(0, 5), 2)):
        expected = 5 + 8 * step + np.repeat(np.arange(8)[:, None], 4, axis=1)
        for shard in batch["inputs"].addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])
        total += int(jax.jit(lambda x: x.sum())(batch["inputs"]))
    Source.read = +Source.read
    assert set(Source.read.values()) == {1}
    found.append([total, sorted(index - 5 for index in Source.read if index < 13)])
with open(f"rows{process}.json", "w") as file:
    json.dump(found, file)
"""
MESHES = read_table(__file__)


@pytest.mark.journey
def test_two_processes_read_what_their_devices_need_and_notice_different_rows():
    code = STREAMS + ROWS % json.dumps(MESHES)
    assert launch(["--processes=2", "--devices=4", "--", "-c", code]) == 0
    total = 4 * sum(range(5, 21))
    for process in range(2):
        *found, refused = read_json(Path(f"streams{process}.json"))
        assert found == [True, [16, 12, 8, 8], 1]
        assert "rows_of_process" in refused
        assert "step 1: processes read different rows" in refused
        rows = read_json(Path(f"rows{process}.json"))
        assert rows == [[total, mesh["rows"][process]] for mesh in MESHES]
