"""The heartbeat's two halves. `beats` is exactly the body of `POST /node/heartbeat`; `answer` takes its reply.

Any carrier may bring an answer: leases and snapshots are signed and bound to nonces that are ours, stops
and resumes are signed. What is off is left out and reported; it never keeps the rest from being applied,
and stops are applied first.
"""

from collections.abc import Callable
from typing import Any

from interlock.call import new_id
from interlock.canon import canonical
from interlock.errors import Malformed, Refusal, Stale, Untrusted
from interlock.order import Lease
from interlock.permit import boottime_ms
from interlock.signed import LEASE, STOP, STOPS, Signed, verify
from killswitch.admission import go
from killswitch.order import understood
from killswitch.runs import Run
from killswitch.supervisor import Supervisor
from killswitch.trust import replace

_BATCH_BYTES = 48_000
Rows = list[Any]


def beats(sup: Supervisor) -> dict[str, Any]:
    """Open a heartbeat for every attempt (earlier nonces are void from now on) and return what to send."""
    with sup.lock:
        now = boottime_ms()
        sup.nonce = (new_id("snap"), now)
        rows = []
        for run in sup.runs.values():
            if run.waits and run.leash is not None and not run.leash.refused:
                beat = run.leash.open(new_id("beat"), now)
                rows.append({"nonce": beat.nonce, "run": run.entry.run, "attempt": run.entry.attempt,
                             "epoch": run.entry.epoch})
        return {
            "boot_id": sup.boot_id, "nonce": sup.nonce[0], "digest": sup.state.digest(), "floor": sup.state.top,
            "trust_version": sup.trust.version if sup.trust else 0, "beats": rows, "orders": _upward(sup),
            "receipts": _receipts(sup),
        }


def _upward(sup: Supervisor) -> list[dict[str, Any]]:
    """Return the orders of this host that the control plane has not acknowledged (G10), oldest first."""
    waiting = (i.signed for i in sup.latched if i.local and i.signed and i.order.id not in sup.acked)
    return _batch([s.as_json() for s in waiting])


def _receipts(sup: Supervisor) -> list[dict[str, Any]]:
    ready = [e for e in sup.effects.values() if e.result is not None and not e.acked]
    active = [e for e in ready if e.order.id in sup.state.stops]
    signed = [e.receipt(sup.store.key, sup.node, sup.boot_id, sup.nonce[0]) for e in active[:64]]
    return _batch([s.as_json() for s in signed])


