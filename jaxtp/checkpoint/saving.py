"""The processes of a run while they save: where they wait for each other, and how one that fails ends their waiting.

Orbax writes in the background, a part in each process. They meet twice: when all parts are written, and when process 0
has made one checkpoint of them. A process that fails leaves these meetings out, and the others would wait for it until
they give up. Meetings are at JAX's coordinator, so a process that fails comes to the same one with another list of
members, which the coordinator refuses to all at once. A wait that cannot be ended this way has a time limit.
"""

import contextlib
import itertools
import re

import jax
import orbax.checkpoint as ocp

from jaxtp.checkpoint.damage import CheckpointError

SECONDS = 1200
"""Time to write a checkpoint, after which a process that does not come is given up."""
_MEETINGS = ("async_write_complete", "async_commit_complete")
"""Orbax's names of them."""
_instances = itertools.count()


class OtherFailedError(Exception):
    """Another process has failed to write its part, or does not come in time."""


class WaitedError(CheckpointError):
    """A checkpoint that cannot be written because another process did not write its part."""


def in_vain(error: Exception) -> bool:
    """Returns whether an error says no more than that this process has waited for another, which knows why."""
    timeout = isinstance(error, TimeoutError) and error.errno is None
    return timeout or isinstance(error, OtherFailedError | jax.errors.JaxRuntimeError)


class SaveMeetings:
    """The meetings of the processes of a run while they write checkpoints into one folder; Orbax calls it to wait.

    Orbax also calls it twice when a save begins, and twice when it has ended, well or not. A process that comes to the
    end and has left out a meeting has failed: it ends the waiting of those who are there.
    """

    def __init__(self) -> None:
        everyone = set(range(jax.process_count()))
        prefix = f"jaxtp{next(_instances)}"  # the same in all processes: they open their folders in the same order
        self.processes = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=everyone, barrier_sync_key_prefix=prefix
        )
        self.options = ocp.AsyncOptions(timeout_secs=SECONDS, barrier_sync_fn=self)
        self._meet = ocp.multihost.get_barrier_sync_fn(processes=everyone)
        # JAX's coordinator ends a meeting at once for all, if one comes with another list of who takes part.
        self._spoil = ocp.multihost.get_barrier_sync_fn(processes=everyone | {len(everyone)})
        self._ahead: list[str] = []
        self._to_begin = 0

    def begin(self, step: int) -> None:
        """Prepares for the save of a step; the save before it has ended."""
        self._ahead = [f"{self.processes.barrier_sync_key_prefix}_{meeting}.{step}" for meeting in _MEETINGS]
        self._to_begin = 2

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes are here.

        Args:
          key: name of the meeting.
          timeout_ms: milliseconds to wait.

        Raises:
          OtherFailedError: one of them has failed, or does not come in time.
        """
        if key in self._ahead:
            self._wait(key, timeout_ms)
            self._ahead.remove(key)
        elif self._to_begin:
            self._to_begin -= 1
            self._wait(key, timeout_ms)
        elif not self._ahead:
            self._wait(key, timeout_ms)
        else:  # this save has failed, here or elsewhere: nobody waits at its end
            for left_out in self._ahead:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._spoil(key=left_out, timeout_ms=timeout_ms)

    def _wait(self, key: str, timeout_ms: int) -> None:
        try:
            self._meet(key=key, timeout_ms=timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            late = re.search(r"timed out task names:\s*(\d+)", str(error))
            raise OtherFailedError(
                f"process {late[1]} did not write its part within {SECONDS} s" if late else "another process failed"
            ) from error
