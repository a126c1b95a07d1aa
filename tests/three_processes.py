"""A program that imports JAX once, and forks the three processes of each of several runs, which end
in several ways.

`python three_processes.py FOLDER ENDING...` prints the exit codes of each run; the processes write
logs to the folder.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from jaxtp.config import entry
from jaxtp.distributed import agreement, peers
from jaxtp.distributed.agreement import raise_everywhere
from jaxtp.distributed.joining import join_processes

SENT = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def act(ending, me, go):
    """What each process does."""
    join_processes()
    agreement.watch()
    agreement.working_on("step 7")
    print("ready", flush=True)
    while not go.exists():
        time.sleep(0.05)
    if ending == "flags":
        with raise_everywhere():
            if me == 1:
                sys.exit(2)
    if ending == "mistake":
        raise entry.UserError("a mistake of all")
    if ending == str(me):
        raise RuntimeError("the disk is gone")
    if ending != "none":
        time.sleep(60)


def forked(ending, me, address, log, go):
    """Starts a process; returns its id."""
    if pid := os.fork():
        return pid
    os.environ |= {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": str(me),
    }
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.exit(
        agreement.run_and_report(lambda: entry.attempt("program", lambda: act(ending, me, go)))
    )


def exit_codes(ending, address, folder):
    """Runs three processes until all have ended but one that is stopped, which is killed."""
    logs = [folder / f"{ending}-{me}.log" for me in range(3)]
    go = folder / f"{ending}.go"
    processes = [forked(ending, me, address, logs[me], go) for me in range(3)]
    until = time.monotonic() + 120
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert time.monotonic() < until, [log.read_text() for log in logs if log.exists()]
        time.sleep(0.05)
    go.touch()
    if ending in SENT:
        os.kill(processes[1], SENT[ending])
    codes = [None] * 3
    for me in (0, 2, 1):
        if (ending, me) == ("stopped", 1):
            os.kill(processes[me], signal.SIGKILL)
            os.waitpid(processes[me], 0)
        else:
            codes[me] = os.waitstatus_to_exitcode(os.waitpid(processes[me], 0)[1])
    return codes


def main():
    """Runs each ending, with processes that soon miss the heartbeats of one that is stopped."""
    peers.SILENCE = 4.0
    folder, *endings = sys.argv[1:]
    addresses = json.loads(os.environ["ADDRESSES"])
    codes = {}
    for ending, address in zip(endings, addresses, strict=True):
        codes[ending] = exit_codes(ending, address, Path(folder))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
