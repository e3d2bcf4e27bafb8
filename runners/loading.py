"""Loads of a run: its own checkpoints, and the versions that its plan names. Only what a verified manifest lists."""

import base64
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.call import Action, number, text
from interlock.errors import Denied, Malformed, NotFound, Refusal, Untrusted
from interlock.event import EventType
from interlock.manifest import FileRow, Manifest, verify, verify_digest
from interlock.sealed import unwrap_file_key
from runners.guest import Answer, Guest, Later
from runners.room import Room, require_checkpoints
from runners.store import Kept, open_kept, read_manifest
from runners.vault import missing_keys

OPEN = 256  # loads that one attempt may have begun; the oldest goes


@dataclass(frozen=True)
class Load:
    """One begun load. `version` is empty for the run's own checkpoint."""

    id: str
    manifest: Manifest
    kept: Kept
    version: str


def listing(manifest: Manifest) -> dict[str, Any]:
    """Return what a reply says of a manifest; no key, wrapped or not."""
    return {
        "run": manifest.run, "step": manifest.step, "kind": manifest.kind, "digest": manifest.digest(),
        "assets": dict(manifest.assets), "files": [{"name": f.name, "size": f.size} for f in manifest.files],
    }


class Loading:
    """Begun loads by attempt. The loop's thread calls everything but the work of `file`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._open: dict[tuple[str, int], dict[str, Load]] = {}
        self._parents: dict[tuple[str, int], str] = {}
        self._newest: dict[tuple[str, int], tuple[int, int]] = {}
        self._told: set[Kept] = set()
        self._broken: set[Kept] = set()

    def begin(self, guest: Guest, request: Mapping[str, Any]) -> Answer:
        """``load_begin``: ask the gate, find and verify the manifest, put the load on record.

        Raises Denied (``.plan``, ``.version``, the gate's), Unavailable (``.keys``), NotFound (``.checkpoint``,
        ``.version``), Untrusted, Malformed, NotRecorded.
        """
        fields = dict(request)
        version = text(fields, "version", limit=80) if fields.get("version") is not None else ""
        step = number(fields, "step") if fields.get("step") is not None else None
        if version and step is not None:
            raise Malformed("a load names a step of its own run or a version, not both", code="wire")
        load = self._version(guest, version) if version else self._own(guest, step)
        manifest = load.manifest
        self._room.record(EventType.CHECKPOINT_LOADED, guest, {
            "digest": manifest.digest(), "step": manifest.step, "kind": manifest.kind, "from": manifest.run,
            "files": len(manifest.files),
        })
        begun = self._open.setdefault((guest.run, guest.attempt), {})
        begun[load.id] = load
        if len(begun) > OPEN:
            del begun[next(iter(begun))]
        self.follow(guest, manifest.digest())
        return Answer({"load": load.id, **listing(manifest)})

    def file(self, guest: Guest, request: Mapping[str, Any]) -> Later:
        """``load_file``: one descriptor for reading and its key, once the whole file has the manifest's digest.

        Raises NotFound (``.load``, ``.file``), Unavailable (``.keys``) here; in its work Untrusted (``.digest``,
        ``.files``), OSError.
        """
        fields = dict(request)
        load = self._open.get((guest.run, guest.attempt), {}).get(text(fields, "load", limit=64))
        if load is None:
            raise NotFound("there is no such load", code="load", next_step="begin a new one")
        row = next((f for f in load.manifest.files if f.name == text(fields, "name", limit=100)), None)
        if row is None:
            raise NotFound("the manifest lists no such file", code="file")
        key = self._key(guest, load, row)
        return Later(lambda: self._proven(guest, load, row, key), lambda: None)

    def parent(self, guest: Guest, run_key: bytes) -> str | None:
        """Return the digest of what this attempt loaded or saved last, else of the run's newest checkpoint."""
        known = self._parents.get((guest.run, guest.attempt))
        if known is not None:
            return known
        found = next((m for _, m in self._sound(guest, run_key)), None)
        return None if found is None else found.digest()

    def follow(self, guest: Guest, digest: str) -> None:
        """Remember what the next save goes on from."""
        self._parents[guest.run, guest.attempt] = digest

    def expect(self, guest: Guest, newest: tuple[int, int] | None) -> None:
        """Remember step and attempt of the newest checkpoint that the control plane knows of this run."""
        if newest is not None:
            self._newest[guest.run, guest.attempt] = newest

    def forget(self, guest: Guest) -> None:
        """Drop what an attempt has begun."""
        self._newest.pop((guest.run, guest.attempt), None)
        self._open.pop((guest.run, guest.attempt), None)
        self._parents.pop((guest.run, guest.attempt), None)

    # --- own ------------------------------------------------------------------------------------------

    def _own(self, guest: Guest, step: int | None) -> Load:
        require_checkpoints(guest)
        run_key = self._room.vault.run_key(guest.run, guest.attempt)
        permit = self._room.gate.own(guest, Action.LOAD)
        self._room.gate.use(permit, Action.LOAD)
        kept, manifest = next(self._sound(guest, run_key, step), (None, None))
        if step is None:
            self._look_for_newer(guest, kept)
        if kept is not None and manifest is not None:
            return Load(secrets.token_hex(8), manifest, kept, "")
        raise NotFound("this run has no such checkpoint", code="checkpoint",
                       next_step="begin at step 0, or name a step that was committed")

    def _sound(self, guest: Guest, run_key: bytes, step: int | None = None) -> Iterator[tuple[Kept, Manifest]]:
        """Yield (kept, manifest) of the run's own checkpoints, newest first; one that is off is told and skipped."""
        for kept in self._room.store.kept(guest.run):
            if (step is not None and kept.step != step) or kept in self._broken:
                continue
            try:
                manifest = verify(read_manifest(kept.folder), run_key)
                if (manifest.run, manifest.step, manifest.attempt) != (guest.run, kept.step, kept.attempt):
                    raise Untrusted("a manifest lies in the folder of another step", code="manifest")
                for row in manifest.files:
                    os.close(open_kept(kept.folder, row.name, row.size))
            except Refusal as refusal:
                self._tell(guest, kept, refusal.code)
                continue
            except OSError:
                self._tell(guest, kept, "unavailable.disk")
                continue
            yield kept, manifest

    def _look_for_newer(self, guest: Guest, kept: Kept | None) -> None:
        """Record when the newest checkpoint here is older than one that was reported: somebody took that away."""
        step, attempt = self._newest.get((guest.run, guest.attempt), (-1, 0))
        if (step, attempt) > ((-1, 0) if kept is None else (kept.step, kept.attempt)):
            gone = Kept(step, attempt, self._room.store.committed / guest.run / f"{step}-{attempt}")
            self._tell(guest, gone, "untrusted.rollback")

    def _tell(self, guest: Guest, kept: Kept, code: str) -> None:
        """Record once that a committed checkpoint is broken."""
        if kept in self._told:
            return
        self._room.record(EventType.INCIDENT, guest, {
            "code": "checkpoint", "refused": code, "step": kept.step, "of_attempt": kept.attempt,
        })
        self._told.add(kept)

    # --- versions -------------------------------------------------------------------------------------

    def _version(self, guest: Guest, version: str) -> Load:
        if version not in guest.granted.weights:
            raise Denied("the plan of this run does not name that version", code="version",
                         next_step="launch it with the version in its weights")
        if not self._room.vault.has_version(guest.run, guest.attempt, version):
            raise missing_keys()
        permit = self._room.gate.version(guest, version)
        self._room.gate.use(permit, Action.LOAD)
        folder = self._room.store.find(version)
        manifest = verify_digest(read_manifest(folder), version)
        return Load(secrets.token_hex(8), manifest, Kept(manifest.step, manifest.attempt, folder), version)

    # --- files ----------------------------------------------------------------------------------------

    def _key(self, guest: Guest, load: Load, row: FileRow) -> bytes:
        vault = self._room.vault
        if load.version:
            return vault.file_key(guest.run, guest.attempt, load.version, row.name)
        run_key = vault.run_key(guest.run, guest.attempt)
        return unwrap_file_key(run_key, row.wrapped, guest.run, load.manifest.step, row.name)

    def _proven(self, guest: Guest, load: Load, row: FileRow, key: bytes) -> Answer:
        """Runs beside the loop: open the file and read all of it, unless that was done since it was last written."""
        fd = open_kept(load.kept.folder, row.name, row.size)
        try:
            if self._room.store.digest_of(fd) != row.digest:
                self._broken.add(load.kept)
                self._tell(guest, load.kept, "untrusted.digest")
                raise Untrusted(f"{row.name} is not the file that was committed", code="digest",
                                next_step="load an older step")
        except BaseException:
            os.close(fd)
            raise
        return Answer({"key": base64.b64encode(key).decode()}, fd)
