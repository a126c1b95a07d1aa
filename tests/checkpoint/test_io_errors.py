"""What proves damage, and what may pass."""

import errno
import io
from unittest import mock

import jax
import pytest

from jaxtp.checkpoint import io_errors
from jaxtp.checkpoint.io_errors import (
    CheckpointError,
    DamagedError,
    files_below,
    read_or_explain,
    retry_io,
)

MAY_PASS = [
    *map(
        OSError,
        (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOSPC, errno.EMFILE),
        ["from the file system"] * 5,
    ),
    TimeoutError(),
    MemoryError(),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(io_errors, "PAUSES", (0.0, 0.001, 0.002))


def raises(*errors):
    """Returns a function that raises each error once, and then returns 3."""
    return mock.Mock(side_effect=[*errors, 3])


@pytest.mark.parametrize("error", MAY_PASS, ids=repr)
def test_what_may_pass_proves_nothing(tmp_path, error):
    for errors in ([error] * 4, [ValueError("a library's own"), *[error] * 4]):
        with pytest.raises(CheckpointError, match=r"cannot be read .*proves no damage") as raised:
            read_or_explain(tmp_path, raises(*errors))
        assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize(
    "error", [ValueError("not JSON"), FileNotFoundError("gone"), KeyError("x")], ids=repr
)
def test_files_that_can_be_read_and_mean_nothing_are_damaged(tmp_path, error):
    with pytest.raises(DamagedError, match="is damaged"):
        read_or_explain(tmp_path, raises(error, error))


class Unreadable(io.FileIO):
    """A file on a disk that fails when it is read."""

    def read(self, size=-1):
        raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_cannot_be_read_proves_no_damage_whatever_a_library_says(tmp_path, monkeypatch):
    monkeypatch.setattr(io_errors, "open_regular", Unreadable)
    (tmp_path / "part").write_bytes(b"data")
    error = ValueError("a library's own")
    with pytest.raises(CheckpointError, match=r"cannot be read \(\[Errno 5\].*part") as raised:
        read_or_explain(tmp_path, raises(*[error] * 9))
    assert not isinstance(raised.value, DamagedError)
    with pytest.raises(FileNotFoundError):
        list(files_below(tmp_path / "gone"))


def test_a_second_attempt_counts(tmp_path):
    """Also where the file system fails between the two."""
    late = ValueError("the file system answered late, and Orbax calls it otherwise")
    assert read_or_explain(tmp_path, raises(late)) == 3
    assert (
        read_or_explain(tmp_path, raises(late, OSError(errno.EIO, "Input/output error"), late)) == 3
    )


@pytest.mark.parametrize("read", [read_or_explain, retry_io])
def test_an_error_that_passes_is_waited_for_aloud_and_then_named(tmp_path, capsys, read):
    passing = [OSError(errno.EIO, "Input/output error", str(tmp_path / "d/part"))] * len(
        io_errors.PAUSES
    )
    assert read(tmp_path, raises(*passing)) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(io_errors.PAUSES)
    assert all(
        "cannot be read now ([Errno 5] Input/output error: " in line and "d/part" in line
        for line in lines
    )
    lasting = [OSError(errno.ESTALE, "Stale file handle", "part")] * 9
    with pytest.raises(CheckpointError, match=r"cannot be read .*Stale file handle: 'part'"):
        read(tmp_path, raises(*lasting))
