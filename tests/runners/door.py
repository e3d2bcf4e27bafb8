"""A broker in a thread with its checkpoints, the launcher's end in our hand, a guest that asks from this process."""

import array
import base64
import ctypes
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interlock import wire
from interlock.call import Action, Call, Decision, Effect
from interlock.canon import canonical
from interlock.errors import NotRecorded
from interlock.event import Event, Written
from interlock.order import Labels, StopOrder
from interlock.permit import boottime_ms, issue
from interlock.sealed import Reader, Writer
from interlock.tier import Tier
from policy.facts import Facts
from policy.snapshot import ModelRow, Snapshot
from runners.broker import Broker, event_of
from runners.broker_gate import BrokerGate
from runners.broker_line import doorway
from runners.checkpoints import Checkpoints
from runners.guest import leash
from runners.room import Room
from runners.store import Store
from runners.vault import Vault

KEY = b"k" * 32
RUN_KEY = bytes(range(32))
UID = os.geteuid() or 60_100
_LIBC = ctypes.CDLL(None, use_errno=True)
_SETRESUID = {"x86_64": 117, "aarch64": 147}[platform.machine()]


@contextmanager
def as_uid(uid: int) -> Iterator[None]:
    """Make this thread alone another user (the raw call, not libc's, which asks all threads)."""
    before = os.geteuid()
    if uid != before and _LIBC.syscall(_SETRESUID, -1, uid, -1) != 0:
        raise OSError(ctypes.get_errno(), "setresuid")
    try:
        yield
    finally:
        if uid != before and _LIBC.syscall(_SETRESUID, -1, before, -1) != 0:
            raise OSError(ctypes.get_errno(), "setresuid")


