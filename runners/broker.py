"""The broker: a process of its own uid that speaks to workloads, one socket a run. No key of a person, no
root, no network.

The process is runners/broker_process.py. It learns of a run by the control socket that it inherited from the
launcher: a permit sealed under the permit key (which came through an inherited pipe) and the run's listening socket
as a descriptor. Ops of the guest: docs/formats/wire.md. When the launcher goes, the control socket ends and so does
the broker.
"""

import json
import os
import selectors
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from interlock import wire
from interlock.call import Action, number, text
from interlock.errors import Conflict, Halted, Malformed, NotFound, Refusal, TooMany, Untrusted
from interlock.event import Event, EventType
from interlock.order import Labels, StopOrder
from interlock.permit import boottime_ms, unseal
from runners.checkpoints import Checkpoints
from runners.guest import Answer, Guest, Later, answer, check_peer, granted_of, leash
from runners.guest_line import FOREVER_MS, Line, drop, peer_uid, refuse, send, turn_away
from runners.jobs import Done, Job, Jobs

CONNECTIONS = 32
CONNECTION_MS = 2_000
CONTROL_LIMIT = 192 * 1024
KEYS_MS = 500
STALE = "stale"  # the id of the stop that a page which nobody refreshes stands for
Mark = tuple[Line, str, Later]  # whose reply a job is: the connection, the operation, what it leaves to be ended


