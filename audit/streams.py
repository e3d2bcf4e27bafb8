"""Streams as the ledger sees them: how far each has arrived, what its node claims, what is lost.

Rules
  1. A claim is a mark, or the opening record of the next stream of the same writer.
  2. A stream behind its claim is `pending`; without progress past the grace time it is `lost`, with a count.
  3. Records that arrive late heal a loss; the record of it stays in the log.
`closed`: 0 open, 1 closed by its last record, 2 superseded by the next stream (its writer died).
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from audit.intake import Predecessor, StreamState
from audit.leaf import GENESIS
from audit.marks import Mark


@dataclass(frozen=True)
class Gap:
    """A stream behind its claim: `claimed` and `arrived` are counts of records."""

    node: str
    stream: str
    claimed: int
    arrived: int
    state: str

    @property
    def lost(self) -> int:
        """Return how many records are missing."""
        return self.claimed - self.arrived

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {"node": self.node, "stream": self.stream, "claimed": self.claimed, "arrived": self.arrived,
                "state": self.state, "lost": self.lost}


class Streams:
    """The table of streams; every method works in the caller's transaction."""

    def __init__(self, table: Table) -> None:
        self._t = table

    def _row(self, node: str, stream: str) -> Any:
        return update(self._t).where(self._t.c.node == node, self._t.c.stream == stream)

    def lock(self, connection: Connection, node: str, stream: str) -> StreamState:
        """Hold the row of a stream until the transaction ends (made when new) and return its state."""
        held = connection.execute(self._row(node, stream).values(next_seq=self._t.c.next_seq))
        if held.rowcount == 0:
            make = sqlite_insert if connection.dialect.name == "sqlite" else postgresql_insert
            connection.execute(make(self._t).values(
                node=node, stream=stream, next_seq=0, last_hash=GENESIS, mark_seq=-1, mark_us=0, closed=0,
                state="open",
            ).on_conflict_do_nothing())
            connection.execute(self._row(node, stream).values(next_seq=self._t.c.next_seq))
        found = self._read(connection, node, stream)
        return StreamState(int(found["next_seq"]), str(found["last_hash"]), found["closed"] == 1)

    def _read(self, connection: Connection, node: str, stream: str) -> Any:
        query = select(self._t).where(self._t.c.node == node, self._t.c.stream == stream)
        return connection.execute(query).mappings().one()

    def advance(
        self, connection: Connection, node: str, stream: str, next_seq: int, last_hash: str, *, closed: bool,
        now_us: int,
    ) -> None:
        """Note that the stream has arrived up to `next_seq`; progress restarts the grace time."""
        values: dict[str, Any] = {"next_seq": next_seq, "last_hash": last_hash, "mark_us": now_us}
        if closed:
            values["closed"] = 1
        connection.execute(self._row(node, stream).values(**values))
        connection.execute(
            self._row(node, stream).where(self._t.c.mark_seq < next_seq, self._t.c.state == "lost")
            .values(state="open")
        )

    def supersede(self, connection: Connection, node: str, before: Predecessor, now_us: int) -> None:
        """Note that the writer of `before` died after next_seq records: a claim like a mark."""
        self.lock(connection, node, before.stream)
        self._raise_mark(connection, node, before.stream, before.next_seq - 1, now_us)
        connection.execute(self._row(node, before.stream).where(self._t.c.closed == 0).values(closed=2))

    def claim(self, connection: Connection, node: str, marks: list[Mark], now_us: int) -> list[str]:
        """Keep the marks of a node; return the streams whose last record differs from the one claimed."""
        off = []
        for mark in sorted(marks, key=lambda m: m.stream):
            state = self.lock(connection, node, mark.stream)
            if mark.seq == state.next_seq - 1 and mark.hash != state.last_hash:
                off.append(mark.stream)
            self._raise_mark(connection, node, mark.stream, mark.seq, now_us)
        return off

    def _raise_mark(self, connection: Connection, node: str, stream: str, seq: int, now_us: int) -> None:
        row = self._read(connection, node, stream)
        if seq <= row["mark_seq"]:
            return
        was_behind = row["mark_seq"] >= row["next_seq"]
        values = {"mark_seq": seq} if was_behind else {"mark_seq": seq, "mark_us": now_us}
        connection.execute(self._row(node, stream).values(**values))

    def behind(self, connection: Connection) -> list[Gap]:
        """Return every stream behind its claim."""
        query = select(self._t).where(self._t.c.mark_seq >= self._t.c.next_seq).order_by(self._t.c.node)
        return [_gap(row) for row in connection.execute(query).mappings()]

    def judge(self, connection: Connection, before_us: int) -> tuple[list[Gap], list[Gap]]:
        """Return all gaps, and those that became `lost` now: no progress since `before_us`."""
        t = self._t
        late = (t.c.mark_seq >= t.c.next_seq, t.c.mark_us <= before_us, t.c.state != "lost")
        fresh = set()
        for row in connection.execute(select(t).where(*late)).mappings().all():
            found = connection.execute(self._row(row["node"], row["stream"]).where(*late).values(state="lost"))
            if found.rowcount == 1:
                fresh.add((row["node"], row["stream"]))
        gaps = self.behind(connection)
        return gaps, [g for g in gaps if (g.node, g.stream) in fresh]

    def rows(self, connection: Connection) -> list[dict[str, Any]]:
        """Return every stream for an export, sorted."""
        query = select(self._t).order_by(self._t.c.node, self._t.c.stream)
        return [
            {"node": r["node"], "stream": r["stream"], "next_seq": r["next_seq"], "mark_seq": r["mark_seq"],
             "closed": r["closed"], "state": r["state"]}
            for r in connection.execute(query).mappings()
        ]


def _gap(row: Any) -> Gap:
    state = "lost" if row["state"] == "lost" else "pending"
    return Gap(row["node"], row["stream"], row["mark_seq"] + 1, row["next_seq"], state)