class Stub:
    """A view that allows, until it is told otherwise."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Facts]] = []
        self.denied: set[Action] = set()
        self.age_ms = 0
        self.models: tuple[ModelRow, ...] = ()

    def decide(self, call: Call, facts: Facts) -> Decision:
        self.calls.append((call, facts))
        if call.action in self.denied:
            return Decision(Effect.DENY, "no_match", "no rule lets you")
        return Decision(Effect.ALLOW, "allowed", "allowed")

    def facts_of(self, person: str, tenant: str, **told: object) -> Facts:
        age = told.get("mfa_age_ms")
        return Facts(frozenset({"researcher"}), age if isinstance(age, int) else None, bundle_age_ms=self.age_ms,
                     own=told["own"] is True)

    def snapshot(self) -> Snapshot:
        return Snapshot("n", frozenset(), frozenset(), frozenset(), 1, 0, {}, self.models)


class Door:
    """`root` is the broker's folder; a second Door on the same one is the broker after a restart."""

    def __init__(self, short: Path) -> None:
        self.short, self.root = short, short / "broker"
        self.events: list[Event] = []
        self.stop: StopOrder | None = None
        self.over, self.epoch, self.full = False, 0, set[str]()
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(5)
        self.view, self.store, self.vault = Stub(), Store(self.root), Vault()
        stopped, over = lambda _: self.stop, lambda *_: self.over
        self._writer = self.record
        gate = BrokerGate(self.view, stopped, self.record, lambda: self.epoch)
        room = Room(self.store, self.vault, gate, leash(stopped, over),
                    lambda kind, guest, facts: self._writer(event_of(kind, guest, facts)))
        self.broker = Broker(theirs, KEY, stopped, lambda: self.epoch, over, self.record, Checkpoints(room))
        self._thread = threading.Thread(target=self.broker.serve, daemon=True)
        self._thread.start()

    def record(self, event: Event) -> Written:
        canonical(event.as_json())
        if event.type.value in self.full:
            raise NotRecorded("the disk is full", code="full")
        self.events.append(event)
        return Written(event.id, "s", len(self.events))

    def rewire(self, record: Callable[[Event], Written]) -> None:
        """Have what saves and loads record written by `record`."""
        self._writer = record

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    def kinds(self) -> list[str]:
        return [e.type.value for e in self.events if e.type.value != "gate.decided"]

    def say(self, request: dict[str, Any], *fds: int) -> dict[str, Any]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.ours.sendmsg([json.dumps(request).encode()], rights)
        return json.loads(self.ours.recv(65536))

    def open(self, run: str = "run_1", attempt: int = 1, uid: int = UID, **plan: Any) -> dict[str, Any]:
        permit = issue(call="c", action=Action.LAUNCH, resource="pool/default", run=run, epoch=self.epoch, record="r",
                       expires_ms=boottime_ms() + 5000)
        labels = Labels("lab", "ada", "ada", run, "node-1", Tier.NONE)
        folder = self.short / run
        folder.mkdir(exist_ok=True)
        full = {"checkpoints": True, "weights": [], "model": "", "serve": False, "digest": "sha256:p", **plan}
        with doorway(folder, uid) as listener:
            return self.say({
                "op": "open", "run": run, "attempt": attempt, "uid": uid, "labels": labels.as_json(), "plan": full,
                "resource": "pool/default", "permit": permit.seal(KEY), "told": {"mfa_age_ms": 1000},
            }, listener.fileno())

    def close_run(self, run: str = "run_1", attempt: int = 1) -> None:
        assert self.say({"op": "close", "run": run, "attempt": attempt}) == {"ok": True}

    def keys(
        self, run: str = "run_1", attempt: int = 1, run_key: bytes | None = RUN_KEY,
        files: Mapping[str, Mapping[str, bytes]] | None = None, newest: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        def text(key: bytes) -> str:
            return base64.b64encode(key).decode()

        given = {v: {n: text(k) for n, k in f.items()} for v, f in (files or {}).items()}
        return self.say({"op": "keys", "run": run, "attempt": attempt, "files": given,
                         "run_key": None if run_key is None else text(run_key), "newest": newest})

    def ready(self, run: str = "run_1", attempt: int = 1, **plan: Any) -> "Door":
        assert self.open(run, attempt, **plan) == {"ok": True}
        assert self.keys(run, attempt) == {"ok": True}
        return self

    # --- the guest ------------------------------------------------------------------------------------

    def ask(self, op: str, run: str = "run_1", uid: int = UID, **fields: Any) -> dict[str, Any]:
        with as_uid(uid):
            return wire.ask(op, path=str(self.short / run / "guest.sock"), **fields)

    def ask_file(self, op: str, run: str = "run_1", **fields: Any) -> tuple[dict[str, Any], int]:
        with as_uid(UID):
            return wire.ask_with_file(op, path=str(self.short / run / "guest.sock"), **fields)

    def begin(self, step: int, run: str = "run_1", kind: str = "state") -> str:
        return str(self.ask("save_begin", run, step=step, kind=kind)["save"])

    def file(self, save: str, name: str, step: int, run: str = "run_1", **items: bytes) -> None:
        """Make and fill one file properly."""
        reply, fd = self.ask_file("save_file", run, save=save, name=name)
        seal(fd, reply, step, run, **items)
        os.close(fd)

    def commit(self, save: str, run: str = "run_1", items: int = 1, **fields: Any) -> dict[str, Any]:
        return self.ask("save_commit", run, save=save, items=items, **fields)

    def save(self, step: int, run: str = "run_1", kind: str = "state", **items: bytes) -> str:
        save = self.begin(step, run, kind)
        self.file(save, "a.sealed", step, run, **(items or {"w": b"weights"}))
        return str(self.commit(save, run, len(items) or 1)["digest"])

    def read(self, load: dict[str, Any], name: str = "a.sealed", run: str = "run_1") -> bytes:
        """Return the bytes of the first item of a file of a begun load."""
        reply, fd = self.ask_file("load_file", run, load=load["load"], name=name)
        try:
            reader = Reader(fd, base64.b64decode(reply["key"]), load["run"], load["step"])
            found = bytes(reader.read(0))
            reader.close()
            return found
        finally:
            os.close(fd)

    def staged(self) -> list[str]:
        return sorted(os.listdir(self.root / "staging"))

    def close(self) -> None:
        self.ours.close()
        self._thread.join(10)
        self.broker.close()
        assert not self._thread.is_alive()


def seal(fd: int, reply: dict[str, Any], step: int, run: str = "run_1", **items: bytes) -> None:
    """Write a sealed file with the key that came with its descriptor."""
    writer = Writer(fd, base64.b64decode(reply["key"]), base64.b64decode(reply["wrapped"]), run, step, 65_536)
    for name, data in items.items():
        writer.add(name, (), data)
    writer.finish()
