"""Keys of one attempt: fetched from the control plane once the attempt lives, handed to the broker, kept nowhere here.

A thread of the launcher runs `deliver`. Until it has succeeded the broker answers ``unavailable.keys`` and the guest
waits; training goes on meanwhile.
"""

import base64
import binascii
import threading
from contextlib import suppress
from typing import Any

from interlock.errors import Malformed, NotRecorded, Refusal, Stale, Unavailable
from interlock.event import EventType
from interlock.order import LaunchOrder
from runners.station import Station

PAUSE_S = 1.0
KEY_BYTES = 32


def deliver(station: Station, order: LaunchOrder, stop: threading.Event) -> None:
    """Fetch the keys of the attempt and hand them to the broker; return when done, refused, or `stop` is set.

    Asks again every second while control plane or broker do not answer. Any other refusal is recorded, and ends it:
    the run goes on without keys. Raises nothing.
    """
    while not stop.is_set():
        try:
            run_key, files = read_keys(station.upstream.keys(order.run, order.attempt))
            station.broker().keys(order.run, order.attempt, run_key, files)
            return
        except (Unavailable, Stale, NotRecorded):
            stop.wait(PAUSE_S)
        except Refusal as refusal:
            if not stop.is_set():
                with suppress(Refusal):
                    station.record(EventType.RUN_KEY_REFUSED, order, {"code": refusal.code})
            return


def read_keys(answer: dict[str, Any]) -> tuple[bytes | None, dict[str, dict[str, bytes]]]:
    """Return run key and file keys (version → file → key) of a control plane's answer; raises Malformed."""
    files = answer.get("files")
    if not isinstance(files, dict) or not all(isinstance(f, dict) for f in files.values()):
        raise Malformed("the answer holds no file keys", code="keys")
    run_key = answer.get("run_key")
    return (
        None if run_key is None else key_of(run_key),
        {str(v): {str(name): key_of(key) for name, key in found.items()} for v, found in files.items()},
    )


def key_of(text: object) -> bytes:
    """Return the 32 bytes of a base64 key; raises Malformed (``malformed.keys``), which never shows it."""
    try:
        key = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise Malformed(f"a key is {KEY_BYTES} bytes in base64", code="keys")
    return key