def _batch(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        size += len(row["payload"]) + 300
        if size > _BATCH_BYTES and found:
            break
        found.append(row)
    return found


def answer(sup: Supervisor, body: dict[str, Any], *, sent_ms: int | None = None) -> dict[str, Any]:
    """Apply the answer of a heartbeat and return counts and errors.

    `sent_ms` is given by the own link alone: the time at which the question was sent over a connection that
    proved to be the control plane.
    """
    with sup.lock:
        done: dict[str, Any] = {"orders": 0, "leases": 0, "snapshot": False, "trust": False, "errors": []}
        _each(done, [body["trust"]] if body.get("trust") else [], lambda row: _trust(sup, row, done))
        _orders(sup, _rows(body, "orders"), done)
        _each(done, [body["stops"]] if body.get("stops") else [], lambda row: _snapshot(sup, row, done))
        _each(done, _rows(body, "leases"), lambda row: _lease(sup, row, done))
        _each(done, _rows(body, "refused"), lambda row: _refused(sup, row))
        sup.acked.update(str(i) for i in _rows(body, "acked"))
        for id_ in _rows(body, "receipts_acked"):
            if str(id_) in sup.effects:
                sup.effects[str(id_)].acked = True
        if sent_ms is not None:
            sup.heard_ms = max(sup.heard_ms, sent_ms)
        return done


def take_orders(sup: Supervisor, rows: Rows) -> dict[str, Any]:
    """Apply signed orders that came by the long poll; return counts and errors."""
    with sup.lock:
        done: dict[str, Any] = {"orders": 0, "errors": []}
        _orders(sup, rows, done)
        return done


def _rows(body: dict[str, Any], field: str) -> Rows:
    found = body.get(field) or []
    return found if isinstance(found, list) else []


def _each(done: dict[str, Any], rows: Rows, apply: Callable[[Any], None]) -> None:
    for row in rows:
        try:
            apply(row)
        except Refusal as error:
            done["errors"].append(error.as_json())
        except (KeyError, TypeError, ValueError, OSError) as error:
            done["errors"].append(Malformed(f"part of an answer is off: {type(error).__name__}").as_json())


def _orders(sup: Supervisor, rows: Rows, done: dict[str, Any]) -> None:
    def apply(row: Any) -> None:
        done["orders"] += sup.take(Signed.from_json(row))[1]

    # A resume may name a stop that travels beside it, so every stop is latched before any resume is read.
    _each(done, [r for r in rows if _is_stop(r)], apply)
    _each(done, [r for r in rows if not _is_stop(r)], apply)


def _is_stop(row: Any) -> bool:
    return isinstance(row, dict) and row.get("format") == STOP


def _trust(sup: Supervisor, row: Any, done: dict[str, Any]) -> None:
    if sup.trust is None:
        raise Untrusted("the first trust list comes with the join file", code="trust")
    signed = Signed.from_json(row)
    if signed.body().get("version") == sup.trust.version:
        return
    new = replace(sup.trust, signed)
    sup.store.write("trust.json", canonical(signed.as_json()))
    sup.trust = new
    done["trust"] = True


def _snapshot(sup: Supervisor, row: Any, done: dict[str, Any]) -> None:
    """Take over all active and cleared ids (G16). It never lifts a stop; only a resume does."""
    if sup.trust is None:
        raise Untrusted("this node has not joined", code="trust")
    body = verify(Signed.from_json(row), STOPS, sup.trust.stop_keys)
    nonce, sent_ms = sup.nonce
    if not nonce or body.get("nonce") != nonce:
        raise Stale("this snapshot answers no open question", code="nonce")
    sup.nonce = ("", 0)
    epoch, cleared = body["epoch"], [str(i) for i in body["cleared"]]
    if not isinstance(epoch, int) or epoch < 0:
        raise Malformed("epoch of a snapshot is off")
    for item in body["orders"]:
        signed = Signed.from_json(item)
        if signed.format == STOP:  # the stop key vouches for the whole list, other nodes' local stops included
            sup.latch(understood(signed, signed.body(), sup.node), signed, local=False)
    if not sup.store.complete:
        sup.store.set_complete(cleared, epoch)
        sup.state.adopt(cleared, epoch)
        sup.publish()
    sup.heard_ms = max(sup.heard_ms, sent_ms)
    done["snapshot"] = True


def _lease(sup: Supervisor, row: Any, done: dict[str, Any]) -> None:
    if sup.trust is None:
        raise Untrusted("this node has not joined", code="trust")
    lease = Lease.from_json(verify(Signed.from_json(row), LEASE, sup.trust.grant_keys))
    run = sup.run(f"{lease.run}.{lease.attempt}")
    if lease.node != sup.node:
        raise Untrusted("this lease is for another node", code="node")
    _renew(sup, run, lease)
    done["leases"] += 1


def _renew(sup: Supervisor, run: Run, lease: Lease) -> None:
    if not run.waits or run.leash is None:
        raise Stale(f"{run.name} is ending; nothing revives it", code="lease")
    floor = sup.state.floor(run.entry.labels)
    if sup.state.stopped(run.entry.labels) is not None or min(lease.epoch, run.entry.epoch) < floor:
        raise Stale("this lease is older than the last stop or resume", code="epoch")
    beat_ms = run.leash.sent_ms
    deadline = run.leash.accept(lease.nonce, lease.duration_ms, boottime_ms())
    if run.page is not None:
        run.page.set(deadline)
    sup.heard_ms = max(sup.heard_ms, beat_ms)
    go(sup, run)


def _refused(sup: Supervisor, row: Any) -> None:
    """End the renewal of an attempt at once, whatever nonce the refusal names."""
    run = sup.run(f"{row['run']}.{int(row['attempt'])}")
    refuse(run)


def refuse(run: Run) -> None:
    """Take a REFUSED for one attempt."""
    if run.waits and run.leash is not None:
        run.leash.refuse()
        if run.page is not None:
            run.page.set(run.leash.deadline_ms)


def refuse_all(sup: Supervisor) -> None:
    """The control plane itself turned this node away: no attempt is renewed or bridged any more."""
    with sup.lock:
        for run in sup.runs.values():
            refuse(run)
