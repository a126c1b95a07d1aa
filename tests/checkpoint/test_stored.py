"""What proves damage, and what may pass."""

import errno

import jax
import pytest

from jaxtp.checkpoint.damage import CheckpointError, DamagedError, read_or_explain

MAY_PASS = [
    *(OSError(number, "from the file system") for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOSPC)),
    *(OSError(errno.EMFILE, "too many files"), TimeoutError(), MemoryError()),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
]


@pytest.mark.parametrize("error", MAY_PASS, ids=repr)
@pytest.mark.parametrize("attempt", [1, 2])
def test_what_may_pass_proves_nothing(tmp_path, error, attempt):
    errors = [ValueError("a library's own"), error][2 - attempt :]

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
