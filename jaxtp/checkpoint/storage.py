"""Reads a checkpoint's description and arrays, and bounds the host memory of reads and writes.

A save first copies a process's part to host memory, because training continues meanwhile. Then it
compresses and writes at most `MAX_BYTES_IN_FLIGHT` at a time; a restore reads at most as many
bytes. Orbax's default is 96 GB per process. Orbax's `StandardCheckpointHandler` cannot change this
limit, and on GPUs it stages a save in pinned host memory, which grows according to users (orbax
issue 2090). `PyTreeCheckpointHandler` writes the same files and has both settings.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pydantic
from etils import epath
from jax import Array, ShapeDtypeStruct
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import future

from jaxtp.checkpoint.checksum import Sums
from jaxtp.checkpoint.io_errors import (
    MISSING,
    CheckpointError,
    DamagedError,
    files_below,
    read_on_all,
    read_or_explain,
    require_shared,
    retry_io,
)
from jaxtp.checkpoint.logical import AbstractArrays, Arrays
from jaxtp.config.files import fingerprint
from jaxtp.config.reading import read_bytes
from jaxtp.config.schema import Address
from jaxtp.distributed.agreement import is_multiprocess
from jaxtp.mesh import all_devices

# The JSON object that a checkpoint stores with its arrays
Info = dict[str, Any]
# Orbax's metadata of arrays, by name
Metadata = Mapping[str, Any]

MAX_BYTES_IN_FLIGHT = 2 * 10**9
# Maximum bytes of a file that describes a checkpoint and is read whole
_MAX_DESCRIPTION = 2**28
# Names of the files that describe a checkpoint
_DESCRIPTION = re.compile(r"_\w+|metadata|manifest\.ocdbt|\.z\w+|process_\d+")


class ArrayFacts(pydantic.BaseModel):
    """The entries of an info that describe each array by its name."""

    checksums: dict[str, str]
    specs: dict[str, str] = {}
    # Older checkpoints lack dtypes. Checkpoints of version 0.1 lack shapes as well.
    shapes: dict[str, list[int]] = {}
    dtypes: dict[str, str] = {}


def save_host_bytes(bytes_per_device: int, devices: int, total: int) -> int:
    """Returns a save's peak host memory per process."""
    written = min(bytes_per_device * devices, total)
    return written + min(written, MAX_BYTES_IN_FLIGHT)


class BoundedHandler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler, with a host memory limit for each save."""

    async def async_save(self, directory: Path, *args: object, **kwargs: Any) -> object:
        """Starts to save."""
        # A handler's limit is fixed, so each save makes its own handler.
        largest = 0
        for array in kwargs["args"].item.values():
            shape = array.sharding.shard_shape(array.shape)
            largest = max(largest, math.prod(shape) * array.dtype.itemsize)
        handler = ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=_limit_gb(largest), enable_pinned_host_transfer=False
        )
        return await handler.async_save(directory, *args, **kwargs)

    @classmethod
    def typestr(cls) -> str:
        """Returns the name of Orbax's handler, so that plain Orbax can read the files."""
        return ocp.PyTreeCheckpointHandler.typestr()


class DeferredInfoHandler(ocp.JsonCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of JSON, for a function that returns the info, called in the background."""

    async def async_save(self, directory: Path, *_: object, args: ocp.args.JsonSave) -> object:
        """Starts to save."""

        async def write() -> None:
            info = args.item()
            if jax.process_index() == 0:
                (directory / "metadata").write_text(json.dumps(info))

        return [future.CommitFutureAwaitingContractedSignals(write(), name="info")]

    @classmethod
    def typestr(cls) -> str:
        """Returns the name of Orbax's handler."""
        return ocp.JsonCheckpointHandler.typestr()


def _limit_gb(largest: int) -> float:
    # Orbax requires each part to be smaller than the limit.
    return max(MAX_BYTES_IN_FLIGHT, largest + 1) / 10**9


def _open_reader(metadata: Metadata, target: AbstractArrays) -> ocp.PyTreeCheckpointHandler:
    process = jax.process_index()
    one_process = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}
    )
    largest = 0
    for name in target.keys() & metadata.keys():
        largest = max(largest, bytes_to_read(metadata[name], target[name]))
    # Orbax's default handler also reads a description of the arrays, in a coroutine that is never
    # awaited if a read fails.
    arrays = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    return ocp.PyTreeCheckpointHandler(
        multiprocessing_options=one_process,
        restore_concurrent_gb=_limit_gb(largest),
        type_handler_registry=arrays,
    )


