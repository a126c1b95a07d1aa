"""Reads a checkpoint without its run: on one device, an array at a time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from jaxtp.checkpoint.checksum import checksums
from jaxtp.checkpoint.damage import CheckpointError, DamagedError
from jaxtp.checkpoint.stored import newest, read_arrays, stored_arrays, stored_info
from jaxtp.mesh import describe_mesh, sized


@dataclass(frozen=True)
class Stored:
    """A checkpoint on disk."""

    folder: Path
    """Folder of its step."""

    info: dict[str, Any]
    """Values that were stored beside the arrays."""

    arrays: dict[str, jax.ShapeDtypeStruct]
    """Shapes and dtypes of the arrays that are there, by name."""

    def read(self, name: str) -> Array:
        """Returns one array, whole, on one device.

        Raises:
          CheckpointError: it cannot be read.
        """
        return read_arrays(self.folder, {name: self.arrays[name]})[name]

    def verify(self, name: str) -> str | None:
        """Returns what is wrong with an array, or None.

        Raises:
          CheckpointError: it cannot be read, which says nothing about it.
        """
        expected = self.info["checksums"].get(name)
        if expected is None:
            return "was not part of the state that was saved"
        try:
            array = self.read(name)
        except DamagedError as error:
            return str(error)
        if checksums({name: array})[name] != expected:
            return "its checksum differs from the one saved with it"
        if jnp.issubdtype(array.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(array))):
            return "has elements that are not finite"
        return None

    def bytes_on_disk(self) -> int:
        """Returns the bytes of all files of the checkpoint."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def summary(self) -> Iterator[str]:
        """Yields lines on the run that wrote it."""
        yield f"step      {self.folder.name}, next sample {self.info['next_sample']:,}"
        yield f"written   on mesh {describe_mesh(sized(**self.info['mesh']))} by {self.info['processes']} process(es)"
        yield f"versions  {', '.join(f'{name} {version}' for name, version in self.info['versions'].items())}"
        yield f"data      {json.dumps(self.info['corpus'])}"
        for section, values in self.info["config"].items():
            yield f"{section:<10}{json.dumps(values)}"

    def record(self) -> dict[str, Any]:
        """Returns what `summary` and `table` say, as JSON can hold it; sizes in bytes."""
        arrays = {
            name: {
                "shape": list(array.shape),
                "dtype": str(array.dtype),
                "bytes": array.size * array.dtype.itemsize,
                "split": self.info["specs"].get(name),
            }
            for name, array in self.arrays.items()
        }
        names = ("next_sample", "mesh", "processes", "versions", "corpus", "config")
        told = {name: self.info[name] for name in names}
        size = self.bytes_on_disk()
        return {"folder": str(self.folder), "step": int(self.folder.name), "bytes": size, **told, "arrays": arrays}

    def table(self) -> str:
        """Returns a line for each array: shape, dtype, bytes, and how it was split."""
        lines = []
        for name, array in self.arrays.items():
            shape = "x".join(map(str, array.shape)) or "scalar"
            split = self.info["specs"].get(name, "")
            lines.append(f"{name:<60}{shape:<18}{array.dtype!s:<10}{array.size * array.dtype.itemsize:>14,}  {split}")
        return "\n".join(lines)


def open_checkpoint(folder: Path) -> Stored:
    """Opens the newest checkpoint of a run, or the one whose folder is given.

    Raises:
      CheckpointError: there is none, or its description is damaged.
    """
    folder = newest(folder)
    info, found = stored_info(folder), stored_arrays(folder)
    sharding = SingleDeviceSharding(jax.devices()[0])
    arrays = {
        name: jax.ShapeDtypeStruct(tuple(array.shape), array.dtype, sharding=sharding)
        for name, array in sorted(found.items())
    }
    missing = info["checksums"].keys() - arrays.keys()
    if missing:
        raise CheckpointError(f"{folder}: {', '.join(sorted(missing)[:3])} missing of the arrays that were saved")
    return Stored(folder, info, arrays)


def difference(a: Stored, b: Stored, name: str) -> str | None:
    """Returns how an array differs between two checkpoints, in words; None if it does not."""
    for present, absent in ((a, b), (b, a)):
        if name not in absent.arrays:
            return f"only in {present.folder}"
    if a.arrays[name].shape != b.arrays[name].shape:
        return f"{a.arrays[name].shape} and {b.arrays[name].shape}"
    sums = [stored.info["checksums"].get(name) for stored in (a, b)]
    if None not in sums and sums[0] == sums[1]:
        return None
    one, other = (np.asarray(stored.read(name), dtype=np.float64) for stored in (a, b))
    norm = float(np.linalg.norm(one)) or 1.0
    return f"{float(np.linalg.norm(one - other)) / norm:.3e}"
