"""What proves damage, and what may pass."""

import errno

import jax
import pytest

from jaxtp.checkpoint import io_errors
from jaxtp.checkpoint.io_errors import CheckpointError, DamagedError, read_or_explain, retry_io

MAY_PASS = [
    *(OSError(number, "from the file system") for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOSPC)),
    *(OSError(errno.EMFILE, "too many files"), TimeoutError(), MemoryError()),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(io_errors, "PAUSES", (0.0, 0.001, 0.002))


@pytest.mark.parametrize("error", MAY_PASS, ids=repr)
@pytest.mark.parametrize("attempt", [1, 2])
def test_what_may_pass_proves_nothing(tmp_path, error, attempt):
    errors = [ValueError("a library's own"), *[error] * 4][2 - attempt :]

    def read():
        raise errors.pop(0)

    with pytest.raises(CheckpointError, match=r"cannot be read .*proves no damage") as raised:
        read_or_explain(tmp_path, read)
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize("error", [ValueError("not JSON"), FileNotFoundError("gone"), KeyError("x")], ids=repr)
def test_files_that_can_be_read_and_mean_nothing_are_damaged(tmp_path, error):
    def read():
        raise error

    with pytest.raises(DamagedError, match="is damaged"):
        read_or_explain(tmp_path, read)


def test_a_second_attempt_counts(tmp_path):
    errors = [ValueError("the file system answered late, and Orbax calls it otherwise")]

    def read():
        if errors:
            raise errors.pop()
        return 3

    assert read_or_explain(tmp_path, read) == 3


@pytest.mark.parametrize("read", [read_or_explain, retry_io])
def test_an_error_that_passes_is_waited_for_aloud_and_then_named(tmp_path, capsys, read):
    errors = [OSError(errno.EIO, "Input/output error", str(tmp_path / "d/part"))] * len(io_errors.PAUSES)

    def look():
        if errors:
            raise errors.pop()
        return 3

    assert read(tmp_path, look) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(io_errors.PAUSES)
    assert all("cannot be read now ([Errno 5] Input/output error: " in line and "d/part" in line for line in lines)
    errors[:] = [OSError(errno.ESTALE, "Stale file handle", "part")] * 9
    with pytest.raises(CheckpointError, match=r"cannot be read .*Stale file handle: 'part'") as raised:
        read(tmp_path, look)
    assert not isinstance(raised.value, DamagedError)


def test_a_file_system_that_fails_between_two_reads_makes_neither_a_second_attempt(tmp_path):
    errors = [ValueError("cut"), OSError(errno.EIO, "Input/output error"), ValueError("cut")]

    def read():
        if errors:
            raise errors.pop(0)
        return 3

    assert read_or_explain(tmp_path, read) == 3
