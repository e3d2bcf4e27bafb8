"""The order desk: where stop orders are accepted, kept in three places, and told to every node.

Rules:
1. A stop is acknowledged after this replica's own list has it on disk; a node hears of it at once. The order
   log and the database follow; when one is away the stop stands all the same ("not anchored" is shown, the
   catch-up puts it right), and nothing else is granted meanwhile (standing.py).
2. Accepting a stop asks neither bundle, gate, approvals nor ledger. Its record follows as soon as possible.
3. The standing is read in the transaction that grants (G6), from disk and database, never from memory.
4. A database behind the order log is RECOVERING: the log is ingested again, and approvals from before are void.
5. A stop that a node gave locally comes up in its heartbeat, is checked with that node's supervisor key, kept
   like any other and countersigned, so that a resume can name it and other nodes take it (G10).
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import Connection, Engine

from control_plane.bell import Bell
from control_plane.lane import Lane
from control_plane.order_log import AcceptedList, Entry, OrderLog
from control_plane.signing import Signers, pins
from control_plane.standing import Standing, look
from control_plane.store import orders, people
from control_plane.store.db import now_us, reading, writing
from interlock.call import Call, new_id
from interlock.errors import Halted, Refusal, Stale, Unavailable, Untrusted
from interlock.event import Event, EventType
from interlock.order import Labels, Mode, Scope, ScopeKind, StopOrder
from interlock.signed import STOP, Signed, add_signature, public_from_text, sign, verify
from killswitch.state import digest_of

ANCHOR_S, STORE_S = 0.5, 0.5
RARELY_S, MAX_NOTED = 60.0, 10_000
_WORDS = {
    "order_log": "the order log does not answer",
    "recovering": "the database is behind the order log",
    "unanchored": "a stop is not in the order log yet",
}


@dataclass(frozen=True)
class Accepted:
    """An accepted stop; `anchored` when the order log has it."""

    order: StopOrder
    anchored: bool


class OrderDesk:
    """One desk a control plane. `_lock` guards the numbering and own list of stops, and nothing that may wait for
    the order log or the database; `_catching` lets one catch-up or resume at a time; `_telling` guards the feed.
    `_last` is the last good reading of the log."""

    def __init__(
        self, engine: Engine, log: OrderLog, accepted_path: Path, signers: Signers, bell: Bell,
        record: Callable[[Event], object],
    ) -> None:
        self.engine, self.log, self.bell, self._signers = engine, log, bell, signers
        self._accepted = AcceptedList(accepted_path)
        self._record = record
        self._lock, self._telling, self._catching = threading.RLock(), threading.Lock(), threading.RLock()
        self._anchor, self._store = Lane("anchor", ANCHOR_S), Lane("store", STORE_S)
        self._last: list[Entry] = []
        self._feed: list[tuple[str, Signed]] = []
        self._known: set[str] = set()
        self._stored: set[str] = set()
        self._top = 0
        self._unrecorded: list[Event] = []
        self._noted: dict[str, float] = {}

    # --- looking ----------------------------------------------------------------------------------
    def standing(self, connection: Connection) -> Standing:
        """Return what is stopped and whether grants are possible, as of this transaction. Raises Unavailable."""
        try:
            log: list[Entry] | None = self.log.entries()
            self._last = log or []
        except Unavailable:
            log = None
        bodies = [stop_of(raw) for raw in orders.stops_signed(connection)]
        return look(log, self._last, orders.known(connection), bodies, self._accepted.stops())

    def standing_now(self) -> Standing:
        """Return the standing in a transaction of its own, for pages and for the gate's first question."""
        with reading(self.engine) as connection:
            return self.standing(connection)

    def granting(self, connection: Connection) -> Standing:
        """Return the standing of a transaction that is about to grant; raises Stale or Unavailable when it may not."""
        found = self.standing(connection)
        if not found.grant_ok:
            kind = Stale if found.why == "recovering" else Unavailable
            raise kind(f"nothing is granted: {_WORDS[found.why]}", code=found.why,
                       next_step="stops are accepted; see interlock status")
        return found

    def epoch(self) -> int:
        """Return the present stop epoch (for the gate)."""
        return self.standing_now().epoch

    def stopped(self, call: Call) -> StopOrder | None:
        """Return a stop that covers this call (for the gate); raises when that cannot be told for sure."""
        with reading(self.engine) as connection:
            return self.granting(connection).stopped(labels_of(call))

    def head(self) -> str:
        """Return the order log's head; an approval of a resume is bound to it. Raises Unavailable."""
        return self.log.head()

    def active(self) -> list[StopOrder]:
        """Return the stops in force."""
        return self.standing_now().active

    def digest(self, standing: Standing) -> str:
        """Return the digest that a supervisor reports once it has applied every order we know."""
        return digest_of((s.id for s in standing.active), standing.cleared)

    # --- accepting --------------------------------------------------------------------------------
    def accept_stop(self, scope: Scope, actor: str, reason: str, mode: Mode = Mode.KILL) -> Accepted:
        """Accept a stop and tell every node. Raises Unavailable only when no place at all could keep it."""
        with self._lock:
            self._top += 1
            order = StopOrder(new_id("stop"), scope, mode, self._top, actor, reason)
            signed = sign(STOP, order.as_json(), self._signers.stop)
            kept = self._told(order, signed)
        accepted = self._keep(order, signed, kept=kept)
        self.note(Event(EventType.STOP_ACCEPTED, actor, facts={
            "order": order.id, "scope": str(scope), "mode": mode.value, "epoch": order.epoch,
            "anchored": accepted.anchored, "reason": reason}))
        return accepted

    def _told(self, order: StopOrder, signed: Signed) -> bool:
        """Own list → push; return whether the own list has it on disk. Called with the lock held."""
        kept = self._in_own_list(signed)
        self._push(order.id, order.epoch, signed)
        return kept

    def _keep(self, order: StopOrder, signed: Signed, *, kept: bool) -> Accepted:
        """Order log → database. Called without the lock: the next stop waits for neither."""
        anchored = self._in_order_log(signed)
        stored = self._in_database(anchored, signed)
        if not kept and anchored is None and not stored:
            raise Unavailable(
                "the stop went out to the nodes, but no disk here could keep it", code="stop_not_kept",
                next_step="free the disk and stop again; stop at the node: python -I -m killswitch stop",
            )
        return Accepted(order, anchored is not None)

    def _in_own_list(self, signed: Signed) -> bool:
        try:
            self._accepted.append(signed)
        except OSError:
            return False
        return True

    def _in_order_log(self, signed: Signed) -> Entry | None:
        """Append to the order log, but wait for it no longer than `ANCHOR_S`."""
        try:
            return self._anchor.do(lambda: self.log.append(signed))
        except RuntimeError:
            return None  # this process is ending; the next one anchors what its own list holds
        except (TimeoutError, Refusal):
            return None  # the catch-up anchors it; "not anchored" is shown until then

    def _in_database(self, anchored: Entry | None, signed: Signed) -> bool:
        """Put it into the database, but wait for it no longer than `STORE_S`."""
        order, accepted_us = StopOrder.from_json(signed.body()), now_us()

        def put() -> None:
            with writing(self.engine) as connection:
                orders.put_stop(connection, anchored.n if anchored else -1, order, signed, accepted_us)
            self._stored.add(order.id)

        try:
            self._store.do(put)
        except (RuntimeError, TimeoutError, Refusal):
            return False  # the next catch-up ingests it; until then nothing is granted
        return True

    def _push(self, order: str, epoch: int, signed: Signed) -> None:
        with self._telling:
            self._top = max(self._top, epoch)
            if order not in self._known:
                self._known.add(order)
                self._feed.append((order, signed))
        self.bell.ring()

    def order_resume(self, signed: Signed) -> Entry:
        """Keep and push a resume that `resume.py` has verified: order log → database → push."""
        with self._catching:
            kept = self.log.append(signed)
            if kept.resume is None:
                raise Untrusted("this is not a resume order", code="format")
            with writing(self.engine) as connection:
                orders.put_resume(connection, kept.n, kept.resume, kept.signed, now_us())
            self._push(kept.id, kept.epoch, kept.signed)
            return kept

    def next_epoch(self) -> int:
        """Return an epoch above every order known here or in the order log. Raises Unavailable."""
        with self._lock:
            return max(self._top, self.log.top_epoch()) + 1

    def ingest_local(self, node: str, signed: Signed) -> str:
        """Keep a stop that a node's supervisor gave locally (G10); return its id.

        Raises Untrusted when neither the stop key nor that node's supervisor key signed it, or when it
        reaches beyond that node.
        """
        own = self.supervisor_pins(node)
        body = verify(signed, STOP, {**self._signers.stop_pins, **own})
        order = StopOrder.from_json(body)
        ours = any(k in self._signers.stop_pins for k, _ in signed.signatures)
        if not ours and not self._reaches_only(order.scope, node):
            raise Untrusted("a local stop covers its own node or a run of it", code="scope")
        with self._lock:
            if not ours:
                signed = add_signature(signed, self._signers.stop)
            fresh = order.id not in self._known
            kept = fresh and self._told(order, signed)
        if fresh:
            self._keep(order, signed, kept=kept)
            self.note(Event(EventType.STOP_LOCAL, order.actor, facts={
                "order": order.id, "scope": str(order.scope), "node": node, "epoch": order.epoch}))
        return order.id

    def _reaches_only(self, scope: Scope, node: str) -> bool:
        if scope.kind is ScopeKind.RUN:
            return node in self.log.placed(scope.id)
        return scope == Scope(ScopeKind.NODE, node)

    # --- telling ----------------------------------------------------------------------------------
    def feed(self, after: int) -> tuple[list[tuple[int, Signed]], int]:
        """Return the orders after position `after` and the last position; a position from before a restart
        that is beyond the end starts over (orders are idempotent)."""
        with self._telling:
            start = after if 0 <= after <= len(self._feed) else 0
            return [(start + n, s) for n, (_, s) in enumerate(self._feed[start:], 1)], len(self._feed)

    def anchored_ids(self) -> set[str]:
        """Return the ids that the order log holds now. Raises Unavailable."""
        return {e.id for e in self.log.entries()}

    def signed_orders(self) -> dict[str, Signed]:
        """Return id → signed order of all that were told to nodes, oldest first."""
        with self._telling:
            return dict(self._feed)

    # --- catching up ------------------------------------------------------------------------------
    def catch_up(self) -> None:
        """Anchor what is not anchored, ingest what the database lacks, fill the feed.

        Called at start and by the ticker; raises nothing but Unavailable (order log or database away).
        """
        with self._catching:
            present = self.anchored_ids()
            for order, signed in self._accepted.orders().items():
                if order not in present:
                    self.log.append(signed)
            self._ingest()

    def _ingest(self) -> None:
        entries, stored = self.log.entries(), set(self._stored)
        self._last = entries
        with reading(self.engine) as connection:
            known = orders.known(connection)
        behind = [e for e in entries if known.get(e.id) != (e.n, e.epoch)]
        lost = [e for e in behind if e.id not in known and (e.id in stored or e.id not in self._known)]
        if behind:
            with writing(self.engine) as connection:
                for found in behind:
                    _put(connection, found)
                if lost:
                    people.put_site_fact(connection, "recovered_us", str(now_us()))
        self._stored = {e.id for e in entries}
        if lost:
            self.note(Event(EventType.RECOVERING, "control", facts={"orders": [e.id for e in lost]}))
        for found in entries:
            if found.id not in self._known:
                self._push(found.id, found.epoch, found.signed)
        with self._telling:
            self._top = max([self._top, *(e for _, e in known.values())])

    def supervisor_pins(self, node: str) -> dict[str, Ed25519PublicKey]:
        """Return the supervisor key that the order log's enrolment list pins for `node`; raises Untrusted."""
        row = next((r for r in self.log.enrolled() if r["node"] == node), None)
        if row is None:
            raise Untrusted("that node is not in the order log's list", code="node")
        return pins(public_from_text(row["supervisor_key"]))

    def note(self, event: Event) -> None:
        """Queue a record that must not delay what it is about; the ticker writes it."""
        with self._telling:
            self._unrecorded.append(event)

    def note_rarely(self, key: str, event: Event) -> None:
        """Queue a record that somebody outside can cause at will: one a minute under the same `key`."""
        now = time.monotonic()
        with self._telling:
            if len(self._noted) > MAX_NOTED:
                self._noted.clear()
            if now - self._noted.get(key, -RARELY_S) < RARELY_S:
                return
            self._noted[key] = now
        self.note(event)

    def record_late(self) -> None:
        """Write the records that wait for the ledger; what cannot be written waits on."""
        with self._telling:
            events, self._unrecorded = self._unrecorded, []
        for position, event in enumerate(events):
            try:
                self._record(event)
            except Exception:  # the ledger may be away in any way; the records wait, the stops stand
                with self._telling:
                    self._unrecorded = events[position:] + self._unrecorded
                return

    def unrecorded(self) -> int:
        """Return how many records wait for the ledger."""
        with self._telling:
            return len(self._unrecorded)

    def close(self) -> None:
        """End the threads of the order log and the database."""
        self._anchor.close()
        self._store.close()


@lru_cache(maxsize=1 << 16)
def stop_of(raw: str) -> StopOrder:
    """Return the stop of a row's signed text; the same text is parsed once."""
    return StopOrder.from_json(Signed.from_json(json.loads(raw)).body())


def _put(connection: Connection, found: Entry) -> None:
    if found.stop is not None:
        orders.put_stop(connection, found.n, found.stop, found.signed, now_us())
    elif found.resume is not None:
        orders.put_resume(connection, found.n, found.resume, found.signed, now_us())


def labels_of(call: Call) -> Labels:
    """Return the labels that a call has before it is placed on a node."""
    resource = call.resource
    model = resource.name if resource.kind == "model" else ""
    return Labels(call.subject.tenant, call.subject.id, call.subject.person or call.subject.id, call.run, "",
                  resource.tier, model, resource.ancestors)


def refuse_if_stopped(standing: Standing, labels: Labels) -> None:
    """Raise Halted when a stop covers `labels`."""
    order = standing.stopped(labels)
    if order is not None:
        raise Halted(f"stopped by {order.id} ({order.scope})", code="order",
                     next_step="two officers resume it: interlock resume", details={"order": order.id})
