"""The leaf: the exact bytes of one record, hashed and signed as they are stored.

    {"event":{…},"node":"n1","prev":"sha256:…","seq":7,"stream":"launcher-00000003-5e1f00aa"}

Bytes are canonical (interlock/canon.py), under 64 KiB, and made once; nothing ever derives them again
from columns. `prev` is the digest of the record before in the same stream. Page: docs/formats/record.md.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from interlock.call import number, text
from interlock.canon import digest_bytes, parse
from interlock.errors import Malformed

MAX_BYTES = 65_535
GENESIS = "sha256:" + "0" * 64
CONTROL = "control"  # node and stream of the control plane itself; no certificate bears this name
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_KEY = re.compile(r"^[a-z0-9_.:/@-]{1,128}$")
_KEYS = frozenset({"event", "node", "prev", "seq", "stream"})
_EVENT_KEYS = frozenset({"v", "id", "type", "actor", "occurred_us", "tenant", "run", "call", "facts"})


@dataclass(frozen=True)
class Leaf:
    """One parsed record; `event` is interlock.event.Event as JSON."""

    node: str
    stream: str
    seq: int
    prev: str
    event: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """Return the event's facts; an absent field is an empty object."""
        found = self.event.get("facts", {})
        return found if isinstance(found, dict) else {}


def check_name(name: str, limit: int) -> str:
    """Return `name` when it may be a node or stream (`limit` characters); raises Malformed."""
    if len(name) > limit or not _NAME.match(name):
        raise Malformed(f"not a name of letters, digits, '.', '_', '-' within {limit} characters", code="name")
    return name


def encode(node: str, stream: str, seq: int, prev: str, event: bytes) -> bytes:
    """Return the leaf bytes around the canonical bytes of one event.

    `node` and `stream` have passed check_name. Raises Malformed (``malformed.too_large``).
    """
    body = b'{"event":%b,"node":"%b","prev":"%b","seq":%d,"stream":"%b"}' % (
        event, node.encode(), prev.encode(), seq, stream.encode()
    )
    if len(body) > MAX_BYTES:
        raise Malformed(
            f"a record of {len(body)} bytes is over {MAX_BYTES}", code="too_large",
            next_step="record the digest and keep the content aside",
        )
    return body


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs) or not all(map(_KEY.match, found)):
        raise ValueError
    return found


def _integer(digits: str) -> int:
    found = int(digits)
    if abs(found) >= 2**53:
        raise ValueError
    return found


def _no_float(_: str) -> Any:
    raise ValueError


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_no_float, parse_constant=_no_float
)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _parse(body: bytes) -> Any:
    """Return what interlock.canon.parse returns, in one pass; what it does not like goes there to be refused."""
    try:
        value = _DECODER.decode(body.decode())
        if body.count(b"{") + body.count(b"[") <= 16 and _ENCODER.encode(value).encode() == body:
            return value
    except (ValueError, RecursionError):
        pass
    return parse(body, limit=MAX_BYTES)


def decode(body: bytes) -> Leaf:
    """Parse leaf bytes; raises Malformed unless they are canonical and hold exactly the fields."""
    if len(body) > MAX_BYTES:
        raise Malformed(f"a record is over {MAX_BYTES} bytes", code="too_large")
    value = _parse(body)
    if not isinstance(value, dict) or set(value) != _KEYS:
        raise Malformed("a record has other fields than event, node, prev, seq, stream", code="record")
    event, prev = value["event"], text(value, "prev", limit=71)
    if not isinstance(event, dict) or not set(event) <= _EVENT_KEYS or not _DIGEST.match(prev):
        raise Malformed("the event or the previous digest of a record is odd", code="record")
    if event.get("v") != 1 or not isinstance(event.get("facts", {}), dict):
        raise Malformed("the event of a record has another version or odd facts", code="record")
    for key, limit in (("id", 64), ("type", 64), ("actor", 256)):
        text(event, key, limit=limit)
    for key in ("tenant", "run", "call"):
        if key in event:
            text(event, key, limit=64)
    number(event, "occurred_us")
    return Leaf(
        check_name(text(value, "node"), 64), check_name(text(value, "stream"), 96), number(value, "seq"), prev, event
    )


def chain(body: bytes) -> str:
    """Return the digest that the next record of the stream carries as `prev`."""
    return digest_bytes(body)
