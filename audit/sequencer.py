"""The one sequencer: outbox rows become leaves, complete subtrees and a signed head.

Promises
  1. Every transaction first updates the fence row WHERE epoch = mine: a paused sequencer that was overtaken
     changes nothing, whatever it still believes. A lock alone can be lost without its holder noticing.
  2. Outbox rows are taken by presence, never by watermark: a lower id may commit later.
  3. Leaves and tree nodes change in one transaction; a head is signed over committed leaves only, and only
     when it continues the last head that this signer signed.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from audit import merkle
from audit.leaf import CONTROL, chain, encode
from audit.signer import HeadSigner
from audit.stored import StoredTree, now_us
from audit.streams import Streams
from audit.tables import LedgerTables
from interlock.errors import Conflict

BATCH = 1000


class Sequencer:
    """Sequences one log; `_epoch` is 0 until it leads."""

    def __init__(self, engine: Engine, tables: LedgerTables, signer: HeadSigner, streams: Streams) -> None:
        self._engine, self._t, self._signer, self._streams = engine, tables, signer, streams
        self._tree = StoredTree(tables)
        self._epoch = 0

    def lead(self) -> int:
        """Become the sequencer: raise the epoch, so that any former one is fenced; returns it.

        Raises Conflict when the database contradicts the last signed head (``conflict.fork``).
        """
        fence = self._t.fence
        with self._engine.begin() as connection:
            raised = connection.execute(update(fence).where(fence.c.id == 1).values(epoch=fence.c.epoch + 1))
            if raised.rowcount == 0:
                self._first(connection)
            epoch = int(connection.execute(select(fence.c.epoch).where(fence.c.id == 1)).scalar_one())
            self._check_history(connection)
        self._epoch = epoch
        return epoch

    def _first(self, connection: Connection) -> None:
        try:
            connection.execute(insert(self._t.fence).values(id=1, epoch=1))
        except IntegrityError:
            raise Conflict("another sequencer started just now", code="fenced", next_step="stop one of them") from None

    def _check_history(self, connection: Connection) -> None:
        size = self._tree.size(connection)
        signed = connection.execute(select(func.max(self._t.heads.c.size))).scalar_one()
        if signed and self._signer.last() is None:
            raise Conflict("the last signed tree head is not remembered beside the key", code="last_head",
                           next_step="restore the file; it guards against a forked log")
        nodes = self._nodes(connection, size)
        self._signer.check(size, merkle.span(0, size, nodes), lambda a, b: merkle.consistency(a, b, nodes))

    def _nodes(self, connection: Connection, size: int) -> merkle.Nodes:
        """Return what the root of `size` and the proof from the last signed head need."""
        last = self._signer.last()
        asks: list[Callable[[merkle.Nodes], object]] = [partial(merkle.span, 0, size)]
        if last is not None and 0 < last.size <= size:
            asks.append(partial(merkle.consistency, last.size, size))
        return self._tree.gather(connection, *asks)

    def _hold(self, connection: Connection) -> None:
        """Hold the fence row for this transaction, first of all; raises Conflict (``conflict.fenced``)."""
        fence = self._t.fence
        held = connection.execute(
            update(fence).where(fence.c.id == 1, fence.c.epoch == self._epoch).values(epoch=self._epoch)
        )
        if held.rowcount != 1:
            raise Conflict("another sequencer has taken over", code="fenced", next_step="stop this one")

    def sequence(self) -> int:
        """Move at most 1000 outbox rows into the tree, sign the head; return how many were moved.

        Leads on the first call. Raises Conflict (``conflict.fenced``, ``conflict.fork``, ``conflict.last_head``).
        """
        if not self._epoch:
            self.lead()
        with self._engine.begin() as connection:
            self._hold(connection)
            moved = self._move(connection)
        with self._engine.begin() as connection:
            self._hold(connection)
            self._sign(connection)
        return moved

    def _move(self, connection: Connection) -> int:
        outbox = self._t.outbox
        rows = connection.execute(select(outbox).order_by(outbox.c.id).limit(BATCH)).mappings().all()
        if not rows:
            return 0
        size = self._tree.size(connection)
        leaves = self._leaves(connection, size, rows)
        if leaves:
            connection.execute(insert(self._t.leaves), leaves)
            peaks = self._tree.gather(connection, partial(merkle.span, 0, size))
            made = merkle.grow(size, [x["leaf_hash"] for x in leaves], peaks)
            if made:
                connection.execute(
                    insert(self._t.nodes), [{"level": k, "position": p, "hash": h} for (k, p), h in made.items()]
                )
        connection.execute(delete(outbox).where(outbox.c.id.in_([r["id"] for r in rows])))
        return len(rows)

    def _leaves(self, connection: Connection, size: int, rows: Sequence[RowMapping]) -> list[dict[str, Any]]:
        """Return the leaf rows; events of ours get their place in the control stream here."""
        twice = self._tree.present(connection, [r["event_id"] for r in rows])
        state = self._streams.lock(connection, CONTROL, CONTROL)
        seq, prev = state.next_seq, state.last_hash
        leaves: list[dict[str, Any]] = []
        for row in rows:
            if row["event_id"] in twice:  # a retried commit; a node's twin was refused at intake
                continue
            body = bytes(row["body"])
            if row["node"] == CONTROL:
                body = encode(CONTROL, CONTROL, seq, prev, body)
                seq, prev = seq + 1, chain(body)
            leaves.append(_projection(size + len(leaves), body, row))
        if seq != state.next_seq:
            self._streams.advance(connection, CONTROL, CONTROL, seq, prev, closed=False, now_us=now_us())
        return leaves

    def _sign(self, connection: Connection) -> None:
        size, heads = self._tree.size(connection), self._t.heads
        if connection.execute(select(heads.c.size).where(heads.c.size == size)).first() is not None:
            return
        nodes = self._nodes(connection, size)
        root = merkle.span(0, size, nodes)
        note = self._signer.sign(size, root, lambda a, b: merkle.consistency(a, b, nodes))
        connection.execute(
            insert(heads).values(size=size, root=root, note=note, signed_us=now_us(), epoch=self._epoch)
        )


def _projection(index: int, body: bytes, row: RowMapping) -> dict[str, Any]:
    leaf = json.loads(body)
    event = leaf["event"]
    return {
        "log_index": index, "event_id": row["event_id"], "body": body, "leaf_hash": merkle.leaf_hash(body),
        "received_us": row["received_us"], "type": event["type"], "actor": event["actor"],
        "tenant": event.get("tenant", ""), "run": event.get("run", ""), "node": leaf["node"],
        "stream": leaf["stream"], "seq": leaf["seq"], "occurred_us": event["occurred_us"],
    }
