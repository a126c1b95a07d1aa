"""Sockets between the processes of a run: messages, and process 0 that gathers the others.

Whoever else connects, such as a scanner of ports, is left alone: it is heard for a moment, beside the others. Messages
are lines of JSON: `multiprocessing.connection` would wait without a limit for whoever connects to say who it is, so
that a scanner would stop a start.
"""

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxtp.launch.environment import LaunchError

Message = dict[str, Any]

HELLO_SECONDS = 5.0
"""Seconds in which one that connects has to say who it is."""
_SEND_SECONDS = 2.0
_MOST_BYTES = 65536
"""Most bytes of a message."""
_STRANGERS = 64
"""Most connections of those who have not said who they are."""
_LOOPBACK = ("localhost", "127.0.0.1")


def ready(ends: Sequence["Link | socket.socket"], seconds: float, event: int = selectors.EVENT_READ) -> list[object]:
    """Returns those ends from which something can be read (or to which it can be written), once there is one."""
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, event)
        return [key.fileobj for key, _ in selector.select(seconds)]


class Link:
    """A socket that gives and takes messages: a line of JSON each."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._socket.setblocking(False)
        self._buffer = b""
        self._waiting: list[Message] = []
        """Messages that have come and are not taken yet."""
        self.opened = time.monotonic()

    def fileno(self) -> int:
        """Returns the file descriptor, for who waits for several."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; one that the other end does not take is lost, and the next `receive` tells."""
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            while data:
                if not ready([self], _SEND_SECONDS, selectors.EVENT_WRITE):
                    return
                data = data[self._socket.send(data) :]

    def receive(self) -> list[Message] | None:
        """Returns the messages that have come, without waiting; None from an end that is closed, or talks nonsense."""
        try:
            data = self._socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            messages = [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            return None
        if not data or len(self._buffer) > _MOST_BYTES:
            return None
        messages, self._waiting = self._waiting + messages, []
        return messages

    def receive_within(self, seconds: float) -> Message | None:
        """Returns the first message that comes in some seconds; None where none comes."""
        if self._waiting:
            return self._waiting.pop(0)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not ready([self], left):
                continue
            messages = self.receive()
            if messages is None:
                return None
            if messages:
                first, *self._waiting = messages
                return first
        return None

    def is_open(self) -> bool:
        """Returns whether the other end is still there, or has left a message."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def connect(host: str, port: int, seconds: float) -> Link:
    """Returns a link to an address.

    Raises:
      OSError: nothing answers there in time.
      LaunchError: there can be no such host.
    """
    try:
        return Link(socket.create_connection((host, port), timeout=seconds))
    except UnicodeError:
        raise LaunchError(f"{host[:100]}: is no name that a host can have") from None


@contextmanager
def listening(host: str, port: int = 0) -> Iterator[socket.socket]:
    """Yields a socket that listens: on this machine alone where the host is a name for that.

    Raises:
      LaunchError: this host cannot listen on the port.
    """
    both = host not in _LOOPBACK and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    address = ("127.0.0.1" if host in _LOOPBACK else "", port)
    try:
        server = socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        raise LaunchError(f"{host}:{port}: this host cannot listen there ({os.strerror(error.errno or 0)})") from None
    with server:
        yield server


def gather(server: socket.socket, admit: Callable[[Link, Message], None], left: Callable[[], float]) -> None:
    """Hears those who connect, all at once, until the time is over.

    Args:
      server: listens.
      admit: takes a link and the first message from it; keeps the link, or leaves it alone.
      left: returns the seconds that are left; also looked at after each that is admitted.
    """
    strangers: list[Link] = []
    try:
        while (seconds := left()) > 0:
            heard = ready([server, *strangers], min(1.0, seconds))
            if server in heard:
                with contextlib.suppress(OSError):
                    strangers.append(Link(server.accept()[0]))
            for link in list(strangers):
                messages = link.receive() if link in heard else []
                if messages:
                    strangers.remove(link)
                    admit(link, messages[0])
                elif messages is None or time.monotonic() - link.opened > HELLO_SECONDS:
                    strangers.remove(link)
                    link.close()
            for link in strangers[:-_STRANGERS]:
                strangers.remove(link)
                link.close()
    finally:
        for link in strangers:
            link.close()
