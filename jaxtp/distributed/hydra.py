"""Shares a word between the processes of MPICH or Intel MPI, without an MPI library.

Hydra, their process manager, gives each process a socket in the variable PMI_FD, and speaks version
1 of PMI on it: lines of words such as `cmd=put key=jaxtp value=node1`.
"""

import socket
from collections.abc import Mapping

from jaxtp.config.reading import truncate
from jaxtp.distributed.environment import COUNT, LaunchError, read_number

_KEY = "jaxtp"
_MAX_BYTES = 2000
_SECONDS = 60.0


def share(variables: Mapping[str, str], word: str) -> str:
    """Returns the word of process 0, which has no spaces. Waits until all processes have called it.

    Afterwards an MPI library cannot be started in this process.

    Raises:
      LaunchError: the process manager does not answer, or not in PMI's version 1.
    """
    descriptor = read_number(variables, "PMI_FD")
    process = read_number(variables, "PMI_RANK")
    try:
        with socket.socket(fileno=descriptor) as manager:
            manager.settimeout(_SECONDS)
            _ask(manager, "init pmi_version=1 pmi_subversion=1", "response_to_init")
            name = _ask(manager, "get_my_kvsname", "my_kvsname")["kvsname"]
            if process == 0:
                _ask(manager, f"put kvsname={name} key={_KEY} value={word}", "put_result")
            _ask(manager, "barrier_in", "barrier_out")
            shared = _ask(manager, f"get kvsname={name} key={_KEY}", "get_result")["value"]
            _ask(manager, "finalize", "finalize_ack")
    except (OSError, KeyError, ValueError) as error:
        raise LaunchError(
            f"PMI_FD={descriptor}: mpirun's process manager does not answer ({error}); set "
            f"JAX_COORDINATOR_ADDRESS=HOST:PORT of process 0, or {COUNT}=1 for a single process"
        ) from None
    return shared


def _ask(manager: socket.socket, command: str, expected: str) -> dict[str, str]:
    manager.sendall(f"cmd={command}\n".encode())
    answer = b""
    # Byte by byte, so that nothing of a next line is lost.
    while not answer.endswith(b"\n"):
        received = manager.recv(1)
        if not received or len(answer) > _MAX_BYTES:
            raise ValueError("it has ended")
        answer += received
    words = answer.decode().split()
    values = dict(word.split("=", 1) for word in words if "=" in word)
    if values.get("cmd") != expected:
        raise ValueError(f"it answers {truncate(answer.decode().strip())}")
    return values
