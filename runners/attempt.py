"""One attempt, from its launch order to the last byte of its outcome. Blocking; one thread each.

In this order, and every step can end it:
1. code files fetched and verified, entitlements asked anew
2. intent recorded, then the gate: a permit for the launch and one for each dataset
3. supervisor ADMIT: it owns the group, the deadline and the lease
4. sandbox started, blocked; the broker told; the start recorded
5. supervisor SPAWNED: it alone writes GO, we close our end of the pipe
6. output shipped while it runs; the third watcher looks at the deadline
7. supervisor ENDED: its proof of death comes before anything is collected or any uid used again
"""

import os
import select
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlock.durable import write_over
from interlock.errors import Refusal
from interlock.event import EventType
from interlock.order import LaunchOrder, Result
from interlock.signed import Signed
from runners import admission, collector, data_digest, key_delivery, launch
from runners.courier import FILES, OUTPUT, Courier
from runners.deadline import Watched
from runners.launch import Launched
from runners.outlet import Outlet
from runners.station import Station
from sandbox.cgroup import Group
from sandbox.start import Started

DRAIN_S = 5.0
LOOK_S, LINE_S = 0.05, 0.02


def _ready(*fds: int) -> list[int]:
    return select.select(fds, [], [], None)[0]


@dataclass
class Outcome:
    """How it ended. `exit` or `signal` of the command when it ended by itself; `why` the supervisor's word."""

    exit: int | None = None
    signal: int | None = None
    result: str = Result.NOT_CONFIRMED.value
    why: str = ""
    truncated_bytes: int = 0
    output_bytes: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the `outcome` of the last state report."""
        return {
            "exit": self.exit, "signal": self.signal, "timed_out": self.why == "lease",
            "truncated_bytes": self.truncated_bytes, "result": self.result, "why": self.why,
        }


class Attempt:
    """Carries out one launch order whose id was already spent."""

    def __init__(self, station: Station, signed: Signed, order: LaunchOrder, courier: Courier) -> None:
        self._station, self._signed, self._order, self._courier = station, signed, order, courier
        self._over = threading.Event()

    def carry_out(self) -> None:
        """Do all of it; a refusal is recorded and reported, never raised."""
        try:
            group, page, permits, code = self._admit()
        except Refusal as refusal:
            self._refused(refusal)
            return
        self._courier.tell({"state": "admitted"})
        try:
            launched = self._start(group, page, permits, code)
        except Refusal as refusal:
            self._ended()
            self._refused(refusal)
            return
        outcome = Outcome()
        try:
            self._accompany(launched, outcome)
        finally:  # whatever failed here: the run ends, its mounts go, its uid waits for proof
            self._over.set()
            outcome.result, outcome.why = self._ended()
            try:
                self._collect(launched, outcome)
            finally:
                self._take_away(launched, outcome.result)
        self._report(outcome)

    # --- before GO --------------------------------------------------------------------------------------

    def _admit(self) -> tuple[Group, Path, admission.Admitted, str]:
        station, order = self._station, self._order
        launch.require(station, order.plan)
        station.survey.prove(order.plan.tier, order.plan.guest, order.plan.ranks)
        code = launch.fetch_code(station, order, self._courier.folder)
        with suppress(Refusal):  # the control plane may be away; the age of what we have decides
            station.entitlements.refresh()
        plan = order.plan.digest()
        station.record(EventType.RUN_INTENT, order, {"launch": order.id, "plan": plan, "tier": order.plan.tier.value})
        permits = admission.ask(station, order)
        reply = station.supervisor.ask("admit", launch=self._signed.as_json())
        group = Group(f"{order.run}.{order.attempt}", {str(k): str(v) for k, v in reply["groups"].items()})
        return group, Path(str(reply["deadline_page"])), permits, code

    def _start(self, group: Group, page: Path, permits: admission.Admitted, code: str) -> Launched:
        """Start the sandbox and hand it to the supervisor; on a refusal nothing of it is left."""
        station, order = self._station, self._order
        launched = launch.start(permits, order, station, group, page, code)
        started = launched.started
        try:
            if launched.listener is not None:
                station.broker().open(order, permits.launch, launched.uid, launched.listener)
            if launched.engine is not None:
                station.gateway().open(order, permits.launch, launched.uid, launched.engine)
            launched.close_listeners()
            station.record(EventType.RUN_STARTED, order, {
                "profile": launched.profile.digest(), "effective": started.effective_digest, "uid": launched.uid,
                "record": permits.launch.record,
            })
            watched = Watched(page, group.thaw, os.dup(started.init_pidfd))
            station.watcher.watch(order.run, order.attempt, watched)
            fds = (started.init_pidfd, started.pipe_write_fd)
            station.supervisor.ask("spawned", fds=fds, run=order.run, attempt=order.attempt)
            started.release_pipe()
        except BaseException:
            started.kill()
            self._take_away(launched, self._ended()[0])
            raise
        return launched

    def _refused(self, refusal: Refusal) -> None:
        error = refusal.as_json()
        with suppress(Refusal):
            self._station.record(EventType.RUN_REFUSED, self._order, {"code": refusal.code, "message": refusal.message})
        self._courier.finish({"state": "refused", "error": error})

    # --- while it runs ----------------------------------------------------------------------------------

    def _accompany(self, launched: Launched, outcome: Outcome) -> None:
        """Ship output and wait until run init has exited; `outcome` takes what it said."""
        started = launched.started
        limit = self._order.plan.output_mb << 20
        outlet = Outlet(os.dup(started.output_fd), self._courier.folder / OUTPUT, limit, self._courier.grown)
        outlet.start()
        while started.init_pidfd not in (ready := _ready(started.report.fd, started.init_pidfd)):
            if started.report.fd in ready and not self._hear(started, outcome):
                time.sleep(LOOK_S)  # its report has ended, run init itself is about to
        while self._hear(started, outcome):
            continue
        started.process.wait()
        outlet.join(DRAIN_S)
        outcome.truncated_bytes, outcome.output_bytes = outlet.truncated, outlet.written

    def _hear(self, started: Started, outcome: Outcome) -> bool:
        """Take one line of run init's report; returns whether there was one."""
        line = started.report.next(LINE_S)
        if line is None:
            return False
        if "go" in line:
            self._courier.tell({"state": "live"})
            self._deliver_keys()
            self._digest_data()
        elif "exit" in line:
            outcome.exit = int(line["exit"])
        elif "signal" in line:
            outcome.signal = int(line["signal"])
        return True

    def _deliver_keys(self) -> None:
        """Fetch the keys of this attempt and hand them to the broker, for as long as that takes and it lives."""
        plan = self._order.plan
        if plan.checkpoints or plan.weights:
            asked = (self._station, self._order, self._over)
            threading.Thread(target=key_delivery.deliver, args=asked, name="keys", daemon=True).start()

    def _digest_data(self) -> None:
        """Put on record what the run was shown, by content, beside its work."""
        if self._order.plan.datasets:
            asked = (self._station, self._order, self._over)
            threading.Thread(target=data_digest.tell, args=asked, name="data", daemon=True).start()

    def _ended(self) -> tuple[str, str]:
        """Ask the supervisor for its proof; returns result and why. No answer is no proof."""
        run, attempt = self._order.run, self._order.attempt
        try:
            reply = self._station.supervisor.ask("ended", run=run, attempt=attempt)
        except Refusal as refusal:
            return Result.NOT_CONFIRMED.value, refusal.code
        return str(reply["result"]), str(reply.get("why") or "ended")

    # --- after it ---------------------------------------------------------------------------------------

    def _report(self, outcome: Outcome) -> None:
        """Record the end and leave the rest to the courier."""
        facts = {**outcome.as_json(), "output_bytes": outcome.output_bytes, "files": outcome.files,
                 "skipped": outcome.skipped}
        final: dict[str, Any] = {"state": "ended", "outcome": outcome.as_json()}
        try:
            self._station.record(EventType.RUN_ENDED, self._order, facts)
        except Refusal as refusal:
            final["error"] = refusal.as_json()
        self._courier.finish(final)

    def _collect(self, launched: Launched, outcome: Outcome) -> None:
        """Take the files of a run that ended by itself; what a stop or a lost lease ended keeps its own."""
        by_itself = outcome.exit is not None or outcome.signal is not None
        if not by_itself or outcome.why != "ended" or outcome.result != Result.CONFIRMED.value:
            return
        launched.disk.tidy(launched.profile)
        harvest = collector.collect(launched.disk.work, self._order.plan.output_mb << 20)
        outcome.skipped = [{"name": n, "why": w} for n, w in harvest.skipped]
        folder = self._courier.folder / FILES
        for file in harvest.files:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                write_over(folder / file.name, file.data, 0o600)
            except OSError as error:  # a full disk costs the file, not the report of the run
                outcome.skipped.append({"name": file.name, "why": f"the node's disk: {error.strerror}"})
                continue
            outcome.files.append({"name": file.name, "digest": file.digest, "bytes": len(file.data)})

    def _take_away(self, launched: Launched, result: str) -> None:
        """Remove socket, mounts and descriptors; the uid is used again only after proof."""
        run, attempt = self._order.run, self._order.attempt
        self._station.watcher.forget(run, attempt)
        if launched.profile.sockets:
            with suppress(Refusal):  # a broker that died took the socket along
                self._station.broker().close(run, attempt)
        if self._order.plan.serve:
            with suppress(Refusal):
                self._station.gateway().close(run, attempt)
        launched.close_listeners()
        launched.started.close()
        if launched.started.process.poll() is None:
            launched.started.process.kill()
            launched.started.process.wait()
        launched.disk.remove()
        if result == Result.CONFIRMED.value:
            self._station.pool.release(launched.uid)