def bytes_to_read(stored: Any, target: ShapeDtypeStruct) -> int:
    """Returns the bytes of the chunks that hold a device's part of an array."""
    storage = getattr(stored, "storage", None)
    chunks: Sequence[int] = (storage and storage.chunk_shape) or stored.shape
    part = target.sharding.shard_shape(tuple(stored.shape))
    num_bytes: int = stored.dtype.itemsize
    for size, length, chunk in zip(stored.shape, part, chunks, strict=True):
        # A part that begins inside a chunk overlaps one chunk more.
        num_bytes *= min(size, (-(-length // chunk) + 1) * chunk)
    return num_bytes


def describe_arrays(summed: Sums) -> Info:
    """Returns the entries of an info that a restore compares with its arrays."""
    return {
        "shapes": summed.shapes,
        "dtypes": summed.dtypes,
        "checksums": summed.checksums(),
    }


def absolute(folder: Path) -> Path:
    """Returns a folder, which may be an `Address`, as Orbax opens it."""
    if isinstance(folder, Address):
        at_url: Path = epath.Path(str(folder))
        return at_url
    return folder.resolve()


def seal(info: Mapping[str, Any]) -> Info:
    """Adds a checksum to an info, which `read_info` verifies."""
    return {**info, "sha256": fingerprint(info)}


def read_info(folder: Path) -> Info:
    """Reads a checkpoint's info; raises `DamagedError`, or `CheckpointError` if unreadable."""
    return unseal(folder, read_or_explain(folder, lambda: _read_sealed(folder)))


def unseal(folder: Path, sealed: Info) -> Info:
    """Verifies what `seal` returned for the checkpoint in a folder; raises `DamagedError`."""
    if sealed.pop("sha256", None) != fingerprint(sealed):
        raise DamagedError(f"{folder} is damaged (its info does not match its checksum)")
    try:
        for dtype in ArrayFacts.model_validate(sealed, strict=True).dtypes.values():
            jnp.dtype(dtype)
    except (pydantic.ValidationError, TypeError):
        raise DamagedError(f"{folder} is damaged (its info describes no arrays)") from None
    return sealed


def _read_sealed(folder: Path) -> Info:
    require_readable(folder)
    return dict(json.loads(read_bytes(folder / "info/metadata", _MAX_DESCRIPTION)))


def require_readable(folder: Path) -> None:
    """Checks an untrusted checkpoint before Orbax and TensorStore open its files.

    Raises:
      DamagedError: a file is a pipe, which would never end, or a device, or a description that
        could fill the memory.
    """
    for path in files_below(folder):
        try:
            status = path.stat()
        except MISSING:
            continue
        name = path.relative_to(folder)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{folder} is damaged ({name} is not a regular file)")
        if status.st_size > _MAX_DESCRIPTION and _DESCRIPTION.fullmatch(path.name):
            raise DamagedError(
                f"{folder} is damaged ({name} has {status.st_size:,} bytes, too many to be real)"
            )


def require_openable(checkpoints: Path) -> None:
    """Checks the files that Orbax opens in a folder of checkpoints before it reads a checkpoint.

    Raises:
      CheckpointError: a file is a pipe, for which Orbax would wait forever, or a device.
    """
    for path in (*checkpoints.glob("*"), *checkpoints.glob("*/*")):
        try:
            mode = path.stat().st_mode
        except OSError:
            # A broken link, or another process deleted it.
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise CheckpointError(f"{path} is not a regular file; delete it")


def is_of_run(info: Mapping[str, Any]) -> bool:
    """Returns whether `jaxtp train` wrote an info; other training loops write other entries."""
    values = list(map(info.get, ("config", "corpus", "mesh")))
    return set(map(type, values)) == {dict} and isinstance(info.get("next_sample"), int)


CONFIG = "config.yaml"
HF_FILES = "hf"
PROGRAMS = "programs"
"""Files in a run's folder: its settings, config.json and the tokenizer files of its model, and
compiled programs."""
RUN_AT_URL = "files"
"""Folder at a URL with the run's files at each step."""
STARTS = "starts"
"""Key in a checkpoint's info: step and sample, `[[0, 0], ...]`, after which batches have a new
size."""


def starts_of(info: Mapping[str, Any], step: int, size: int) -> list[list[int]]:
    """Returns the positions where batches got a new size, for a run that continues with `size`.

    Args:
      info: of the checkpoint at `step`; empty for a new run. The checkpoint of an older version has
        no positions, so what was before it is unknown if the size changed there.
    """
    if not info:
        return [[0, 0]]
    before = info["config"]["data"]["global_batch_size"]
    position = [step, info["next_sample"]]
    starts: list[list[int]] = [[0, 0]] if position == [step, step * before] else [position]
    starts = info.get(STARTS, starts)
    return starts if size == before else [*starts, position]


def read_info_on_all(run: Path, find: Callable[[], Path]) -> tuple[Path, Info]:
    """Finds a checkpoint and reads its info, with the same result or `CheckpointError`
    everywhere."""
    if is_multiprocess():
        require_shared(run, lambda: _visible_files(find))
    folder = read_on_all(find)
    return folder, read_on_all(lambda: read_info(folder))


def _visible_files(find: Callable[[], Path]) -> list[str] | None:
    def sizes() -> list[tuple[str, int]]:
        return sorted(
            (str(path.relative_to(folder)), path.stat().st_size) for path in files_below(folder)
        )

    try:
        folder = find()
    except CheckpointError:
        return None
    try:
        return [str(folder), fingerprint({"files": retry_io(folder, sizes)})]
    except MISSING:
        return None


def read_metadata(folder: Path) -> Metadata:
    """Reads array shapes and dtypes; raises the errors of `read_info`."""
    return read_or_explain(
        folder, lambda: dict(_open_reader({}, {}).metadata(absolute(folder / "state")).tree)
    )


def read_arrays(folder: Path, target: AbstractArrays, metadata: Metadata) -> Arrays:
    """Reads arrays in the shardings and dtypes of `target`, without verifying checksums.

    Raises the errors of `read_info`.
    """

    def read() -> Arrays:
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        restore = ocp.args.PyTreeRestore(item=target, restore_args=arguments, partial_restore=True)
        arrays: Arrays = _open_reader(metadata, target).restore(
            absolute(folder / "state"), args=restore
        )
        # For an array that does not exist, Orbax returns the target.
        missing = [name for name, array in arrays.items() if isinstance(array, ShapeDtypeStruct)]
        if missing:
            raise DamagedError(
                f"{folder} is damaged (arrays are missing: {', '.join(missing[:3])})"
            )
        return arrays

    return read_or_explain(folder, read)


def read_verified(folder: Path, target: AbstractArrays, info: Mapping[str, Any]) -> Arrays:
    """Reads arrays, compares checksums, and casts to `target`; all processes must call it."""
    arrays = read_on_all(lambda: _read_as_stored(folder, target, info))
    computed = Sums(arrays).checksums()
    differ = [name for name in computed if computed[name] != info["checksums"][name]]
    if differ:
        more = ", ..." if len(differ) > 3 else ""
        raise DamagedError(f"{folder} is damaged (checksums differ: {', '.join(differ[:3])}{more})")
    return {name: arrays.pop(name).astype(array.dtype) for name, array in target.items()}


def _read_as_stored(folder: Path, target: AbstractArrays, info: Mapping[str, Any]) -> Arrays:
    shapes = info.get("shapes", {})
    dtypes = info.get("dtypes", {})
    metadata: Metadata = {
        name: ShapeDtypeStruct(shapes[name], dtypes[name]) for name in shapes.keys() & dtypes.keys()
    }
    # Orbax opens every array to read its chunks. They are only needed for an array that is larger
    # than the memory limit.
    sizes = [array.size * array.dtype.itemsize for array in metadata.values()]
    if metadata.keys() != target.keys() or max(sizes, default=0) > MAX_BYTES_IN_FLIGHT:
        metadata = read_metadata(folder)
    stored_shapes = {name: tuple(array.shape) for name, array in metadata.items()}
    # Checkpoints of version 0.1 have no shapes.
    saved = {name: tuple(shape) for name, shape in info.get("shapes", stored_shapes).items()}
    if saved.keys() != info["checksums"].keys() or not saved.items() <= stored_shapes.items():
        raise DamagedError(
            f"{folder} is damaged (its arrays differ from the saved names or shapes)"
        )
    wrong = []
    stored = {}
    for name, array in target.items():
        if saved.get(name) == array.shape:
            stored[name] = array.update(dtype=metadata[name].dtype)
        else:
            wrong.append(f"{name} is {saved.get(name)}, not {array.shape}")
    if wrong:
        raise CheckpointError(f"{folder} holds another model: {'; '.join(wrong[:3])}")
    return read_arrays(folder, stored, metadata)


def steps_in(folder: Path) -> list[int]:
    """Returns the steps that have a subfolder, in ascending order."""
    steps = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            name = entry.name
            # A `Path` takes a link to itself for a file; a `DirEntry` raises.
            if name.isdecimal() and str(int(name)) == name and Path(entry).is_dir():
                steps.append(int(name))
    return sorted(steps)


def finished_checkpoints(run: Path) -> list[Path]:
    """Returns a run's finished checkpoints, oldest first; `run` itself if it is a checkpoint."""

    def look() -> list[Path]:
        if (run / "state").is_dir():
            return [run]
        for folder in (run / "checkpoints", run):
            steps = [folder / str(step) for step in steps_in(folder)]
            finished = [step for step in steps if (step / "state").is_dir()]
            if finished:
                return finished
        return []

    return retry_io(run, look)


def newest_checkpoint(run: Path) -> Path:
    """Returns the last of `finished_checkpoints`; raises `CheckpointError` if there is none."""
    checkpoints = finished_checkpoints(run)
    if checkpoints:
        return checkpoints[-1]
    raise CheckpointError(f"{run}: no finished checkpoint there; name the folder of a run")


def kept_checkpoint(run: Path, step: int) -> Path:
    """Returns the checkpoint of a step; raises `CheckpointError` if it is not kept."""
    folders = {int(folder.name): folder for folder in finished_checkpoints(run / "checkpoints")}
    if step in folders:
        return folders[step]
    if not folders:
        raise CheckpointError(f"run.resume_at={step}: {run} has no finished checkpoint")
    nearest = min(folders, key=lambda other: abs(other - step))
    raise CheckpointError(
        f"run.resume_at={step}: {run} keeps the checkpoints {', '.join(map(str, folders))}; the "
        f"nearest is --run.resume-at {nearest}"
    )


def kept_steps(
    losses: Mapping[int, float | None], *, keep: int, keep_every: int, keep_best: bool
) -> set[int]:
    """Returns the steps to keep, given the losses of all checkpoints by step; see `Checkpoints`."""
    steps = sorted(losses)
    selection = set(steps[-keep:])
    if keep_every:
        selection.update(step for step in steps if step % keep_every == 0)
    scores = {step: loss for step, loss in losses.items() if loss is not None}
    if keep_best and scores:
        # The newest on ties
        selection.add(min(scores, key=lambda step: (scores[step], -step)))
    return selection


def newest_with_info(run: Path) -> tuple[Path, Info] | None:
    """Returns the newest checkpoint with undamaged info, or None."""
    for folder in reversed(finished_checkpoints(run)):
        try:
            return folder, read_info(folder)
        except DamagedError:
            continue
    return None


def move_aside(checkpoint: Path) -> Path:
    """Moves a damaged checkpoint to `damaged/` next to its folder; returns its new place.

    Raises `CheckpointError` if the move fails.
    """
    free = checkpoint.parent.parent / "damaged" / checkpoint.name
    try:
        free.parent.mkdir(parents=True, exist_ok=True)
        while free.exists():
            free = free.with_name(free.name + "_")
        checkpoint.rename(free)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} is damaged, and cannot be moved to {free} ({error.strerror})"
        ) from None
    return free


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose arrays are read whole, one at a time, onto one device."""

    folder: Path
    info: Mapping[str, Any]
    arrays: AbstractArrays
    metadata: Metadata

    def read(self, name: str) -> Array:
        """Reads one array."""
        return read_arrays(self.folder, {name: self.arrays[name]}, self.metadata)[name]

    def verify(self, name: str) -> str | None:
        """Describes an array's damage, or returns None; raises if the array is unreadable."""
        try:
            array = self.read(name)
        except DamagedError as error:
            return str(error)
        summed = Sums({name: array})
        if summed.checksums()[name] != self.info["checksums"].get(name):
            return "does not match its saved checksum"
        return "has elements that are not finite" if summed.not_finite() else None


def open_checkpoint(folder: Path) -> StoredCheckpoint:
    """Opens a checkpoint, or a run's newest checkpoint.

    Raises `CheckpointError` if it is missing or damaged.
    """
    folder = newest_checkpoint(folder)
    info = read_info(folder)
    metadata = read_metadata(folder)
    sharding = SingleDeviceSharding(all_devices()[0])
    arrays = {
        name: ShapeDtypeStruct(tuple(array.shape), array.dtype, sharding=sharding)
        for name, array in sorted(metadata.items())
    }
    missing = sorted(info["checksums"].keys() - arrays.keys())
    if missing:
        raise CheckpointError(f"{folder}: saved arrays are missing: {', '.join(missing[:3])}")
    return StoredCheckpoint(folder, info, arrays, metadata)
