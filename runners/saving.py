"""Saves of a run: the broker makes the files, a guest fills them, and nothing unproven gets into the store."""

import base64
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from interlock import wire
from interlock.call import Action, number, text
from interlock.errors import Conflict, Malformed, NotFound, Untrusted
from interlock.event import EventType
from interlock.manifest import KINDS, MAX_ASSETS, MAX_FILES, FileRow, Manifest, file_name
from interlock.sealed import Reader, unwrap_file_key, wrap_file_key, wrapped_of
from runners.early_proof import Early, Proof
from runners.guest import Answer, Guest, Later
from runners.loading import Loading, listing
from runners.room import Room, require_checkpoints
from runners.store import WRITER_MS, Staging, close_off


@dataclass
class Save:
    """One open save. `files` maps a name to the wrapped key that its header must carry."""

    id: str
    step: int
    kind: str
    parent: str | None
    staging: Staging
    files: dict[str, bytes] = field(default_factory=dict)
    early: Early = field(default_factory=Early)
    committing: bool = False


class Saving:
    """Open saves by attempt, one each. The loop's thread calls everything but the work of a commit."""

    def __init__(self, room: Room, loading: Loading) -> None:
        self._room, self._loading = room, loading
        self._open: dict[tuple[str, int], Save] = {}

    def begin(self, guest: Guest, request: Mapping[str, Any]) -> Answer:
        """``save_begin``: ask the gate, put the begin on record, make a staging folder.

        Raises Denied (``denied.plan``, the gate's), Unavailable (``.keys``, ``.disk``), Conflict (``.step``,
        ``.saving``), Malformed, NotRecorded.
        """
        require_checkpoints(guest)
        fields = dict(request)
        step, kind = number(fields, "step"), text(fields, "kind", limit=16)
        if kind not in KINDS:
            raise Malformed("a checkpoint is of kind state or weights", code="kind")
        run_key = self._room.vault.run_key(guest.run, guest.attempt)
        self._room.store.require_room()
        self._room.store.place(guest.run, step, guest.attempt)
        before = self._open.get((guest.run, guest.attempt))
        if before is not None and before.committing:
            raise Conflict("a checkpoint of this run is being committed", code="saving",
                           next_step="wait for the answer of that commit")
        permit = self._room.gate.own(guest, Action.SAVE)
        parent = self._loading.parent(guest, run_key)
        save_id = secrets.token_hex(8)
        self._room.record(EventType.CHECKPOINT_BEGUN, guest, {"save": save_id, "step": step, "kind": kind})
        self._room.gate.use(permit, Action.SAVE)
        if before is not None:
            before.staging.drop()
        staging = self._room.store.begin(guest.run, guest.attempt)
        self._open[guest.run, guest.attempt] = Save(save_id, step, kind, parent, staging)
        return Answer({"save": save_id, "parent": parent})

    def file(self, guest: Guest, request: Mapping[str, Any]) -> Answer:
        """``save_file``: make one empty file and its key. Raises NotFound, Conflict, Malformed, Unavailable."""
        save = self._of(guest, request)
        name = file_name(request.get("name"))
        if name in save.files:
            raise Conflict("this save has a file of that name already", code="file")
        if len(save.files) >= MAX_FILES:
            raise Malformed(f"a checkpoint has at most {MAX_FILES} files", code="files")
        run_key, key = self._room.vault.run_key(guest.run, guest.attempt), os.urandom(32)
        save.early.begin(save.files, lambda early: self._prove(guest, save, early, run_key, wait_ms=0))
        wrapped = wrap_file_key(run_key, key, guest.run, save.step, name)
        fd = save.staging.create(name)
        save.files[name] = wrapped
        return Answer({"key": base64.b64encode(key).decode(), "wrapped": base64.b64encode(wrapped).decode()}, fd)

    def commit(self, guest: Guest, request: Mapping[str, Any]) -> Later:
        """``save_commit``: prove every file, write the manifest, move the folder. A refusal drops the save.

        Raises NotFound, Malformed, Unavailable here; in its work Conflict (``.open_writer``, ``.step``), Untrusted
        (``.sealed``, ``.items``, ``.files``), Malformed, Halted, NotRecorded, OSError.
        """
        save = self._of(guest, request)
        items, assets = number(dict(request), "items"), _assets(request.get("assets"))
        run_key = self._room.vault.run_key(guest.run, guest.attempt)
        save.committing = True

        def ended() -> None:
            self._open.pop((guest.run, guest.attempt), None)
            save.staging.drop()

        return Later(lambda: self._commit(guest, save, items, assets, run_key), ended)

    def abort(self, guest: Guest, request: Mapping[str, Any]) -> Answer:
        """``save_abort``: drop the save; one that is gone is no error. Raises Conflict (``conflict.saving``)."""
        text(dict(request), "save", limit=64)
        save = self._open.get((guest.run, guest.attempt))
        if save is not None and save.id == request["save"]:
            self._of(guest, request)
            self.forget(guest)
        return Answer({})

    def forget(self, guest: Guest) -> None:
        """Drop the open save of an attempt; one that is being committed drops itself."""
        save = self._open.get((guest.run, guest.attempt))
        if save is not None and not save.committing:
            del self._open[guest.run, guest.attempt]
            save.staging.drop()

    def _of(self, guest: Guest, request: Mapping[str, Any]) -> Save:
        wanted, save = text(dict(request), "save", limit=64), self._open.get((guest.run, guest.attempt))
        if save is None or save.id != wanted:
            raise NotFound("there is no such open save", code="save", next_step="begin a new one")
        if save.committing:
            raise Conflict("this save is being committed", code="saving", next_step="wait for the answer")
        return save

    # --- beside the loop ------------------------------------------------------------------------------

    def _commit(self, guest: Guest, save: Save, items: int, assets: dict[str, str], run_key: bytes) -> Answer:
        room = self._room
        rows, counted, found = [], 0, set()
        if not save.files:
            raise Malformed("a checkpoint has at least one file", code="files")
        for name in sorted(save.files):
            room.leash(guest)  # a file may take minutes; what is stopped meanwhile is not read on
            row, names = save.early.take(name) or self._prove(guest, save, name, run_key)
            rows.append(row)
            counted += len(names)
            found |= {(name, item) for item, offset in names if not offset}
        if counted != items:
            raise Untrusted("the files hold another number of items than the commit says", code="items",
                            next_step="save again; a writer failed without telling")
        if not {(file, asset) for asset, file in assets.items()} <= found:
            raise Untrusted("an asset is not in the file that should hold it", code="items")
        manifest = Manifest(guest.run, save.step, guest.attempt, save.kind, save.parent, items, assets, tuple(rows))
        digest, size = manifest.digest(), sum(r.size for r in rows)
        _require_listable(manifest)
        place = room.store.place(guest.run, save.step, guest.attempt)
        room.store.commit(save.staging, place, set(save.files), manifest.seal(run_key), lambda: room.leash(guest))
        facts = {"step": save.step, "kind": save.kind, "digest": digest, "items": items, "bytes": size,
                 "files": len(rows), "parent": save.parent}
        try:
            room.record(EventType.CHECKPOINT_COMMITTED, guest, facts)
        except BaseException:
            room.store.withdraw(place)  # what is not on record is not there
            raise
        self._loading.follow(guest, digest)
        return Answer({"digest": digest, "bytes": size})

    def _prove(self, guest: Guest, save: Save, name: str, run_key: bytes, wait_ms: int = WRITER_MS) -> Proof:
        """Return the file's row and its items once nobody can write it and every chunk of it is sealed as told."""
        if name not in save.staging.names():
            raise Untrusted(f"{name} is not in the staging folder", code="files")
        wrapped = save.files[name]
        fd = close_off(save.staging.folder / name, wait_ms)
        try:
            if wrapped_of(fd) != wrapped:
                raise Untrusted(f"{name} carries another key than it was given", code="sealed")
            reader = Reader(fd, unwrap_file_key(run_key, wrapped, guest.run, save.step, name), guest.run, save.step)
            try:
                digest = reader.prove()
                names = [(i.name, i.offset) for i in reader.items]
            finally:
                reader.close()
            self._room.store.remember(fd, digest)
            return FileRow(name, os.fstat(fd).st_size, digest, wrapped), names
        finally:
            os.close(fd)


def _assets(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_ASSETS or not all(isinstance(v, str) for v in value.values()):
        raise Malformed(f"assets are at most {MAX_ASSETS} names, each with its file", code="wire")
    return {str(k): v for k, v in value.items()}


def _require_listable(manifest: Manifest) -> None:
    """Refuse what could be saved and then not be listed in one message; raises Malformed (``malformed.wire``)."""
    wire.encode({"ok": True, "load": "0" * 16, **listing(manifest)})
