"""Images on disk for the examples: eight textures with random phase and noise."""

import os
from pathlib import Path

import numpy as np

SIDE = 16
CLASSES = 8
ROW = np.dtype([("images", np.float32, (SIDE, SIDE, 1)), ("labels", np.int32)])


class Textures:
    """A dataset of dicts with `images [16, 16, 1]` and `labels`: direction and frequency of a wave.

    The dataset is in a file, which is written first if it does not exist.
    """

    def __init__(self, file: Path = Path("data/textures.npy"), size: int = 4096):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{os.getpid()}-{file.name}")  # each process writes the same
            np.save(part, generated(size))
            part.replace(file)
        self.rows = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[index]
        return {name: row[name] for name in ROW.names}


def generated(size: int) -> np.ndarray:
    """Returns `size` rows."""
    random = np.random.default_rng(0)
    rows = np.zeros(size, ROW)
    labels = rows["labels"] = random.integers(CLASSES, size=size)
    directions = np.array([(1, 0), (0, 1), (1, 1), (1, -1)])[labels % 4]
    waves = directions * np.where(labels < 4, 0.8, 1.6)[:, None]
    grid = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"))
    phase = random.uniform(0, 2 * np.pi, (size, 1, 1))
    images = np.sin(np.einsum("bk,kxy->bxy", waves, grid) + phase) + 0.3 * random.normal(
        size=(size, SIDE, SIDE)
    )
    rows["images"] = images[..., None]
    return rows
