"""Reads the folder of one checkpoint."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtp.checkpoint.checksum import checksums
from jaxtp.checkpoint.damage import (
    MISSING,
    CheckpointError,
    DamagedError,
    agreed,
    files_below,
    patiently,
    read_or_explain,
    require_shared,
)
from jaxtp.checkpoint.logical import Arrays
from jaxtp.files import fingerprint
from jaxtp.launch.agreement import several

_SHAPES, _CHECKSUMS = "shapes", "checksums"


def agreed_info(place: Path, find: Callable[[], Path]) -> tuple[Path, dict[str, Any]]:
    """Returns a checkpoint's folder and its description, once all processes of a run have found and read the same.

    Args:
      place: where it is looked for, for messages.
      find: returns the folder, or raises a `CheckpointError`.

    Raises:
      CheckpointError: it is damaged (`DamagedError`), cannot be read, or its folder is not one for all.
    """
    if several():
        require_shared(place, lambda: _seen(find))
    folder = agreed(find)
    return folder, agreed(lambda: stored_info(folder))


def _seen(find: Callable[[], Path]) -> list[str] | None:
    """Returns a checkpoint's folder and a hash of the names and sizes of its files; None if it is not there.

    Raises:
      CheckpointError: they cannot be listed now.
    """
    try:
        folder = find()
    except CheckpointError:
        return None

    def sizes() -> list[tuple[str, int]]:
        return sorted((str(path.relative_to(folder)), path.stat().st_size) for path in files_below(folder))

    try:
        return [str(folder), fingerprint({"files": patiently(folder, sizes)})]
    except MISSING:
        return None


def stored_info(folder: Path) -> dict[str, Any]:
    """Returns what was stored beside the arrays in the folder of a checkpoint.

    Raises:
      CheckpointError: it was changed since (`DamagedError`), or cannot be read.
    """
    sealed = read_or_explain(folder, lambda: dict(ocp.JsonCheckpointHandler().restore((folder / "info").resolve())))
    if sealed.pop("sha256", None) != fingerprint(sealed):
        raise DamagedError(f"{folder} is damaged (its description was changed)")
    return sealed


def describe_arrays(arrays: Arrays) -> dict[str, Any]:
    """Returns what the info of a checkpoint says of its arrays, which is what a restore compares them with."""
    return {_SHAPES: {name: list(array.shape) for name, array in arrays.items()}, _CHECKSUMS: checksums(arrays)}


def seal(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the info with its own checksum, as `stored_info` wants it."""
    return {**info, "sha256": fingerprint(info)}


def _reader() -> ocp.Checkpointer:
    """Returns what reads arrays without waiting for other processes, of which one may fail and never come."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def stored_arrays(folder: Path) -> dict[str, Any]:
    """Returns shapes and dtypes of the arrays in the folder of a checkpoint, by name.

    Raises:
      CheckpointError: they are damaged (`DamagedError`), or cannot be read.
    """

    def read() -> dict[str, Any]:
        metadata = _reader().metadata((folder / "state").resolve()).item_metadata
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
        arrays: Arrays = _reader().restore((folder / "state").resolve(), restore)
        return arrays

    return read_or_explain(folder, read)


def read_verified(folder: Path, target: dict[str, jax.ShapeDtypeStruct], info: Mapping[str, Any]) -> Arrays:
    """Returns some of the arrays of a checkpoint: read in the dtypes that they are stored in, checked, and cast.

    All processes of a run have to call it. Each reads what its devices hold; checksums are of whole arrays, which takes
    all of them, so they begin once every process has read its part.

    Args:
      folder: folder of the checkpoint.
      target: the arrays, without padding.
      info: what `stored_info` returns.

    Raises:
      DamagedError: they are not what was written.
      CheckpointError: there are none of that name or shape, or they cannot be read.
    """
    arrays = agreed(lambda: _read_as_stored(folder, target, info))
    found = checksums(arrays)
    differ = [name for name in found if found[name] != info[_CHECKSUMS][name]]
    if differ:
        more = ", ..." if len(differ) > 3 else ""
        raise DamagedError(f"{folder} is damaged (checksums differ: {', '.join(differ[:3])}{more})")
    return {name: arrays.pop(name).astype(array.dtype) for name, array in target.items()}


def _read_as_stored(folder: Path, target: dict[str, jax.ShapeDtypeStruct], info: Mapping[str, Any]) -> Arrays:
    """Returns some of the arrays in the dtypes that they are stored in, their checksums not compared yet."""
    stored = stored_arrays(folder)
    shapes = {name: tuple(array.shape) for name, array in stored.items()}
    written = {name: tuple(shape) for name, shape in info.get(_SHAPES, shapes).items()}  # older ones do not say
    if written.keys() != info[_CHECKSUMS].keys() or any(shapes.get(name) != shape for name, shape in written.items()):
        raise DamagedError(f"{folder} is damaged (it does not hold the arrays that were saved)")
    wrong = [f"{n} is {written.get(n)}, not {a.shape}" for n, a in target.items() if written.get(n) != a.shape]
    if wrong:
        raise CheckpointError(f"{folder} is of another model: {'; '.join(wrong[:3])}")
    as_stored = {n: jax.ShapeDtypeStruct(a.shape, stored[n].dtype, sharding=a.sharding) for n, a in target.items()}
    return read_arrays(folder, as_stored)


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
    """Returns the folders of the finished checkpoints of a run, oldest first; the folder itself if it is one.

    Raises:
      CheckpointError: the folders cannot be listed now.
    """
    return patiently(run, lambda: _finished(run))


def _finished(run: Path) -> list[Path]:
    if (run / "state").is_dir():
        return [run]
    for folder in (run / "checkpoints", run):
        steps = [int(path.parent.name) for path in folder.glob("*/state") if path.parent.name.isdecimal()]
        if steps:
            return [folder / str(step) for step in sorted(steps)]
    return []
