"""The launcher: takes launch orders, carries each out in a thread of its own, and ends cleanly.

Joined here: the parts of a Station. No listener of its own; it asks the control plane, and it speaks to the
supervisor and the broker on this host.
"""

import fcntl
import hashlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from audit.spool import Spool
from interlock.errors import Conflict, NotFound, Refusal, Unavailable
from interlock.event import Event, EventType
from interlock.order import LaunchOrder, Result
from interlock.signed import Signed
from killswitch.client import Supervisor
from killswitch.page import StopPage
from killswitch.store import boot_id
from runners import courier, launch_order
from runners.announcer import Announcer
from runners.attempt import Attempt
from runners.broker_line import BrokerLine
from runners.code_files import CodeFiles
from runners.courier import FINAL, Courier
from runners.deadline import Watcher
from runners.entitlements import Entitlements
from runners.folders import Folders
from runners.gateway_line import GatewayLine
from runners.keeper import Chore, Keeper
from runners.kept_program import KeptProgram
from runners.pinned import Pinned
from runners.relay import Relay
from runners.reporting import Reporter
from runners.shipping import Shipper
from runners.station import Station
from runners.survey import Survey
from runners.upstream import Upstream
from sandbox import layers, uids, work
from sandbox.profile import Environment

SUPERVISOR_S = 5.0
POLL_S = 10
END_S = 15.0


@dataclass(frozen=True)
class Offer:
    """What this node is started with: data `roots`, `environments` by name, the users of broker and gateway, and the
    port of the gateway on 127.0.0.1 (None: no gateway, and no engines)."""

    roots: Sequence[Path] = ()
    environments: Mapping[str, Environment] = field(default_factory=dict)
    broker_user: str = "interlock-broker"
    gateway_user: str = "interlock-gateway"
    gateway_port: int | None = None


