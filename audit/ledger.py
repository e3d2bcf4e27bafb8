"""The ledger: outbox, intake, tree and heads on the caller's database.

Promises
  1. record() is durable when it returns; inside a caller's transaction, when that commits.
  2. Records of a node are taken whole or not at all, under the id of its certificate, in order.
  3. The leaf bytes are hashed and kept as they arrived; columns are a projection.
  4. Order is the log index; times never decide one.
Moving the outbox into the tree and signing heads: `audit/sequencer.py`.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, Engine, Select, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from audit import merkle
from audit.intake import follow, predecessor, read
from audit.leaf import CONTROL, GENESIS, chain, encode
from audit.marks import verify as verify_marks
from audit.sequencer import Sequencer
from audit.signer import HeadSigner
from audit.stored import StoredTree, answering, now_us
from audit.streams import Gap, Streams
from audit.tables import LedgerTables
from interlock.errors import Malformed, NotFound, NotRecorded, Unavailable, Untrusted
from interlock.event import Event, EventType, Written

_READ = {"interlock_read": True}  # store/db.py opens such a transaction without the write lock


@dataclass(frozen=True)
class SignedHead:
    """A tree head as it was signed; `note` is what anyone verifies, `signed_us` is for people."""

    size: int
    root: bytes
    note: str
    signed_us: int


@dataclass(frozen=True)
class Row:
    """One record of the log with its index. `body` are the hashed bytes."""

    index: int
    received_us: int
    node: str
    stream: str
    seq: int
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        """Return the event of the record."""
        found = json.loads(self.body)["event"]
        assert isinstance(found, dict)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return what the API shows."""
        return {"index": self.index, "received_us": self.received_us, "node": self.node, "stream": self.stream,
                "seq": self.seq, "event": self.event}


