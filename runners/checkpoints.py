"""The broker's operations on checkpoints as one table, their limits, and what is on record when one is refused."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.errors import NotFound, NotRecorded, Refusal, TooMany
from interlock.event import EventType
from interlock.permit import boottime_ms
from runners.guest import Answer, Guest, Later
from runners.jobs import disk_fails
from runners.loading import Loading
from runners.room import Room
from runners.saving import Saving
from runners.vault import Vault, newest_of, read_keys

BEGINS, WINDOW_MS = 128, 10_000
REFUSED_MS = 1_000
# The guest asks again by itself for as long as these last; a record of each would fill the disk.
_PASSING = ("unavailable.keys", "too_many")


@dataclass
class _Pace:
    window_ms: int = 0
    begins: int = 0
    refused_ms: int = -REFUSED_MS
    unrecorded: int = 0


class Checkpoints:
    """Saves, loads and keys of all guests. The loop's thread calls everything here."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._loading = Loading(room)
        self._saving = Saving(room, self._loading)
        self._paces: dict[tuple[str, int], _Pace] = {}
        self._guests: dict[tuple[str, int], Guest] = {}
        self._ops: dict[str, Callable[[Guest, Mapping[str, Any]], Answer | Later]] = {
            "save_begin": self._saving.begin, "save_file": self._saving.file, "save_commit": self._saving.commit,
            "save_abort": self._saving.abort, "load_begin": self._loading.begin, "load_file": self._loading.file,
        }
        room.store.sweep()  # no attempt lives yet

    @property
    def vault(self) -> Vault:
        """Return the keys of live attempts."""
        return self._room.vault

    def knows(self, op: object) -> bool:
        """Return whether `op` is one of these operations."""
        return op in self._ops

    def answer(self, guest: Guest, request: Mapping[str, Any]) -> Answer | Later:
        """Carry out one operation; whoever asked has passed the leash. Raises the refusal, which is on record."""
        op = str(request.get("op"))
        try:
            if op not in self._ops:
                raise NotFound("the broker has no such operation", code="op")
            if op.endswith("_begin"):
                self._throttle(guest)
            return self._ops[op](guest, request)
        except OSError as error:
            refusal: Refusal = disk_fails(error)
        except Refusal as found:
            refusal = found
        self.refused(guest, op, refusal)
        raise refusal

    def refused(self, guest: Guest, op: str, refusal: Refusal) -> None:
        """Put a refusal on record, at most one a second for a guest; `count` says how many it stands for."""
        if refusal.code.startswith(_PASSING):
            return
        pace = self._pace(guest)
        pace.unrecorded += 1
        now = boottime_ms()
        if now - pace.refused_ms < REFUSED_MS:
            return
        try:
            self._room.record(EventType.CHECKPOINT_REFUSED, guest, {
                "op": op, "code": refusal.code, "count": pace.unrecorded,
            })
        except NotRecorded:
            return  # it stays a refusal
        pace.refused_ms, pace.unrecorded = now, 0

    def look(self) -> None:
        """Drop saves that take more of the disk than they may. Called twice a second."""
        try:
            found = self._saving.look()
        except OSError as error:  # a disk that fails must not end the broker; it is looked at again
            sys.stderr.write(json.dumps({"error": disk_fails(error).as_json()}) + "\n")
            return
        for owner, refusal in found:
            if owner in self._guests:
                self.refused(self._guests[owner], "save_file", refusal)

    def take_keys(self, guest: Guest, request: Mapping[str, Any]) -> None:
        """Keep the keys that the launcher hands over for an open attempt; raises Malformed, never with a key."""
        run_key, files = read_keys(request)
        self._loading.expect(guest, newest_of(request))
        self.vault.put(guest.run, guest.attempt, run_key, files)

    def opened(self, guest: Guest) -> None:
        """Remove what earlier attempts of this run left in staging."""
        self._guests[guest.run, guest.attempt] = guest
        self._room.store.sweep(guest.run)

    def forget(self, guest: Guest) -> None:
        """Drop keys, open saves and loads of an attempt that is over."""
        self.vault.forget(guest.run, guest.attempt)
        self._saving.forget(guest)
        self._loading.forget(guest)
        self._paces.pop((guest.run, guest.attempt), None)
        self._guests.pop((guest.run, guest.attempt), None)

    def _pace(self, guest: Guest) -> _Pace:
        return self._paces.setdefault((guest.run, guest.attempt), _Pace())

    def _throttle(self, guest: Guest) -> None:
        pace, now = self._pace(guest), boottime_ms()
        if now - pace.window_ms >= WINDOW_MS:
            pace.window_ms, pace.begins = now, 0
        pace.begins += 1
        if pace.begins > BEGINS:
            raise TooMany(f"more than {BEGINS} saves and loads begun in 10 s", code="checkpoints",
                          next_step="wait", details={"retry_after_s": WINDOW_MS // 1_000})
