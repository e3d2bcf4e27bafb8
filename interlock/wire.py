"""Guest end of the broker's unix socket: one request, one reply, a deadline. Format: docs/formats/wire.md.

Standard library only. A datagram is one JSON object of the canonical subset (integers, no floats), at most
`LIMIT` bytes; SOCK_SEQPACKET keeps the boundaries, so nothing is framed and nothing can be glued together.
"""

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
    message = encode({"op": op, **fields})
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(deadline_s)
            line.connect(path or socket_path())
            with suppress(BrokenPipeError):  # turned away before we spoke: the refusal is waiting to be read
                line.sendall(message)
            data = line.recv(LIMIT + 1)
    except OSError as error:
        raise _away(error) from None
    if not data:
        raise _away(ConnectionResetError("it hung up"))
    return _reply(decode(data))


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
