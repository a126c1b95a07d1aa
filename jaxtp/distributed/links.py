"""Authenticated sockets between the processes of a run.

Messages are lines of JSON. At the start each end sends a random challenge, and the other end
answers with its HMAC, whose key is the run's token; the token is never sent. Later messages are
neither signed nor encrypted. Process 0 polls all connections together, so a port scanner delays no
process (`multiprocessing.connection` would wait for each connection without a limit).
"""

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxtp.distributed.environment import LaunchError

Message = dict[str, Any]

HELLO_SECONDS = 5.0  # Time limit for a new connection to prove that it has the token
_SEND_SECONDS = 2.0
_MAX_MESSAGE_BYTES = 65536
_MAX_UNAUTHENTICATED = 64  # Maximum number of unauthenticated connections
_CHALLENGE = "challenge"
_PROOF = "proof"


def ready(
    ends: Sequence["Link | socket.socket"], seconds: float, event: int = selectors.EVENT_READ
) -> list[object]:
    """Waits up to `seconds`; returns the readable (or writable) ends."""
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, event)
        return [key.fileobj for key, _ in selector.select(seconds)]


class Link:
    """A socket that exchanges messages."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._socket.setblocking(False)
        self._buffer = b""
        self._messages: list[Message] = []
        # False once `receive` has seen that the link is closed or the data is invalid
        self.is_open = True
        self.opened = time.monotonic()
        self.challenge = secrets.token_hex(16)  # random text; the other end answers with its HMAC

    def fileno(self) -> int:
        """Returns the file descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message, or drops it if the other end does not read."""
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            while data:
                if not ready([self], _SEND_SECONDS, selectors.EVENT_WRITE):
                    return
                data = data[self._socket.send(data) :]

    def receive(self, seconds: float = 0.0) -> Message | None:
        """Returns the next message; None if none arrives within `seconds`."""
        until = time.monotonic() + seconds
        while not self._messages and self.is_open:
            if not ready([self], max(0.0, until - time.monotonic())):
                break
            try:
                data = self._socket.recv(_MAX_MESSAGE_BYTES)
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                self._messages += [dict(json.loads(line)) for line in lines]
                self.is_open = bool(data) and len(self._buffer) <= _MAX_MESSAGE_BYTES
            except BlockingIOError:
                pass
            except (OSError, ValueError, TypeError, RecursionError):
                self.is_open = False
        return self._messages.pop(0) if self._messages else None

    def close(self) -> None:
        """Closes the socket."""
        self.is_open = False
        self._socket.close()


def connect(connection: socket.socket, token: str, hello: Message, seconds: float) -> Link | None:
    """Sends `hello` and returns a link to a process that runs `accept_links`.

    Returns None if the process does not prove that it has the token. An answer may take `seconds`.
    """
    link = Link(connection)
    challenge = (link.receive(seconds) or {}).get(_CHALLENGE)
    if isinstance(challenge, str):
        proof = proof_of(token, "hello", challenge, hello)
        link.send({**hello, _CHALLENGE: link.challenge, _PROOF: proof})
        answer = link.receive(seconds) or {}
        if is_proof(answer.get(_PROOF), token, "welcome", link.challenge):
            return link
    link.close()
    return None


def proof_of(token: str, *parts: object) -> str:
    """Returns what only a process with the token can compute of JSON values."""
    return hmac.digest(token.encode(), json.dumps(parts).encode(), "sha256").hex()


def is_proof(value: object, token: str, *parts: object) -> bool:
    """Returns whether `value` is the proof of these values."""
    try:
        return isinstance(value, str) and hmac.compare_digest(
            value.encode(), proof_of(token, *parts).encode()
        )
    except (ValueError, RecursionError):  # half a surrogate pair, or lists nested too deeply
        return False


@contextmanager
def listening(address: str, port: int = 0) -> Iterator[socket.socket]:
    """Yields a socket that listens at an address of this host; if empty, at all addresses."""
    is_dual_stack = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual_stack or ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, port), family=family, dualstack_ipv6=is_dual_stack)
    except OSError as error:
        reason = error.strerror
        if not isinstance(error, socket.gaierror):  # `create_server` adds the address to the text
            reason = os.strerror(error.errno or 0)
        raise LaunchError(
            f"{format_address(address or '*', port)}: this host cannot listen there ({reason})"
        ) from None
    with server:
        yield server


def format_address(host: str, port: int) -> str:
    """Returns `host:port`, with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_address(bind: str | None, host: str) -> str:
    """Returns the address at which process 0 listens; empty for all addresses of its host.

    The address is `bind`, or loopback if `host` is loopback.

    Raises:
      LaunchError: `host` is loopback, and `bind` is another address.
    """
    loopback = "127.0.0.1" if host == "localhost" else ""
    with contextlib.suppress(ValueError):
        loopback = host if ipaddress.ip_address(host).is_loopback else ""
    if bind and loopback and bind != loopback:
        raise LaunchError(
            f"launch.bind={bind}: the processes meet at {host}, on this host only; leave "
            "launch.bind out"
        )
    return bind or loopback


def accept_links(
    server: socket.socket, token: str, time_left: Callable[[], float], rejected: Counter[str]
) -> Iterator[tuple[Link, Message]]:
    """Accepts connections in parallel until no time is left.

    Yields authenticated links and their first messages.

    Args:
      token: the secret that the other ends must prove to have.
      time_left: returns the remaining seconds.
      rejected: counts connections without the token, by address.
    """
    pending: dict[Link, str] = {}

    def reject(link: Link) -> None:
        rejected[pending.pop(link)] += 1
        link.close()

    try:
        while (seconds := time_left()) > 0:
            if server in ready([server, *pending], min(1.0, seconds)):
                with contextlib.suppress(OSError):
                    connection, (address, *_) = server.accept()
                    link = Link(connection)
                    link.send({_CHALLENGE: link.challenge})
                    pending[link] = address.removeprefix("::ffff:")
            for link in list(pending):
                hello = link.receive()
                is_late = time.monotonic() - link.opened > HELLO_SECONDS
                if hello is None and link.is_open and not is_late:
                    continue
                hello = hello or {}
                challenge = hello.pop(_CHALLENGE, None)
                proof = hello.pop(_PROOF, None)
                if is_proof(proof, token, "hello", link.challenge, hello):
                    del pending[link]
                    link.send({_PROOF: proof_of(token, "welcome", challenge)})
                    yield link, hello
                else:
                    reject(link)
            for link in list(pending)[:-_MAX_UNAUTHENTICATED]:
                reject(link)
    finally:
        for link in pending:
            link.close()
