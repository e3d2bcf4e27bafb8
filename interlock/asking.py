"""How checkpoints talk to the broker: patient where patience helps, `Stopped` where the run is over.

`interlock.wire` carries one request; here is what saving and loading add: a key that is still on its way is waited
for, a broker that is busy is asked again, and a lease that is gone ends the workload as `interlock.step` does.
"""

import base64
import binascii
import os
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from interlock import wire
from interlock.errors import Halted, Malformed, Refusal, Stopped, TooMany, Unavailable
from interlock.permit import boottime_ms
from interlock.sealed import KEY_BYTES

PATIENCE_MS: Final = 30_000
PAUSE_S: Final = 0.25
# The broker reads whole files before it answers these: seconds a gigabyte, so minutes for a large checkpoint.
LONG_S: Final = 900.0
SHORT_S: Final = 30.0
_READS_FILES: Final = frozenset({"save_commit", "load_file"})

T = TypeVar("T")


def ask(op: str, **fields: Any) -> dict[str, Any]:
    """Ask the broker and return its answer.

    Args: `op` and `fields` as in docs/formats/wire.md. Waits up to `PATIENCE_MS` for keys and for a busy broker.
    Raises Stopped when the lease is gone or a stop covers the run, else the broker's refusal.
    """
    return _patiently(lambda: wire.ask(op, deadline_s=_deadline(op), **fields))


def ask_for_file(op: str, **fields: Any) -> tuple[dict[str, Any], int, bytes]:
    """Like `ask`, for an answer with a file and its key; returns (answer, descriptor, 32-byte key).

    The caller closes the descriptor. Raises what `ask` raises, and Malformed when the key is none.
    """
    answer, fd = _patiently(lambda: wire.ask_with_file(op, deadline_s=_deadline(op), **fields))
    try:
        return answer, fd, bytes_of(answer, "key", KEY_BYTES)
    except BaseException:
        os.close(fd)
        raise


def bytes_of(answer: dict[str, Any], field: str, size: int | None = None) -> bytes:
    """Return the bytes that a field of an answer carries as base64; raises Malformed (``malformed.wire``)."""
    try:
        found = base64.b64decode(str(answer[field]).encode(), validate=True)
    except (KeyError, ValueError, binascii.Error):
        found = b""
    if not found or (size is not None and len(found) != size):
        raise Malformed(f"the broker's answer has no {field}", code="wire")
    return found


def _deadline(op: str) -> float:
    return LONG_S if op in _READS_FILES else SHORT_S


def _worth_waiting(refusal: Refusal) -> bool:
    return isinstance(refusal, TooMany) or (isinstance(refusal, Unavailable) and refusal.code == "unavailable.keys")


def _patiently(call: Callable[[], T]) -> T:
    end_ms = boottime_ms() + PATIENCE_MS
    while True:
        try:
            return call()
        except Halted as refusal:
            raise Stopped(refusal.message) from None
        except Refusal as refusal:
            if not _worth_waiting(refusal) or boottime_ms() >= end_ms:
                raise
        time.sleep(PAUSE_S)
