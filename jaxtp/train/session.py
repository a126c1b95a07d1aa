"""The runs of a trainer, one after the other: when they start and end, and what is left open."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import jax

from jaxtp.distributed.agreement import is_multiprocess, raise_everywhere, report_failure, watch
from jaxtp.distributed.devices import describe_out_of_memory, request_virtual_devices
from jaxtp.distributed.environment import is_launched
from jaxtp.guards.hook import Hook
from jaxtp.mesh import fixed_devices
from jaxtp.train.config import TrainConfig
from jaxtp.train.defaults import Decided, as_configured, decide, read_settings
from jaxtp.train.loop import TrainingLoop
from jaxtp.train.setup import make_run
from jaxtp.train.task import Callback, Task, with_references


class Session:
    """Starts a run at its first use, and again after its end.

    Within `inside`, the mesh of the run is the current one and signals are recorded: in a whole
    `with` block of the trainer, otherwise only in its methods, so that other cells of a notebook
    are not affected.

    Args:
      call_back: makes the hook that calls a user's callbacks.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | TrainConfig,
        task: Task,
        call_back: Callable[[Sequence[Callback]], Hook],
    ):
        self.decided: Decided | None = None
        """The settings of a command, which has decided them."""
        self.loop: TrainingLoop | None = None
        """The running loop, or the last one, which can still be read."""
        if isinstance(settings, TrainConfig):
            self._decide = lambda: as_configured(with_references(settings, task))
        else:
            config, explicit = read_settings(settings, task)
            self._decide = partial(decide, config, explicit)
            if not is_launched():
                # Before the program makes JAX start with fewer devices
                request_virtual_devices(fixed_devices(config.mesh.sizes))
        self._task = task
        self._call_back = call_back
        self._resources = ExitStack()
        self._block = ExitStack()
        self._is_inside = False
        # The thread of the last use
        self._thread = threading.current_thread()

    def started(self) -> TrainingLoop:
        """Returns the last loop, which may have ended; starts the first one."""
        return self._start() if self.loop is None else self.loop

    def running(self) -> TrainingLoop:
        """Returns a loop that is open; starts one if the last one has ended."""
        loop = self.started()
        return loop if loop.is_open else self._start()

    @contextmanager
    def inside(self, loop: TrainingLoop) -> Iterator[None]:
        """Makes the mesh of the run the current one, and records signals."""
        if self._is_inside:
            yield
            return
        with self._entered(loop):
            loop.watchdog.on_activity()
            try:
                yield
            finally:
                # A run does not stall between cells.
                loop.watchdog.rest()

    @contextmanager
    def _entered(self, loop: TrainingLoop) -> Iterator[None]:
        self._is_inside = True
        self._thread = threading.current_thread()
        try:
            with jax.set_mesh(loop.mesh), loop.run.interrupt:
                yield
        finally:
            self._is_inside = False

    @contextmanager
    def reading(self) -> Iterator[TrainingLoop]:
        """Yields the last loop, `inside`."""
        loop = self.started()
        with self.inside(loop):
            yield loop

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps that are left."""
        loop = self.started()
        if self._is_inside or not loop.done:
            loop = self.running()
        while not loop.done:
            loop.require_open()
            step = self._next(loop)
            if step is None:
                break
            yield step
        if not self._is_inside:
            self.close()

    def _next(self, loop: TrainingLoop) -> int | None:
        if self._is_inside:
            return next(loop.steps, None)
        try:
            with self.inside(loop):
                return next(loop.steps, None)
        except BaseException as error:
            self.close(error)
            raise

    def enter(self) -> None:
        """Begins a `with` block."""
        self._block.enter_context(self._entered(self.running()))

    def exit(self, error: BaseException | None) -> None:
        """Ends a `with` block."""
        with self._block:
            self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the run. Saves it if its loop was left early, unless that was by an error."""
        loop = self.loop
        if loop is None or not loop.is_open:
            return
        _open.discard(self)
        try:
            with self.inside(loop), self._resources:
                if error is not None:
                    self._report(error)
                    self._resources.__exit__(type(error), error, error.__traceback__)
                elif not loop.done and loop.step >= loop.first:
                    with self._reporting():
                        loop.save()
        finally:
            loop.is_open = False

    def is_used_elsewhere(self) -> bool:
        """Returns whether the last use was in another thread, which is alive."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()

    def _start(self) -> TrainingLoop:
        decided = self.decided
        if decided is None:
            if is_launched() and not is_multiprocess():
                from jaxtp.distributed.joining import join_processes

                join_processes()
            with raise_everywhere(watch):
                decided = self._decide()
        self._allocator = decided.config.launch.allocator
        for session in list(_open):
            # A cell that makes a trainer was run again, and the first one locks the folder.
            loop = session.started()
            folder = loop.run.config.run.dir
            if folder == decided.config.run.dir and not session._is_inside:
                loop.line(f"closed at step {loop.step}: another trainer starts in {folder}")
                session.close()
        # A mesh in context, such as that of another run, is not for the plan of this one.
        no_mesh = jax.set_mesh(None)
        with no_mesh, ExitStack() as context, ExitStack() as resources, self._reporting():
            run = make_run(decided, resources, context, self._task)
            loop = TrainingLoop(run, self._call_back(run.parts.callbacks))
            resources.enter_context(loop.resources)
            self._resources = resources.pop_all()
        self.loop = loop
        _open.add(self)
        return loop

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._report(error)
            raise

    def _report(self, error: BaseException) -> None:
        # Before anything is closed, because closing may wait for the other processes.
        if isinstance(error, jax.errors.JaxRuntimeError):
            note = describe_out_of_memory(error, self._allocator)
            if note:
                error.add_note(note)
        report_failure(error)


_open: set[Session] = set()


def _close_at_exit() -> None:
    # A save waits for all processes, and others may not come to it.
    if is_multiprocess():
        return
    with ExitStack() as sessions:
        for session in _open:
            # Another thread may be within a step.
            if not session.is_used_elsewhere():
                sessions.callback(session.close)


# A process that this one forks, to read data for example, has no run.
os.register_at_fork(after_in_child=_open.clear)
# `atexit` is too late: executors, which write checkpoints, take no more work then.
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]
