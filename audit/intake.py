"""Records that arrive from a node: what is checked before any of them is taken. Pure.

Rules
  1. The node id in a body is that of the certificate it arrived under, else the whole shipment is refused.
  2. seq runs on without a gap from what is there; each record carries the digest of the one before.
  3. The first record of a stream opens it, nothing follows the one that closes it.
  4. What is there already is skipped, so that a shipment can be sent twice.
Times in a record are its writer's word: nothing here compares them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from audit.leaf import CONTROL, GENESIS, Leaf, chain, check_name, decode
from interlock.call import number, text
from interlock.errors import Conflict, Malformed, Untrusted
from interlock.event import EventType

MAX_RECORDS = 1000


@dataclass(frozen=True)
class StreamState:
    """How far a stream has arrived: the seq it goes on with and the digest of the last record."""

    next_seq: int = 0
    last_hash: str = GENESIS
    closed: bool = False


@dataclass(frozen=True)
class Arrived:
    """One checked record: its bytes and what they say."""

    body: bytes
    leaf: Leaf

    @property
    def event_id(self) -> str:
        """Return the id of the event."""
        return str(self.leaf.event["id"])


@dataclass(frozen=True)
class Predecessor:
    """What the first record of a stream says about the one before: it ends below `next_seq`."""

    stream: str
    next_seq: int
    hash: str


def read(node: str, stream: str, records: Sequence[tuple[int, bytes]]) -> list[Arrived]:
    """Check one shipment in itself and return its records.

    Args: `node` from the peer's certificate, `records` (seq, leaf bytes). Raises Untrusted
    (``untrusted.node_id``, ``untrusted.stream``, ``untrusted.chain``) or Malformed.
    """
    check_name(stream, 96)
    if node == CONTROL:
        raise Untrusted("no node is named control", code="node_id")
    if not 0 < len(records) <= MAX_RECORDS:
        raise Malformed(f"a shipment holds 1 to {MAX_RECORDS} records", code="shipment")
    arrived = [Arrived(body, decode(body)) for _, body in records]
    for i, (seq, _) in enumerate(records):
        leaf = arrived[i].leaf
        if leaf.node != node:
            raise Untrusted("a record names another node than the certificate", code="node_id",
                            next_step="this node must send only its own records")
        if leaf.stream != stream or leaf.seq != seq or seq != records[0][0] + i:
            raise Untrusted("a record is of another stream or out of order", code="stream")
        if i and leaf.prev != chain(arrived[i - 1].body):
            raise Untrusted("the chain of the stream is broken", code="chain")
    return arrived


def follow(state: StreamState, arrived: Sequence[Arrived]) -> list[Arrived]:
    """Return the records that are new after `state`; raises Conflict (``conflict.gap``) or Untrusted."""
    first = arrived[0].leaf.seq
    if first > state.next_seq:
        raise Conflict(f"the stream goes on with record {state.next_seq}", code="gap",
                       next_step="send from there", details={"next_seq": state.next_seq})
    fresh = list(arrived[state.next_seq - first :])
    if not fresh:
        return []
    if state.closed:
        raise Untrusted("a record follows the end of its stream", code="closed")
    if fresh[0].leaf.prev != state.last_hash:
        raise Untrusted("the chain of the stream is broken", code="chain")
    for item in fresh:
        _check_place(item.leaf, last=item is fresh[-1])
    return fresh


def _check_place(leaf: Leaf, *, last: bool) -> None:
    kind = leaf.event["type"]
    if (leaf.seq == 0) != (kind == EventType.STREAM_OPENED):
        raise Untrusted("the first record of a stream, and only it, opens it", code="stream")
    if kind == EventType.STREAM_CLOSED and not last:
        raise Untrusted("a record follows the end of its stream", code="closed")


def predecessor(leaf: Leaf) -> Predecessor | None:
    """Return the stream that an opening record names, if any; raises Malformed."""
    found = leaf.facts.get("predecessor")
    if leaf.seq or found is None:
        return None
    if not isinstance(found, dict):
        raise Malformed("the predecessor of a stream is odd", code="record")
    return Predecessor(
        check_name(text(found, "stream"), 96), number(found, "next_seq", low=1), text(found, "hash", limit=71)
    )