class Broker:
    """One thread, one selector: no run can hold up another longer than one fsync. Large files are read beside it.

    Args: `desk` for saves, loads and keys; without it there are none.
    """

    def __init__(
        self, control: socket.socket, key: bytes, stopped: Callable[[Labels], StopOrder | None],
        epoch: Callable[[], int], lease_over: Callable[[str, int], bool], record: Callable[[Event], Any],
        desk: Checkpoints | None = None,
    ) -> None:
        self._control, self._key, self._desk = control, key, desk
        self._stopped, self._epoch, self._lease_over, self._record = stopped, epoch, lease_over, record
        self._leash = leash(stopped, lease_over)
        self._guests: dict[tuple[str, int], tuple[Guest, socket.socket]] = {}
        self._lines: dict[int, Line] = {}
        self._jobs: Jobs[Mark, Answer] = Jobs()
        self._incident_ms, self._keys_ms = -1_000, 0
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, "control")
        self._selector.register(self._jobs.fd, selectors.EVENT_READ, "jobs")

    def serve(self) -> None:
        """Answer until the launcher's end of the control socket closes."""
        while not self._ended:
            for key, _ in self._selector.select(0.5):
                if key.data == "control":
                    if not self._controlled():
                        return
                elif key.data == "jobs":
                    self._finish()
                elif isinstance(key.data, Guest):
                    self._accept(key.data)
                else:
                    self._asked(key.data)
            self._drop_slow()
            self._look_around()

    def end(self) -> None:
        """Stop serving at the next turn, half a second at most."""
        self._ended = True

    def close(self) -> None:
        """Close every socket."""
        for guest, listener in list(self._guests.values()):
            self._forget(guest, listener)
        self._jobs.close()
        self._selector.close()
        self._control.close()

    # --- the launcher ---------------------------------------------------------------------------------

    def _controlled(self) -> bool:
        """Handle one message of the launcher; returns False when it is gone."""
        data, fds, _, _ = socket.recv_fds(self._control, CONTROL_LIMIT, 4, socket.MSG_CMSG_CLOEXEC)
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
        found, op = self._guests.get((run, attempt)), request.get("op")
        if op == "close":
            if found is not None:
                self._forget(*found)
        elif op == "keys" and self._desk is not None:
            if found is None:
                raise NotFound("this attempt is not open", code="guest")
            self._desk.take_keys(found[0], request)
        elif op == "open" and len(fds) == 1:
            self._open(run, attempt, request, fds[0])
        else:
            raise Malformed("the broker opens and closes runs and takes their keys", code="wire")
        return {"ok": True}

    def _open(self, run: str, attempt: int, request: dict[str, Any], fd: int) -> None:
        self._check_permit(request, run)
        if (run, attempt) in self._guests:
            raise Conflict("this attempt is open already", code="guest")
        guest = Guest(
            run, attempt, number(request, "uid", low=1), Labels.from_json(request.get("labels")),
            granted=granted_of(request, boottime_ms()),
        )
        if self._desk is not None:
            self._desk.opened(guest)
        listener = socket.socket(fileno=os.dup(fd))
        listener.setblocking(False)
        self._guests[run, attempt] = (guest, listener)
        self._selector.register(listener, selectors.EVENT_READ, guest)

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
        if self._desk is not None:
            self._desk.forget(guest)
        for line in [x for x in self._lines.values() if x.guest is guest]:
            self._hang_up(line)

    def _look_around(self) -> None:
        """Drop keys whose lease is over or which a stop covers, and saves that outgrew the disk, within half a second.

        A stop page that nobody refreshes is no stop: every operation is refused meanwhile, and the lease goes on
        running out; keys that went by a short silence of the supervisor would not come back.
        """
        now = boottime_ms()
        if self._desk is None or now < self._keys_ms:
            return
        self._keys_ms = now + KEYS_MS
        self._desk.look()
        for run, attempt in self._desk.vault.held():
            guest = self._guests[run, attempt][0]
            order = self._stopped(guest.labels)
            if self._lease_over(run, attempt) or (order is not None and order.id != STALE):
                self._desk.vault.forget(run, attempt)

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
        uid = peer_uid(peer)
        try:
            check_peer(guest, uid)
            if sum(1 for x in self._lines.values() if x.guest is guest) >= CONNECTIONS:
                raise TooMany("too many open connections of this run", code="connections")
        except Refusal as refusal:
            self._incident(guest, uid, refusal)
            turn_away(peer, refusal)
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
        if not data or not self._answered(line, data):
            self._hang_up(line)

    def _answered(self, line: Line, data: bytes) -> bool:
        """Answer one request; returns whether the answer comes later."""
        try:
            self._leash(line.guest)
            request = wire.decode(data)
            found = self._carry_out(line.guest, request)
        except Refusal as refusal:
            refuse(line.socket, refusal)
            return False
        if isinstance(found, Answer):
            send(line.socket, found)
            return False
        line.waits, line.until_ms = True, FOREVER_MS
        self._selector.unregister(line.socket)
        owner = (line.guest.run, line.guest.attempt)
        self._jobs.begin(Job(owner, (line, str(request.get("op")), found), found.work))
        return True

    def _carry_out(self, guest: Guest, request: Mapping[str, Any]) -> Answer | Later:
        if self._desk is not None and self._desk.knows(request.get("op")):
            return self._desk.answer(guest, request)
        reply, facts = answer(guest, dict(request), boottime_ms())
        if facts is not None:
            self._record(event_of(EventType.RUN_STEP, guest, facts))
        return Answer(reply)

    def _finish(self) -> None:
        """Send the replies of the jobs that have ended."""
        for done in self._jobs.done():
            self._finish_one(done)

    def _finish_one(self, done: Done[Mark, Answer]) -> None:
        line, op, later = done.mark
        later.ended()
        found, refusal = done.result, done.refusal
        if found is not None and found.fd >= 0:
            try:
                self._leash(line.guest)  # reading took its time; the descriptor goes out now or never
            except Halted as halted:
                drop(found)
                found, refusal = None, halted
        if refusal is not None and self._desk is not None:
            self._desk.refused(line.guest, op, refusal)
        if not line.open:
            if found is not None:
                drop(found)
            return
        if found is not None:
            send(line.socket, found)
        elif refusal is not None:
            refuse(line.socket, refusal)
        self._hang_up(line)

    def _incident(self, guest: Guest, uid: int, refusal: Refusal) -> None:
        """Record a stranger at a run's socket, at most once a second: he must not fill the disk."""
        now = boottime_ms()
        if refusal.code != "untrusted.peer" or now - self._incident_ms < 1_000:
            return
        self._incident_ms = now
        try:
            self._record(event_of(EventType.INCIDENT, guest, {"code": refusal.code, "peer_uid": uid}))
        except Refusal as failure:
            sys.stderr.write(json.dumps({"error": failure.as_json()}) + "\n")

    def _drop_slow(self) -> None:
        now = boottime_ms()
        for line in [x for x in self._lines.values() if now >= x.until_ms]:
            self._hang_up(line)

    def _hang_up(self, line: Line) -> None:
        if self._lines.pop(line.socket.fileno(), None) is not None and not line.waits:
            self._selector.unregister(line.socket)
        line.socket.close()


def event_of(kind: EventType, guest: Guest, facts: Mapping[str, Any]) -> Event:
    """Return the record of what a guest did."""
    labels = guest.labels
    return Event(kind, labels.subject, labels.tenant, guest.run, facts={"attempt": guest.attempt, **facts})
