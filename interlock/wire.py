"""Guest end of the broker's unix socket: one request, one reply, a deadline. Format: docs/formats/wire.md.

Standard library only. A datagram is one JSON object of the canonical subset (integers, no floats), at most
`LIMIT` bytes; SOCK_SEQPACKET keeps the boundaries, so nothing is framed and nothing can be glued together.
"""

import array
import json
import os
import socket
from contextlib import suppress
from typing import Any

from interlock.errors import Malformed, Refusal, Unavailable, from_json

LIMIT = 16 * 1024
SOCKET = "/run/interlock/broker.sock"
SOCKET_ENV = "INTERLOCK_SOCKET"
DEADLINE_S = 5.0


def socket_path() -> str:
    """Return where the broker's socket is bound in this run; the launcher may name another place."""
    return os.environ.get(SOCKET_ENV) or SOCKET


def encode(value: dict[str, Any]) -> bytes:
    """Return the bytes of one datagram; raises Malformed when it is over `LIMIT` or holds a float."""
    try:
        data = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError):
        raise Malformed("a message holds something that is not JSON", code="wire") from None
    if len(data) > LIMIT:
        raise Malformed(f"a message is larger than {LIMIT} bytes", code="wire")
    return data


def _whole_numbers_only(_: str) -> Any:
    raise Malformed("a message holds a number that is not an integer", code="wire")


def decode(data: bytes) -> dict[str, Any]:
    """Parse one datagram; raises Malformed when it is no JSON object or holds a float."""
    if len(data) > LIMIT:
        raise Malformed(f"a message is larger than {LIMIT} bytes", code="wire")
    try:
        value = json.loads(data, parse_float=_whole_numbers_only, parse_constant=_whole_numbers_only)
    except (ValueError, RecursionError):
        raise Malformed("a message is not JSON", code="wire") from None
    if not isinstance(value, dict):
        raise Malformed("a message is not an object", code="wire")
    return value


def ask(op: str, *, path: str | None = None, deadline_s: float = DEADLINE_S, **fields: Any) -> dict[str, Any]:
    """Send one request and return the reply's fields.

    Args: `op` what to do; `path` the socket (default: this run's); `deadline_s` seconds for the whole
    exchange. Raises the typed refusal of the broker, or Unavailable (``unavailable.broker``) when it does
    not answer in time.
    """
    data, _ = _exchange(encode({"op": op, **fields}), path, deadline_s)
    return _reply(decode(data))


def ask_with_file(
    op: str, *, path: str | None = None, deadline_s: float = DEADLINE_S, **fields: Any
) -> tuple[dict[str, Any], int]:
    """Like `ask`, for a reply that brings one open file; returns (fields, descriptor), which the caller closes.

    Raises what `ask` raises, and Malformed when the reply brings no file or several.
    """
    data, fds = _exchange(encode({"op": op, **fields}), path, deadline_s, files=1)
    try:
        reply = _reply(decode(data))
        if len(fds) != 1:
            raise Malformed("the reply brings no open file", code="wire")
        return reply, fds.pop()
    finally:
        for fd in fds:
            os.close(fd)


def _exchange(message: bytes, path: str | None, deadline_s: float, files: int = 0) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(files * array.array("i").itemsize) if files else 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(deadline_s)
            line.connect(path or socket_path())
            with suppress(BrokenPipeError):  # turned away before we spoke: the refusal is waiting to be read
                line.sendall(message)
            data, extra, _, _ = line.recvmsg(LIMIT + 1, room, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise _away(error) from None
    fds: list[int] = []
    for level, kind, rights in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(rights[: len(rights) - len(rights) % found.itemsize])
            fds += found
    if not data:
        for fd in fds:
            os.close(fd)
        raise _away(ConnectionResetError("it hung up"))
    return data, fds


def _reply(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("ok") is True:
        return {k: v for k, v in value.items() if k != "ok"}
    error = value.get("error")
    raise from_json(error if isinstance(error, dict) else {}) from None


def _away(error: OSError) -> Refusal:
    return Unavailable(
        f"the broker of this run does not answer: {error}", code="broker",
        next_step="start the run with guest=true, on a node whose broker is up",
    )
