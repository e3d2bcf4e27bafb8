"""The life of one attempt as the node asks for it: admit, spawned, ended; and GO (protocol.md §5).

The supervisor trusts nothing that the node says about a run: the launch order is signed, the group is ours,
the process must be in it, and GO is one byte that only this program writes (G12).
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from interlock.errors import Conflict, Denied, Halted, Malformed, Refusal, Stale, Unavailable, Untrusted
from interlock.order import LaunchOrder
from interlock.permit import boottime_ms
from interlock.signed import GRANT, Signed, verify
from interlock.tier import PROFILES
from killswitch.lease import Leash
from killswitch.page import DeadlineWriter
from killswitch.runs import Run, State
from killswitch.store import Entry
from killswitch.supervisor import Supervisor, refuse_leftovers
from killswitch.verify import RUN_UIDS, Target, uid_of
from sandbox.cgroup import Limits

_OWN_PIDS = 8  # bubblewrap, run init and the moment of starting, beside what the plan allows


def admit(sup: Supervisor, signed: Signed) -> dict[str, Any]:
    """Put a launch order on the books and make its group; the deadline counts from now (G11).

    Raises Untrusted, Halted, Stale, Conflict, Denied, Unavailable, LayerMissing; then nothing is left.
    """
    with sup.lock:
        order = _check(sup, signed)
        entry = Entry(order.run, order.attempt, order.labels, order.epoch, sup.boot_id, {})
        sup.store.register(entry)
        sup.books[entry.name] = entry
        try:
            run = _make(sup, order, entry)
        except (OSError, Refusal) as error:
            sup.books[entry.name] = sup.store.close_entry(entry, "start")
            if isinstance(error, Refusal):
                raise
            raise Unavailable(f"the group of {entry.name} cannot be made: {error.strerror}", code="group") from None
        sup.wake.set()
        return {
            "run": order.run, "attempt": order.attempt, "groups": run.entry.groups,
            "deadline_page": str(run.page.path) if run.page else "",
        }


def _check(sup: Supervisor, signed: Signed) -> LaunchOrder:
    if sup.trust is None:
        raise Unavailable("this node has not joined", code="trust", next_step="python -I -m runners join FILE")
    order = LaunchOrder.from_json(verify(signed, GRANT, sup.trust.grant_keys))
    profile = PROFILES[order.labels.tier]
    if order.labels.node != sup.node:
        raise Untrusted("this launch order is for another node", code="node")
    if order.labels.tier is not order.plan.tier:
        raise Untrusted("labels and plan of a launch order name different tiers", code="tier")
    if order.lease_ms > profile.lease_ms or order.absent_ms > profile.absent_ms:
        raise Denied("the launch order is more generous than its tier", code="lease")
    refuse_leftovers(sup)
    if not sup.store.complete:
        raise Stale("the stop state of this node is not complete", code="incomplete",
                    next_step="wait until the control plane answered a heartbeat")
    refuse_stopped(sup, order)
    if boottime_ms() - sup.heard_ms > order.lease_ms:
        raise Stale("the control plane has not answered lately", code="absent", next_step="try again when it does")
    return order


def refuse_stopped(sup: Supervisor, order: LaunchOrder) -> None:
    """Raise Halted when a stop covers the order or its permit is older than a stop or resume (floor)."""
    stop = sup.state.stopped(order.labels)
    if stop is not None:
        raise Halted(f"stopped by {stop.id}", next_step="two persons resume that stop", details={"order": stop.id})
    if order.epoch < sup.state.floor(order.labels):
        raise Halted("this permission is older than the last stop or resume", code="epoch",
                     next_step="ask for a new launch order")


def _make(sup: Supervisor, order: LaunchOrder, entry: Entry) -> Run:
    now = boottime_ms()
    group = sup.tree.create(entry.name, Limits(order.plan.pids + _OWN_PIDS, order.plan.memory_mb))
    try:
        full = Entry(entry.run, entry.attempt, entry.labels, entry.epoch, entry.boot_id, group.paths)
        sup.store.update(full)
        leash = Leash(now, order.lease_ms, order.absent_ms)
        page = DeadlineWriter(sup.runtime / "deadlines" / entry.name, leash.deadline_ms)
    except OSError:
        group.remove()
        raise
    run = Run(full, State.ADMITTED, Target(group), leash, page)
    sup.books[entry.name] = full
    sup.runs[run.name] = run
    return run


def pid_of(pidfd: int) -> int:
    """Return the pid behind a pidfd; raises Malformed when it is none or the process is gone."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:") and int(line.split()[1]) > 0:
                return int(line.split()[1])
    raise Malformed("not the pidfd of a living process", code="pidfd")


def spawned(sup: Supervisor, name: str, fds: list[int]) -> dict[str, Any]:
    """Take over run init: pidfd and the writing end of its pipe. No code of the workload has run yet.

    Raises Malformed, Conflict, Halted, Untrusted; then both descriptors are closed, so run init exits.
    """
    try:
        with sup.lock:
            return _spawned(sup, sup.run(name), fds)
    except Refusal:
        for fd in fds:
            with suppress(OSError):
                os.close(fd)
        raise


def _spawned(sup: Supervisor, run: Run, fds: list[int]) -> dict[str, Any]:
    if run.state in (State.KILLING, State.GONE):
        raise Halted(f"{run.name} was ended before it began ({run.why})", code="ended")
    if run.state is not State.ADMITTED:
        raise Conflict(f"{run.name} was spawned before", code="spawned")
    if len(fds) != 2:
        raise Malformed("spawned brings a pidfd and a pipe", code="fds")
    pid = pid_of(fds[0])
    if pid not in run.target.group.pids():
        sup.end(run, "start")
        raise Untrusted("run init is not in the group of its run", code="group")
    uid = uid_of(pid)
    run.target = Target(run.target.group, fds[0], uid if uid in RUN_UIDS else None)
    run.fds, run.pipe, run.state = [fds[0]], fds[1], State.BLOCKED
    sup.wake.set()
    return {"state": run.state.value}


def go(sup: Supervisor, run: Run) -> None:
    """Let a blocked run begin; only after a lease answered its open nonce, and the stop state is asked again."""
    if run.state is not State.BLOCKED or run.pipe is None:
        return
    if sup.state.stopped(run.entry.labels) is not None:
        return
    try:
        os.write(run.pipe, b"G")
    except OSError:
        sup.end(run, "pipe")
        return
    run.state = State.LIVE


def ended(sup: Supervisor, name: str) -> dict[str, Any]:
    """End an attempt by the same ladder and wait for the proof; raises NotFound."""
    with sup.lock:
        run = sup.run(name)
        # Who asks after a hang may be faster than our own look at the deadline: the reason stays the true one.
        late = run.leash is not None and boottime_ms() >= run.leash.deadline_ms
        sup.end(run, "lease" if late else "ended")
    result = sup.await_gone(run)
    return {"result": result.value, "why": run.why, "missing": run.missing}

