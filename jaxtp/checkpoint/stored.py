"""Reads the folder of one checkpoint, and tells damage from what only cannot be read now."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxtp.checkpoint.checksum import checksums
from jaxtp.checkpoint.logical import Arrays
from jaxtp.entry import UserError

T = TypeVar("T")
_SHAPES, _CHECKSUMS = "shapes", "checksums"
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_MAY_PASS = (OSError, MemoryError, jax.errors.JaxRuntimeError)
"""Errors that say nothing about files that are there."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read, or used for this run."""


class DamagedError(CheckpointError):
    """A checkpoint that is proven not to be what was written: files are missing or cut, or a checksum differs."""


def read_or_explain(folder: Path, read: Callable[[], T]) -> T:
    """Returns what `read` makes of the files in the folder of a checkpoint.

    Libraries turn an error of the file system into others, or into none: a failed read proves no damage. It is proven
    where every byte of every file can be read, and a second attempt fails too.

    Raises:
      DamagedError: the files are damaged.
      CheckpointError: they cannot be read now, which may pass: an error of the file system, too little memory.
    """
    said = ""
    for _attempt in range(2):
        try:
            return read()
        except CheckpointError:
            raise
        except Exception as error:
            _require_readable(folder, error)
            said = reason(error)
    raise DamagedError(f"{folder} is damaged ({said})")


def _require_readable(folder: Path, error: Exception) -> None:
    """Checks that an error is not that of a file system or of memory, and that every byte in the folder can be read.

    Raises:
      CheckpointError: it is, or one cannot.
    """
    try:
        if isinstance(error, _MAY_PASS) and not isinstance(error, _MISSING):
            raise error
        _read_every_byte(folder)
    except _MISSING:
        return
    except _MAY_PASS as cause:
        raise CheckpointError(
            f"{folder} cannot be read ({reason(cause)}), which proves no damage: everything is left as it is, for the "
            "same command to try again"
        ) from None


def _read_every_byte(folder: Path) -> None:
    def fail(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        for name in names:
            with (Path(parent) / name).open("rb") as file:
                while file.read(1 << 24):
                    pass


def stored_info(folder: Path) -> dict[str, Any]:
    """Returns what was stored beside the arrays in the folder of a checkpoint.

    Raises:
      CheckpointError: it was changed since (`DamagedError`), or cannot be read.
    """
    sealed = read_or_explain(folder, lambda: dict(ocp.JsonCheckpointHandler().restore((folder / "info").resolve())))
    if sealed.pop("sha256", None) != _digest(sealed):
        raise DamagedError(f"{folder} is damaged (its description was changed)")
    return sealed


def describe_arrays(arrays: Arrays) -> dict[str, Any]:
    """Returns what the info of a checkpoint says of its arrays, which is what a restore compares them with."""
    return {_SHAPES: {name: list(array.shape) for name, array in arrays.items()}, _CHECKSUMS: checksums(arrays)}


def seal(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the info with its own checksum, as `stored_info` wants it."""
    return {**info, "sha256": _digest(info)}


def _digest(info: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()


def stored_arrays(folder: Path) -> dict[str, Any]:
    """Returns shapes and dtypes of the arrays in the folder of a checkpoint, by name.

    Raises:
      CheckpointError: they are damaged (`DamagedError`), or cannot be read.
    """

    def read() -> dict[str, Any]:
        metadata = ocp.PyTreeCheckpointer().metadata((folder / "state").resolve()).item_metadata
        if metadata is None:  # Orbax's answer to whatever it met
            raise ValueError("it does not say which arrays it holds")
        return dict(metadata.tree)

    return read_or_explain(folder, read)


def read_arrays(folder: Path, target: dict[str, jax.ShapeDtypeStruct]) -> Arrays:
    """Returns some of the arrays in the folder of a checkpoint, in the shardings and dtypes that `target` gives them.

    Raises:
      CheckpointError: they are damaged (`DamagedError`), or cannot be read.
    """

    def read() -> Arrays:
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        restore = ocp.args.PyTreeRestore(item=target, restore_args=arguments, partial_restore=True)
        arrays: Arrays = ocp.PyTreeCheckpointer().restore((folder / "state").resolve(), restore)
        return arrays

    return read_or_explain(folder, read)


def read_verified(folder: Path, target: dict[str, jax.ShapeDtypeStruct], info: Mapping[str, Any]) -> Arrays:
    """Returns some of the arrays of a checkpoint: read in the dtypes that they are stored in, checked, and cast.

    Args:
      folder: folder of the checkpoint.
      target: the arrays, without padding.
      info: what `stored_info` returns.

    Raises:
      DamagedError: they are not what was written.
      CheckpointError: there are none of that name or shape, or they cannot be read.
    """
    stored = stored_arrays(folder)
    shapes = {name: tuple(array.shape) for name, array in stored.items()}
    written = {name: tuple(shape) for name, shape in info.get(_SHAPES, shapes).items()}  # older ones do not say
    if written.keys() != info[_CHECKSUMS].keys() or any(shapes.get(name) != shape for name, shape in written.items()):
        raise DamagedError(f"{folder} is damaged (it does not hold the arrays that were saved)")
    wrong = [f"{n} is {written.get(n)}, not {a.shape}" for n, a in target.items() if written.get(n) != a.shape]
    if wrong:
        raise CheckpointError(f"{folder} is of another model: {'; '.join(wrong[:3])}")
    as_stored = {n: jax.ShapeDtypeStruct(a.shape, stored[n].dtype, sharding=a.sharding) for n, a in target.items()}
    arrays = read_arrays(folder, as_stored)
    found = checksums(arrays)
    differ = [name for name in found if found[name] != info[_CHECKSUMS][name]]
    if differ:
        more = ", ..." if len(differ) > 3 else ""
        raise DamagedError(f"{folder} is damaged (checksums differ: {', '.join(differ[:3])}{more})")
    return {name: arrays.pop(name).astype(array.dtype) for name, array in target.items()}


def newest(run: Path) -> Path:
    """Returns the folder of the newest checkpoint of a run, or the folder itself if it is one.

    Raises:
      CheckpointError: there is none.
    """
    if found := finished(run):
        return found[-1]
    raise CheckpointError(f"{run}: no finished checkpoint there; name the folder of a run")


def newest_info(run: Path) -> dict[str, Any] | None:
    """Returns the description in the newest checkpoint of a run that can be resumed; None if there is none.

    Raises:
      CheckpointError: it cannot be read now, which may pass.
    """
    for folder in reversed(finished(run)):
        try:
            return stored_info(folder)
        except DamagedError:
            continue
    return None


def finished(run: Path) -> list[Path]:
    """Returns the folders of the finished checkpoints of a run, oldest first; the folder itself if it is one."""
    if (run / "state").is_dir():
        return [run]
    for folder in (run / "checkpoints", run):
        steps = [int(path.parent.name) for path in folder.glob("*/state") if path.parent.name.isdecimal()]
        if steps:
            return [folder / str(step) for step in sorted(steps)]
    return []


def reason(error: Exception) -> str:
    """Returns the message of an error of Orbax or TensorStore in one line."""
    text = str(error).split("See full TensorStore details")[0].strip()
    return text.splitlines()[0][:400] if text else type(error).__name__