class Node:
    """One node program. `start`, then `serve` until `end` from a signal handler, then `close`."""

    def __init__(self, found: Folders, offer: Offer, pool: uids.Pool) -> None:
        self.folders, self._offer = found, offer
        self._lock = _hold(found)
        self._ending = threading.Event()
        self._taken: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._couriers: list[Courier] = []
        self.upstream = Upstream(found)
        self.supervisor = Supervisor(found.socket)
        _await_supervisor(self.supervisor)
        self.spool = Spool(found.node / "spool", self.upstream.node, "launcher")
        self.used = launch_order.UsedOrders(found.node / "used-orders", boot_id())
        self.code = CodeFiles(found.node / "code")
        self.pinned = Pinned(found)
        self.survey = Survey(layers.this_host(), found, offer.roots, pool, self.spool.record, self.upstream.node,
                             environments=sorted(offer.environments), gateway=offer.gateway_port is not None)
        self.watcher = Watcher()
        spools = (found.node / "spool", found.broker_spool, found.gateway_spool)
        self.shipper = Shipper(spools, self.upstream, boot_id())
        self.relay = Relay(self.supervisor, self.upstream)
        self.entitlements = Entitlements(found, self.upstream, self.pinned.grant_keys, self.pinned.signers)
        self.broker = KeptProgram("broker", self._start_broker, self._died)
        self.gateway = KeptProgram("gateway", self._start_gateway, self._died)
        self.station = Station(
            found, self.upstream.node, self.upstream, self.supervisor, StopPage(found.page, found.stop_state),
            self.spool, self.entitlements, pool, self.survey.host, tuple(offer.roots), self.watcher, self.broker.line,
            self.survey, offer.environments, self.gateway.line,
        )
        self.keeper = Keeper([
            Chore("entitlements", 2_000, self.entitlements.refresh),
            Chore("certificate", 60_000, self.upstream.renew),
            Chore("facts", 15_000, lambda: self.upstream.facts(self.survey.as_json())),
            Chore("broker", 1_000, self.broker.keep),
            Chore("checkpoints", 500, Reporter(found, self.upstream).turn),
            *self._gateway_chores(),
        ])

    def _gateway_chores(self) -> list[Chore]:
        if self._offer.gateway_port is None:
            return []
        announcer = Announcer(self.gateway.line, self.upstream)
        return [Chore("gateway", 1_000, self.gateway.keep), Chore("engines", 500, announcer.turn)]

    def _start_broker(self) -> BrokerLine:
        return BrokerLine(self.folders, self.upstream.node, self._offer.broker_user)

    def _start_gateway(self) -> GatewayLine:
        if self._offer.gateway_port is None:
            raise Unavailable("this node has no gateway", code="gateway", next_step="start it with --gateway-port")
        return GatewayLine(self.folders, self.upstream.node, self._offer.gateway_user, self._offer.gateway_port)

    def _died(self, program: str) -> None:
        self._incident(program, {"status": "died"})

    def _incident(self, code: str, facts: dict[str, str]) -> None:
        event = Event(EventType.INCIDENT, f"node/{self.upstream.node}", facts={"code": code, **facts})
        with suppress(Refusal):
            self.spool.record(event)

    # --- start ------------------------------------------------------------------------------------------

    def start(self) -> dict[str, object]:
        """Clean up after an earlier program, probe, start the broker and the threads; return the ready line."""
        self._clean()
        self.survey.look()
        self.broker.keep()
        ready: dict[str, object] = {"ready": "runners", "node": self.upstream.node, "pid": os.getpid(),
                                    "broker_pid": self.broker.line().pid}
        ready.update(self._gateway_ready())
        for thread in (self.watcher, self.shipper, self.relay, self.keeper):
            thread.start()
        self._take_up()
        return ready

    def _gateway_ready(self) -> dict[str, object]:
        """Start the gateway, once. One that cannot serve (its port is taken) costs the engines, not the training."""
        if self._offer.gateway_port is None:
            return {}
        try:
            self.gateway.keep()
            line = self.gateway.line()
        except Refusal as refusal:  # its chore tries on
            return {"gateway_pid": 0, "gateway_error": refusal.as_json()}
        return {"gateway_pid": line.pid, "gateway_port": line.port}

    def _clean(self) -> None:
        """End what an earlier node program left running, then remove its mounts; what lives keeps its own."""
        keep = set()
        for run in self.supervisor.ask("status")["runs"]:
            if run["state"] != "gone":
                ended = self.supervisor.ask("ended", run=run["run"], attempt=run["attempt"])
                if ended["result"] != Result.CONFIRMED.value:
                    keep.add(f"{run['run']}.{run['attempt']}")
        work.remove_leftovers(self.folders.runtime, frozenset(keep))
        self.used.forget(self.folders.supervisor / "runs")

    def _take_up(self) -> None:
        """Deliver what an earlier node program did not: its runs are over, and how far that is proven."""
        for folder, run, attempt in courier.left_behind(self.folders.work):
            carrier = self._courier(folder, run, attempt)
            if not (folder / FINAL).exists():
                outcome = {"exit": None, "signal": None, "timed_out": False, "truncated_bytes": 0,
                           "result": self._proof(run, attempt), "why": "node_restarted"}
                self._incident("node_restarted", {"run": run})
                carrier.finish({"state": "ended", "outcome": outcome})

    def _proof(self, run: str, attempt: int) -> str:
        """Return the supervisor's word on an attempt of an earlier node program; no answer is no proof."""
        try:
            return str(self.supervisor.ask("ended", run=run, attempt=attempt)["result"])
        except NotFound:  # it was never admitted, or the supervisor's own sweep ended it
            return Result.CONFIRMED.value
        except Refusal:
            return Result.NOT_CONFIRMED.value

    def _courier(self, folder: Path, run: str, attempt: int) -> Courier:
        def complain(refusal: Refusal) -> None:
            self._incident("delivery", {"run": run, "refused": refusal.code})

        carrier = Courier(folder, run, attempt, self.upstream, complain)
        carrier.start()
        self._couriers.append(carrier)
        return carrier

    # --- work -------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Take launch orders until `end`."""
        poll = threading.Thread(target=self._poll, name="poll", daemon=True)
        poll.start()
        self._ending.wait()

    def end(self) -> None:
        """Ask `serve` to return; safe in a signal handler."""
        self._ending.set()

    def _poll(self) -> None:
        while not self._ending.is_set():
            try:
                taken = [self._take(signed) for signed in self.upstream.work(POLL_S)]
            except Refusal:
                self._ending.wait(1.0)
                continue
            if not any(taken):
                self._ending.wait(0.1)

    def _take(self, signed: Signed) -> bool:
        """Begin one launch order; returns whether it was new."""
        mark = hashlib.sha256(signed.payload).hexdigest()
        if mark in self._taken or self._ending.is_set():
            return False
        self._taken.add(mark)
        try:
            order = launch_order.read(signed, self.pinned.grant_keys(), self.upstream.node)
        except Refusal as refusal:
            self._incident("launch_order", {"refused": refusal.code})
            return True
        try:
            self.used.use(order)
            folder = _begin(self.folders.work, order)
        except Refusal as refusal:
            self._refuse(order, refusal)
            return True
        except OSError as error:  # nothing was begun; this thread must go on taking orders
            self._refuse(order, _no_room(error))
            return True
        thread = threading.Thread(target=self._carry_out, args=(signed, order, folder), name=order.run, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()
        return True

    def _refuse(self, order: LaunchOrder, refusal: Refusal) -> None:
        try:
            self.upstream.state(order.run, order.attempt, {"state": "refused", "error": refusal.as_json()})
        except Refusal as failure:
            self._incident("launch_order", {"run": order.run, "refused": refusal.code, "untold": failure.code})

    def _carry_out(self, signed: Signed, order: LaunchOrder, folder: Path) -> None:
        carrier = self._courier(folder, order.run, order.attempt)
        self.code.hold(order)
        try:
            Attempt(self.station, signed, order, carrier).carry_out()
        except Exception as error:  # a fault of ours must end the run, not leave it without a launcher
            traceback.print_exc()
            with suppress(Refusal):
                self.supervisor.ask("ended", run=order.run, attempt=order.attempt)
            fault = Unavailable("the launcher failed", code="launcher", next_step="see the node's standard error")
            if isinstance(error, OSError):
                fault = _no_room(error)
            carrier.finish({"state": "refused", "error": fault.as_json()})
        finally:
            self.code.release(order)
        self._couriers = [c for c in self._couriers if not c.delivered.is_set()]

    # --- end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every run, deliver what can be delivered, stop all threads and the broker."""
        self._ending.set()
        with suppress(Refusal):
            for run in self.supervisor.ask("status")["runs"]:
                if run["state"] != "gone":
                    self.supervisor.ask("ended", run=run["run"], attempt=run["attempt"])
        for thread in self._threads:
            thread.join(END_S)
        for carrier in self._couriers:
            carrier.delivered.wait(2.0)
            carrier.end()
        for part in (self.keeper, self.relay, self.watcher):
            if part.is_alive():
                part.end()
        for program in (self.gateway, self.broker):
            program.end()
        self.spool.close()
        if self.shipper.is_alive():
            self.shipper.end()
        self.upstream.close()
        os.close(self._lock)


def _begin(folder: Path, order: LaunchOrder) -> Path:
    try:
        return courier.begin(folder, order.run, order.attempt)
    except FileExistsError:
        raise Conflict("this attempt was begun before", code="attempt") from None


def _no_room(error: OSError) -> Unavailable:
    return Unavailable(
        f"the node's disk takes nothing: {error.strerror}", code="disk", next_step="make room on the node's state disk",
    )


def _hold(found: Folders) -> int:
    """Take the lock of the node folder; raises Conflict (``conflict.running``) for a second start."""
    fd = os.open(found.node / "node.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(
            "a node program runs on this state already", code="running", next_step="stop the other one first",
        ) from None
    return fd


def _await_supervisor(supervisor: Supervisor) -> None:
    """Wait for the supervisor; a node without one starts nothing. Raises Unavailable."""
    pause = threading.Event()
    for _ in range(int(SUPERVISOR_S / 0.1)):
        with suppress(Refusal):
            supervisor.ask("status")
            return
        pause.wait(0.1)
    raise Unavailable("the kill supervisor does not answer", code="supervisor",
                      next_step="start it first: python -I -m killswitch watch")


def say(line: dict[str, object]) -> None:
    """Print one JSON line on stdout, flushed."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
