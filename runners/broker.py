"""The broker: a process of its own uid that speaks to workloads, one socket a run. No key of a person, no
root, no network.

`python -I -m runners broker`, started by `runners serve` through sandbox/drop.py. It learns of a run by the
control socket that it inherited from the launcher: a permit sealed under the permit key (which came through
an inherited pipe) and the run's listening socket as a descriptor. Ops of the guest: docs/formats/wire.md.
When the launcher goes, the control socket ends and so does the broker.
"""

import array
import json
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from audit.spool import Spool
from interlock import wire
from interlock.call import Action, number, text
from interlock.errors import Conflict, Malformed, Refusal, TooMany, Untrusted
from interlock.event import Event, EventType
from interlock.order import Labels, StopOrder
from interlock.permit import boottime_ms, unseal
from killswitch.page import StopPage
from runners import deadline
from runners.folders import folders
from runners.guest import Guest, answer, check_leash, check_peer

CONNECTIONS = 32
CONNECTION_MS = 2_000
CONTROL_LIMIT = 64 * 1024


@dataclass
class Line:
    """One accepted connection of a run that has not asked yet."""

    guest: Guest
    socket: socket.socket
    until_ms: int


class Broker:
    """One thread, one selector: no run can hold up another longer than one fsync."""

    def __init__(
        self, control: socket.socket, key: bytes, stopped: Callable[[Labels], StopOrder | None],
        epoch: Callable[[], int], lease_over: Callable[[str, int], bool], record: Callable[[Event], Any],
    ) -> None:
        self._control, self._key = control, key
        self._stopped, self._epoch, self._lease_over, self._record = stopped, epoch, lease_over, record
        self._guests: dict[tuple[str, int], tuple[Guest, socket.socket]] = {}
        self._lines: dict[int, Line] = {}
        self._incident_ms = -1_000
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, "control")

    def serve(self) -> None:
        """Answer until the launcher's end of the control socket closes."""
        while not self._ended:
            for key, _ in self._selector.select(0.5):
                if key.data == "control":
                    if not self._controlled():
                        return
                elif isinstance(key.data, Guest):
                    self._accept(key.data)
                else:
                    self._asked(key.data)
            self._drop_slow()

    def end(self) -> None:
        """Stop serving at the next turn, half a second at most."""
        self._ended = True

    def close(self) -> None:
        """Close every socket."""
        for guest, listener in list(self._guests.values()):
            self._forget(guest, listener)
        self._selector.close()
        self._control.close()

    # --- the launcher ---------------------------------------------------------------------------------

    def _controlled(self) -> bool:
        """Handle one message of the launcher; returns False when it is gone."""
        room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        data, extra, _, _ = self._control.recvmsg(CONTROL_LIMIT, room)
        fds = _descriptors(extra)
        if not data:
            return False
        try:
            reply = self._obey(json.loads(data), fds)
        except Refusal as refusal:
            reply = {"ok": False, "error": refusal.as_json()}
        finally:
            for fd in fds:
                os.close(fd)
        self._control.send(json.dumps(reply).encode())
        return True

    def _obey(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        run, attempt = text(request, "run"), number(request, "attempt", low=1)
        if request.get("op") == "close":
            found = self._guests.get((run, attempt))
            if found is not None:
                self._forget(*found)
            return {"ok": True}
        if request.get("op") != "open" or len(fds) != 1:
            raise Malformed("the broker opens and closes runs, with one descriptor", code="wire")
        self._check_permit(request, run)
        if (run, attempt) in self._guests:
            raise Conflict("this attempt is open already", code="guest")
        guest = Guest(run, attempt, number(request, "uid", low=1), Labels.from_json(request.get("labels")))
        listener = socket.socket(fileno=os.dup(fds[0]))
        listener.setblocking(False)
        self._guests[run, attempt] = (guest, listener)
        self._selector.register(listener, selectors.EVENT_READ, guest)
        return {"ok": True}

    def _check_permit(self, request: dict[str, Any], run: str) -> None:
        permit = unseal(text(request, "permit", limit=16_384), self._key)
        if permit.action not in (Action.LAUNCH, Action.SERVE, Action.RESTART) or permit.run != run:
            raise Untrusted("the permit is for something else", code="permit")
        permit.check(permit.action, text(request, "resource"), epoch=self._epoch())

    def _forget(self, guest: Guest, listener: socket.socket) -> None:
        guest.live = False
        del self._guests[guest.run, guest.attempt]
        self._selector.unregister(listener)
        listener.close()
        for line in [x for x in self._lines.values() if x.guest is guest]:
            self._hang_up(line)

    # --- the runs -------------------------------------------------------------------------------------

    def _accept(self, guest: Guest) -> None:
        if not guest.live:
            return
        try:
            peer, _ = self._guests[guest.run, guest.attempt][1].accept()
        except OSError:
            return
        peer.setblocking(False)
        line = Line(guest, peer, boottime_ms() + CONNECTION_MS)
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            check_peer(guest, uid)
            if sum(1 for x in self._lines.values() if x.guest is guest) >= CONNECTIONS:
                raise TooMany("too many open connections of this run", code="connections")
        except Refusal as refusal:
            self._incident(guest, uid, refusal)
            _turn_away(peer, {"ok": False, "error": refusal.as_json()})
            return
        self._lines[peer.fileno()] = line
        self._selector.register(peer, selectors.EVENT_READ, line)

    def _asked(self, line: Line) -> None:
        if line.socket.fileno() not in self._lines:
            return
        try:
            data = line.socket.recv(wire.LIMIT + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            _send(line.socket, self._reply(line.guest, data))
        self._hang_up(line)

    def _reply(self, guest: Guest, data: bytes) -> dict[str, Any]:
        try:
            check_leash(self._stopped(guest.labels), self._lease_over(guest.run, guest.attempt))
            reply, facts = answer(guest, wire.decode(data), boottime_ms())
            if facts is not None:
                self._record(_event(EventType.RUN_STEP, guest, facts))
        except Refusal as refusal:
            return {"ok": False, "error": refusal.as_json()}
        return {"ok": True, **reply}

    def _incident(self, guest: Guest, uid: int, refusal: Refusal) -> None:
        """Record a stranger at a run's socket, at most once a second: he must not fill the disk."""
        now = boottime_ms()
        if refusal.code != "untrusted.peer" or now - self._incident_ms < 1_000:
            return
        self._incident_ms = now
        try:
            self._record(_event(EventType.INCIDENT, guest, {"code": refusal.code, "peer_uid": uid}))
        except Refusal as failure:
            sys.stderr.write(json.dumps({"error": failure.as_json()}) + "\n")

    def _drop_slow(self) -> None:
        now = boottime_ms()
        for line in [x for x in self._lines.values() if now >= x.until_ms]:
            self._hang_up(line)

    def _hang_up(self, line: Line) -> None:
        if self._lines.pop(line.socket.fileno(), None) is not None:
            self._selector.unregister(line.socket)
        line.socket.close()


def _event(kind: EventType, guest: Guest, facts: dict[str, Any]) -> Event:
    return Event(kind, actor=guest.labels.subject, tenant=guest.labels.tenant, run=guest.run, facts=facts)


def _send(peer: socket.socket, reply: dict[str, Any]) -> None:
    try:
        peer.send(wire.encode(reply))
    except OSError:
        pass  # it did not wait for the answer: its loss


def _turn_away(peer: socket.socket, reply: dict[str, Any]) -> None:
    """Send a refusal and hang up. What the peer had sent is read first: a close with unread data resets the
    connection, and the refusal would be lost."""
    try:
        peer.shutdown(socket.SHUT_RD)
        while peer.recv(wire.LIMIT + 1):
            pass
    except OSError:
        pass
    _send(peer, reply)
    peer.close()


def _descriptors(extra: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights = array.array("i")
            rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
            found += rights
    return found


def _read_key(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as source:
        key = source.read(33)
    if len(key) != 32:
        raise Untrusted("no permit key of 32 bytes came through the pipe", code="permit")
    return key


def _open_control(fd: int) -> socket.socket:
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    _, uid, _ = struct.unpack("3i", control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != 0:
        raise Untrusted("the control socket was not made by root", code="peer")
    if os.geteuid() == 0:
        raise Untrusted("the broker never runs as root", code="uid", next_step="start the node: it starts the broker")
    return control


def serve(state: str, runtime: str, node: str, control_fd: int, key_fd: int) -> None:
    """Serve until the launcher goes. Raises Untrusted (root, no key) or NotRecorded (no spool)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    control, key = _open_control(control_fd), _read_key(key_fd)
    found = folders(state, runtime)
    spool = Spool(found.broker_spool, node, "broker")
    page = StopPage(found.page, found.stop_state)
    broker = Broker(
        control, key, page.stopped, page.epoch,
        lambda run, attempt: deadline.passed(found.deadline(run, attempt)), spool.record,
    )
    signal.signal(signal.SIGTERM, lambda *_: broker.end())
    try:
        control.send(json.dumps({"ok": True, "pid": os.getpid()}).encode())
        broker.serve()
    finally:
        broker.close()
        spool.close()