class Ledger:
    """The log of one origin.

    Args: `engine` and `tables` from the owner of the database; `signer` the head key; `origin` the name of
    the log, also the name of its vkey; `last_head` the file beside the key that remembers the last signed
    head (outside the database, in a folder that exists).
    """

    def __init__(
        self, engine: Engine, tables: LedgerTables, signer: Ed25519PrivateKey, origin: str, *, last_head: Path
    ) -> None:
        self._engine, self._t = engine, tables
        self.signer = HeadSigner(signer, origin, last_head)
        self.streams = Streams(tables.streams)
        self._tree = StoredTree(tables)
        self._sequencer = Sequencer(engine, tables, self.signer, self.streams)

    # --- writing -------------------------------------------------------------------------------------
    def record(self, event: Event, connection: Connection | None = None) -> Written:
        """Put `event` into the outbox; durable on return, or when the caller's `connection` commits.

        The same event twice is one record. `Written.seq` is the ticket of the outbox; the log index is known
        after sequence(), see index_of(). Raises NotRecorded or Malformed.
        """
        body = event.canonical()
        encode(CONTROL, CONTROL, 2**53, GENESIS, body)  # too large is refused now, not when it is sequenced
        row = {"event_id": event.id, "body": body, "received_us": now_us(), "node": CONTROL}
        try:
            if connection is not None:
                return self._put(connection, row)
            with self._engine.begin() as own:
                return self._put(own, row)
        except IntegrityError:
            if connection is None:
                return self._known(row)
            raise NotRecorded("an event of this id is recorded already", code="twice",
                              next_step="make a new event") from None
        except SQLAlchemyError:
            raise NotRecorded("the ledger's database did not take the record", code="database",
                              next_step="see the disk and the database server") from None

    def _put(self, connection: Connection, row: dict[str, Any]) -> Written:
        made = connection.execute(insert(self._t.outbox).values(**row)).inserted_primary_key
        assert made is not None
        return Written(row["event_id"], CONTROL, int(made[0]))

    def _known(self, row: dict[str, Any]) -> Written:
        outbox = self._t.outbox
        try:
            with self._reading() as connection:
                query = select(outbox.c.id, outbox.c.body).where(outbox.c.event_id == row["event_id"])
                found = connection.execute(query).first()
        except Unavailable as error:
            raise NotRecorded(error.message, code="database", next_step=error.next_step) from None
        if found is None or bytes(found[1]) != row["body"]:
            raise NotRecorded("another event of this id is recorded", code="twice", next_step="make a new event")
        return Written(row["event_id"], CONTROL, int(found[0]))

    def intake(self, node: str, stream: str, records: Sequence[tuple[int, bytes]]) -> int:
        """Take records of a node and return the seq that its stream goes on with; idempotent by seq.

        Args: `node` the id in the peer's CERTIFICATE, `records` (seq, leaf bytes). All or none is taken.
        Raises Untrusted and Malformed (both leave an incident), Conflict (``conflict.gap``), Unavailable.
        """
        try:
            with answering():
                return self._take(node, stream, records)
        except (Untrusted, Malformed) as error:
            self.record(Event(
                EventType.INCIDENT, f"node/{node}",
                facts={"what": "records refused", "code": error.code, "count": len(records)},
            ))
            raise

    def _take(self, node: str, stream: str, records: Sequence[tuple[int, bytes]]) -> int:
        arrived = read(node, stream, records)
        try:
            with self._engine.begin() as connection:
                state = self.streams.lock(connection, node, stream)
                fresh = follow(state, arrived)
                if not fresh:
                    return state.next_seq
                self._insert_arrived(connection, node, [(f.event_id, f.body) for f in fresh])
                before = predecessor(fresh[0].leaf)
                if before is not None:
                    self.streams.supersede(connection, node, before, now_us())
                last = fresh[-1]
                self.streams.advance(
                    connection, node, stream, last.leaf.seq + 1, chain(last.body),
                    closed=last.leaf.event["type"] == EventType.STREAM_CLOSED, now_us=now_us(),
                )
                return last.leaf.seq + 1
        except IntegrityError:
            raise Untrusted("a record uses the id of another event", code="event_id") from None

    def _insert_arrived(self, connection: Connection, node: str, rows: list[tuple[str, bytes]]) -> None:
        """Insert first, look into the leaves after: a concurrent twin is then either met or seen."""
        now = now_us()
        connection.execute(
            insert(self._t.outbox),
            [{"event_id": i, "body": body, "received_us": now, "node": node} for i, body in rows],
        )
        if self._tree.present(connection, [i for i, _ in rows]):
            raise Untrusted("a record uses the id of another event", code="event_id")

    def mark(self, node: str, key: object, body: bytes, signature: bytes) -> None:
        """Note what `node` claims to have recorded; `key` is the public key of its certificate.

        Raises Untrusted (not signed by it, or another record at that seq: an incident), Malformed.
        """
        with answering(), self._engine.begin() as connection:
            off = self.streams.claim(connection, node, verify_marks(key, body, signature), now_us())
        for stream in off:
            self.record(Event(EventType.INCIDENT, f"node/{node}",
                              facts={"what": "mark differs from the record", "stream": stream}))
        if off:
            raise Untrusted("a mark names another record than the one that arrived", code="marks")

    def watch_streams(self, *, grace_us: int = 60_000_000) -> list[Gap]:
        """Return the streams that are behind their claim; one without progress for `grace_us` is `lost`.

        A loss is recorded (stream.lost) once, with its count.
        """
        now = now_us()
        with answering(), self._engine.begin() as connection:
            gaps, fresh = self.streams.judge(connection, now - grace_us)
            for gap in fresh:
                self.record(Event(EventType.STREAM_LOST, f"node/{gap.node}", facts=gap.as_json()), connection)
        return gaps

    def lead(self) -> int:
        """Become the sequencer and fence any former one; returns the epoch. Raises Conflict, Unavailable."""
        with answering():
            return self._sequencer.lead()

    def sequence(self) -> int:
        """Move at most 1000 outbox rows into the tree, sign the head; return how many were moved.

        Leads on the first call. Raises Conflict (``conflict.fenced``, ``conflict.fork``) or Unavailable; a
        conflict never goes away by trying again.
        """
        with answering():
            return self._sequencer.sequence()

    # --- reading -------------------------------------------------------------------------------------
    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with answering(), self._engine.connect() as plain:
            connection = plain.execution_options(**_READ)
            with connection.begin():
                yield connection

    @property
    def origin(self) -> str:
        """Return the name of the log."""
        return self.signer.origin

    def vkey(self) -> str:
        """Return the verification key line that people pin."""
        return self.signer.public.vkey()

    def head(self) -> SignedHead:
        """Return the newest signed head; raises NotFound before the first."""
        heads = self._t.heads
        with self._reading() as connection:
            row = connection.execute(select(heads).order_by(heads.c.size.desc()).limit(1)).mappings().first()
        if row is None:
            raise NotFound("no tree head is signed yet", code="head", next_step="wait for the sequencer")
        return SignedHead(row["size"], bytes(row["root"]), row["note"], row["signed_us"])

    def index_of(self, event_id: str) -> int | None:
        """Return the log index of an event, None while it waits for the sequencer."""
        leaves = self._t.leaves
        with self._reading() as connection:
            found = connection.execute(select(leaves.c.log_index).where(leaves.c.event_id == event_id))
            return found.scalar_one_or_none()

    def proof(self, index: int, size: int | None = None) -> list[bytes]:
        """Return the inclusion proof of `index` in the tree of `size` (None: that of the newest head).

        Raises Malformed (not in that tree) or NotFound (the log is shorter).
        """
        return self.proofs([index], size)[0]

    def proofs(self, indexes: Sequence[int], size: int | None = None) -> list[list[bytes]]:
        """Return an inclusion proof for each of `indexes`, as proof() does."""
        size = self._within(size)
        with self._reading() as connection:
            asks = [partial(merkle.inclusion, index, size) for index in indexes]
            nodes = self._tree.gather(connection, *asks)
            return [ask(nodes) for ask in asks]

    def consistency(self, old: int, new: int | None = None) -> list[bytes]:
        """Return the proof that the log of `old` records is a prefix of that of `new`; raises like proof()."""
        new = self._within(new)
        with self._reading() as connection:
            ask = partial(merkle.consistency, old, new)
            return ask(self._tree.gather(connection, ask))

    def _within(self, size: int | None) -> int:
        signed = self.head().size
        if size is not None and size > signed:
            raise NotFound(f"the signed log has {signed} records", code="size")
        return signed if size is None else size

    def rows(self, *, after: int = -1, limit: int = 100, below: int | None = None, **filters: str) -> list[Row]:
        """Return at most `limit` records with an index above `after` (and under `below`), in log order.

        `filters`: type, actor, tenant, run, node, stream, event_id. Raises Malformed on another.
        """
        leaves = self._t.leaves
        query = select(leaves).where(leaves.c.log_index > after).order_by(leaves.c.log_index).limit(limit)
        if below is not None:
            query = query.where(leaves.c.log_index < below)
        return self._found(query, filters)

    def newest(self, *, limit: int = 100, **filters: str) -> list[Row]:
        """Return the newest `limit` records, in log order. `filters` as of `rows`. Raises Malformed."""
        leaves = self._t.leaves
        return self._found(select(leaves).order_by(leaves.c.log_index.desc()).limit(limit), filters)[::-1]

    def _found(self, query: Select[Any], filters: dict[str, str]) -> list[Row]:
        leaves = self._t.leaves
        for name, value in filters.items():
            if name not in ("type", "actor", "tenant", "run", "node", "stream", "event_id"):
                raise Malformed(f"records are not filtered by {name}", code="filter")
            query = query.where(leaves.c[name] == value)
        with self._reading() as connection:
            found = connection.execute(query).mappings().all()
        return [
            Row(r["log_index"], r["received_us"], r["node"], r["stream"], r["seq"], bytes(r["body"])) for r in found
        ]

    def stream_rows(self) -> list[dict[str, Any]]:
        """Return every stream with its claim and state, for an export."""
        with self._reading() as connection:
            return self.streams.rows(connection)

    def gaps(self) -> list[Gap]:
        """Return the streams that are behind their claim, judged at the last watch_streams()."""
        with self._reading() as connection:
            return self.streams.behind(connection)
