"""Repeatedly ends one of a run's four processes, and compares metrics with an uninterrupted run.

    python scripts/process_failures.py

At a random instant a process is killed (SIGKILL), stopped (SIGSTOP) or raises an exception. The run
saves every third step, so many failures happen during a save. The other processes must end within a
minute, with a nonzero exit code and a message that names the process. Then two processes resume the
run, until one receives SIGUSR1. At the end the metrics must have each step exactly once, with the
losses of the uninterrupted run to 1e-4.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from torture import SMALL, differences, read

LIMIT = 60.0
"""Seconds within which the other processes must end."""
DEVICES = 4
HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "failing": signal.SIGUSR2}
PROGRAM = """
import signal
def fail(*_):
    raise OSError("the disk of this host is gone")
signal.signal(signal.SIGUSR2, fail)
from jaxtp.config import entry
from jaxtp.train.__main__ import PROGRAM, main
entry.run(PROGRAM, main)
"""
"""A training run that raises an exception on SIGUSR2."""


@dataclass(frozen=True)
class Job:
    """A run that each call may start with another number of processes."""

    folder: Path
    text: Path
    steps: int

    def log(self, index: int) -> Path:
        return self.folder / f"process-{index}.log"

    @contextmanager
    def started(self, count: int) -> Iterator[list[subprocess.Popen]]:
        """Starts `count` processes that share four devices, and kills them at the end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = SMALL | {
            "run.dir": self.folder / "run",
            "data.path": self.text,
            "train.steps": self.steps,
        }
        flags |= {"mesh.fsdp": 2, "mesh.tp": 2}
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            *(str(part) for k, v in flags.items() for part in (f"--{k}", v)),
        ]
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{found.getsockname()[1]}"
        place = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "PYTHONUNBUFFERED": "1",
        }
        place |= {"JAX_NUM_CPU_DEVICES": str(DEVICES // count), "JAX_PLATFORMS": "cpu"}
        programs = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self.folder.parent / "programs"))
        place |= {"JAX_COMPILATION_CACHE_DIR": programs}
        processes: list[subprocess.Popen] = []
        try:
            for index in range(count):
                own = place | {"JAX_PROCESS_ID": str(index)}
                with self.log(index).open("w") as log:
                    streams = {"stdout": log, "stderr": subprocess.STDOUT}
                    processes.append(subprocess.Popen(command, env=os.environ | own, **streams))
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def wait_for_progress(self, processes: list[subprocess.Popen]) -> None:
        """Waits until the run logs a new step."""
        before = max(read(self.folder / "run"), default=0)
        until = time.monotonic() + 300
        while max(read(self.folder / "run"), default=0) <= before:
            assert all(process.poll() is None for process in processes), self.log(0).read_text()
            assert time.monotonic() < until, "no progress in five minutes"
            time.sleep(0.01)

    def disturb(self, how: str, chance: random.Random) -> str:
        """Ends one of four processes; returns a line about the others."""
        with self.started(4) as processes:
            self.wait_for_progress(processes)
            time.sleep(chance.uniform(0, 1))
            victim = chance.randrange(4)
            saving = any(
                "orbax-checkpoint-tmp" in path.name
                for path in (self.folder / "run/checkpoints").glob("*")
            )
            seconds = self._end(processes, victim, HOW[how])
            others = [index for index in range(4) if index != victim]
            codes = [processes[index].returncode for index in others]
            named = sum(f"process {victim} (on" in self.log(index).read_text() for index in others)
        line = (
            f"process {victim} {how}{' in a save' if saving else ''}: the others ended in "
            f"{seconds:.1f} s, {codes}, "
        )
        line += f"{named} named it"
        assert all(codes), line
        assert named == 3, line
        return line

    def _end(self, processes: list[subprocess.Popen], victim: int, number: signal.Signals) -> float:
        """Sends a signal to the victim; returns the seconds until the others have ended."""
        began = told = time.monotonic()
        processes[victim].send_signal(number)
        while any(
            process.poll() is None for index, process in enumerate(processes) if index != victim
        ):
            now = time.monotonic()
            assert now - began < LIMIT, [process.poll() for process in processes]
            if number == signal.SIGUSR2 and now - told > 5 and processes[victim].poll() is None:
                # The first signal was raised in a callback, which lost it.
                processes[victim].send_signal(number)
                began = told = now
            time.sleep(0.01)
        return time.monotonic() - began

    def go_on(self) -> str:
        """Resumes with two processes, and stops the run by SIGUSR1; returns a line about it."""
        with self.started(2) as processes:
            self.wait_for_progress(processes)
            processes[1].send_signal(signal.SIGUSR1)
            codes = [process.wait(timeout=120) for process in processes]
        assert codes == [0, 0], self.log(0).read_text()
        return f"went on with two processes to step {max(read(self.folder / 'run'))}"

    def finish(self, count: int) -> None:
        """Resumes the run, and waits for its end."""
        with self.started(count) as processes:
            codes = [process.wait(timeout=1800) for process in processes]
        assert not any(codes), self.log(0).read_text()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kind", choices=HOW, nargs="+", default=list(HOW), help="how processes end (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="number of rounds of each kind (default 10)"
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="number of steps of each run (default 400)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants and processes")
    arguments = parser.parse_args(argv)
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text(
            "".join(
                f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(9000)
            )
        )
        whole = Job(folder / "whole", text, arguments.steps)
        whole.finish(1)
        job = Job(folder / "disturbed", text, arguments.steps)
        turns = [how for _ in range(arguments.rounds) for how in arguments.kind]
        for turn, how in enumerate(turns, 1):
            line = job.disturb(how, chance)
            if turn < len(turns):
                line += f"; {job.go_on()}"
            print(f"{turn:2} {line}", flush=True)
        job.finish(2)
        worst = differences(whole.folder / "run", job.folder / "run")
    good = worst["loss"] <= 1e-4 and worst["tokens"] == 0
    print(f"{'ok' if good else 'FAIL'}: largest differences {worst}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
