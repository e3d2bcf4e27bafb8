"""Client of the supervisor's socket, for the node and for `python -I -m killswitch`."""

import array
import fcntl
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlock.errors import Malformed, Unavailable, Usage, from_json
from interlock.places import SOCKET_BYTES, too_long

MAX_BYTES = 128 * 1024
MAX_ANSWER = 8 << 20  # the heartbeat's answer names every active stop: it comes in memory where it is larger
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_NEXT = "start it: python -I -m killswitch watch"


class Supervisor:
    """Asks one thing a connection; thread-safe. `timeout_s` bounds each step of the exchange."""

    def __init__(self, path: Path | str, *, timeout_s: float = 10.0) -> None:
        self.path, self.timeout_s = str(path), timeout_s
        if too_long(Path(path)):
            raise Usage(f"the socket path {path} is longer than {SOCKET_BYTES} bytes", code="path")

    def ask(self, op: str, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Send one request and return the reply without its `ok`.

        `fds` travel by SCM_RIGHTS (the caller closes its own copies). Raises the supervisor's typed refusal,
        Unavailable (``unavailable.supervisor``) when it does not answer, Malformed for an odd reply.
        """
        data = json.dumps({"op": op, **fields}).encode()
        if len(data) <= MAX_BYTES:
            return self._exchange(data, fds)
        if len(data) > MAX_ANSWER or op != "answer":
            raise Malformed("the request is larger than 128 KiB", code="size")
        memory = _in_memory(data)
        try:
            return self._exchange(json.dumps({"op": op, "memory": True}).encode(), [memory])
        finally:
            os.close(memory)

    def _exchange(self, data: bytes, fds: Sequence[int]) -> dict[str, Any]:
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(self.timeout_s)
                connection.connect(self.path)
                connection.sendmsg([data], extra)
                raw = connection.recv(MAX_BYTES * 2)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise Unavailable(f"the supervisor does not answer: {reason}", code="supervisor", next_step=_NEXT) from None
        return _unwrap(raw)


def _in_memory(data: bytes) -> int:
    """Return a descriptor of `data` that nobody can change any more; the caller closes it."""
    fd = os.memfd_create("answer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as out:
            out.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise Unavailable(f"no memory for an answer: {error.strerror}", code="memory") from None
    return fd


def _unwrap(raw: bytes) -> dict[str, Any]:
    if not raw:
        raise Unavailable("the supervisor closed the connection", code="supervisor", next_step=_NEXT)
    try:
        reply = json.loads(raw)
    except ValueError:
        raise Malformed("the supervisor's reply is not JSON") from None
    if not isinstance(reply, dict):
        raise Malformed("the supervisor's reply is not an object")
    if reply.pop("ok", False) is True:
        return reply
    error = reply.get("error")
    raise from_json(error if isinstance(error, dict) else {})
