"""Saves of a run: the broker makes the files, a guest fills them, and nothing unproven gets into the store."""

import base64
import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from interlock import wire
from interlock.call import Action, number, text
from interlock.errors import Conflict, Malformed, NotFound, Refusal, Unavailable, Untrusted
from interlock.event import EventType
from interlock.manifest import KINDS, MAX_ASSETS, MAX_FILES, FileRow, Manifest, file_name
from interlock.sealed import Reader, unwrap_file_key, wrap_file_key, wrapped_of
from runners.early_proof import Early, Proof
from runners.guest import Answer, Guest, Later
from runners.loading import Loading, listing
from runners.open_files import OpenFiles
from runners.room import Room, require_checkpoints
from runners.store import Staging, close_off, over_budget
from runners.syncing import THREADS, Syncing

LEFT = 128  # files of ended saves that an attempt may hold open
MAX_ITEMS = 1 << 19


@dataclass
class Save:
    """One open save. `files` maps a name to the wrapped key that its header must carry; `limit` in bytes is what they
    may take together, `counted` how many items are in each that was looked into; `over` says why it was dropped."""

    id: str
    step: int
    kind: str
    parent: str | None
    staging: Staging
    limit: int
    syncing: Syncing
    files: dict[str, bytes] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    early: Early = field(default_factory=Early)
    committing: bool = False
    over: Refusal | None = None


class Saving:
    """Open saves by attempt, one each. The loop's thread calls everything but the work of a commit."""

    def __init__(self, room: Room, loading: Loading) -> None:
        self._room, self._loading = room, loading
        self._open: dict[tuple[str, int], Save] = {}
        self._written: dict[tuple[str, int], OpenFiles] = {}
        self._disk = ThreadPoolExecutor(THREADS, thread_name_prefix="sync")

    def begin(self, guest: Guest, request: Mapping[str, Any]) -> Answer:
        """``save_begin``: ask the gate, put the begin on record, make a staging folder.

        Raises Denied (``denied.plan``, ``.budget``, the gate's), Unavailable (``.keys``, ``.disk``), Conflict
        (``.step``, ``.saving``, ``.open_writer``), Malformed, NotRecorded.
        """
        require_checkpoints(guest)
        fields = dict(request)
        step, kind = number(fields, "step"), text(fields, "kind", limit=16)
        if kind not in KINDS:
            raise Malformed("a checkpoint is of kind state or weights", code="kind")
        run_key = self._room.vault.run_key(guest.run, guest.attempt)
        self._room.store.require_room()
        self._room.store.place(guest.run, step, guest.attempt)
        limit = self._room.store.allowance(guest.run)
        before = self._open.get((guest.run, guest.attempt))
        if before is not None and before.committing:
            raise Conflict("a checkpoint of this run is being committed", code="saving",
                           next_step="wait for the answer of that commit")
        written = self._written.setdefault((guest.run, guest.attempt), OpenFiles())
        if written.empty() >= LEFT:
            raise Conflict("files of saves that are over are still open for writing", code="open_writer",
                           next_step="close the descriptors of every save that failed")
        permit = self._room.gate.own(guest, Action.SAVE)
        parent = self._loading.parent(guest, run_key)
        save_id = secrets.token_hex(8)
        self._room.record(EventType.CHECKPOINT_BEGUN, guest, {"save": save_id, "step": step, "kind": kind})
        self._room.gate.use(permit, Action.SAVE)
        if before is not None:
            self._drop(guest, before)
        staging = self._room.store.begin(guest.run, guest.attempt)
        save = Save(save_id, step, kind, parent, staging, limit, Syncing(self._disk))
        self._open[guest.run, guest.attempt] = save
        return Answer({"save": save_id, "parent": parent})

    def file(self, guest: Guest, request: Mapping[str, Any]) -> Answer:
        """``save_file``: make one empty file and its key. Raises NotFound, Conflict, Malformed, Unavailable, Denied
        (``denied.budget``)."""
        save = self._of(guest, request)
        name = file_name(request.get("name"))
        if name in save.files:
            raise Conflict("this save has a file of that name already", code="file")
        if len(save.files) >= MAX_FILES:
            raise Malformed(f"a checkpoint has at most {MAX_FILES} files", code="files")
        run_key, key = self._room.vault.run_key(guest.run, guest.attempt), os.urandom(32)
        wrapped = wrap_file_key(run_key, key, guest.run, save.step, name)
        fd = save.staging.create(name)
        try:
            self._written[guest.run, guest.attempt].add(save.staging.folder / name)
        except OSError:
            os.close(fd)
            raise
        save.files[name] = wrapped
        save.early.add(name, lambda: self._prove(guest, save, name, run_key, 0))
        return Answer({"key": base64.b64encode(key).decode(), "wrapped": base64.b64encode(wrapped).decode()}, fd)

    def commit(self, guest: Guest, request: Mapping[str, Any]) -> Later:
        """``save_commit``: prove every file, write the manifest, move the folder. A refusal drops the save.

        Raises NotFound, Malformed, Unavailable, Denied (``.budget``) here; in its work Conflict (``.open_writer``,
        ``.step``), Untrusted (``.sealed``, ``.items``, ``.files``), Denied, Malformed, Halted, NotRecorded, OSError.
        """
        save = self._of(guest, request)
        items, assets = number(dict(request), "items"), _assets(request.get("assets"))
        run_key = self._room.vault.run_key(guest.run, guest.attempt)
        save.committing = True

        def ended() -> None:
            self._open.pop((guest.run, guest.attempt), None)
            self._drop(guest, save)
            if not guest.live:
                self.forget(guest)

        return Later(lambda: self._commit(guest, save, items, assets, run_key), ended)

    def abort(self, guest: Guest, request: Mapping[str, Any]) -> Answer:
        """``save_abort``: drop the save; one that is gone is no error. Raises Conflict (``conflict.saving``)."""
        text(dict(request), "save", limit=64)
        save = self._open.get((guest.run, guest.attempt))
        if save is not None and save.id == request["save"]:
            if save.over is None:
                self._of(guest, request)
            del self._open[guest.run, guest.attempt]
            self._drop(guest, save)
        return Answer({})

    def forget(self, guest: Guest) -> None:
        """Drop the open save of an attempt that is over; one that is being committed drops itself."""
        save = self._open.get((guest.run, guest.attempt))
        if save is not None:
            if save.committing:
                return
            del self._open[guest.run, guest.attempt]
            self._drop(guest, save)
        written = self._written.pop((guest.run, guest.attempt), None)
        if written is not None:
            written.close()

    def _drop(self, guest: Guest, save: Save) -> None:
        """Take the staging folder away, if it is still there; what a guest can still write is emptied from then on."""
        save.early.end()
        save.staging.drop()
        written = self._written.get((guest.run, guest.attempt))
        if written is not None:
            written.leave()

    # --- sizes ----------------------------------------------------------------------------------------

    def look(self) -> list[tuple[tuple[str, int], Refusal]]:
        """Drop open saves that outgrew their budget, and the largest one when the disk is nearly full.

        Returns (run, attempt) of what was dropped with the reason; its guest hears it when it asks next. Bytes that a
        guest still writes into dropped files go again with each look.
        """
        sizes = {}
        for owner, written in self._written.items():
            written.empty()
            save = self._open.get(owner)
            if save is not None and save.over is None and not save.committing:
                sizes[owner] = written.size()
        found = [(o, _too_large(size)) for o, size in sizes.items() if size > self._open[o].limit]
        if not found and any(sizes.values()):
            try:
                self._room.store.require_room()
            except Unavailable as full:
                found = [(max(sizes, key=sizes.__getitem__), full)]
        for owner, refusal in found:
            save = self._open[owner]
            save.over = refusal
            save.early.end()
            save.staging.drop()
            self._written[owner].leave()
        return found

    def _of(self, guest: Guest, request: Mapping[str, Any]) -> Save:
        wanted, save = text(dict(request), "save", limit=64), self._open.get((guest.run, guest.attempt))
        if save is None or save.id != wanted:
            raise NotFound("there is no such open save", code="save", next_step="begin a new one")
        if save.over is not None:
            raise save.over
        if save.committing:
            raise Conflict("this save is being committed", code="saving", next_step="wait for the answer")
        return save

    # --- beside the loop ------------------------------------------------------------------------------

    def _commit(self, guest: Guest, save: Save, items: int, assets: dict[str, str], run_key: bytes) -> Answer:
        room = self._room
        rows, counted, found = [], 0, set()
        if not save.files:
            raise Malformed("a checkpoint has at least one file", code="files")
        self._close_all(save)
        for name in sorted(save.files):
            room.leash(guest)  # a file may take minutes; what is stopped meanwhile is not read on
            row, names = save.early.take(name) or self._prove(guest, save, name, run_key)
            rows.append(row)
            counted += save.counted[name]
            found |= {(name, item) for item in names}
        if counted != items:
            raise Untrusted("the files hold another number of items than the commit says", code="items",
                            next_step="save again; a writer failed without telling")
        if not {(file, asset) for asset, file in assets.items()} <= found:
            raise Untrusted("an asset is not in the file that should hold it", code="items")
        manifest = Manifest(guest.run, save.step, guest.attempt, save.kind, save.parent, items, assets, tuple(rows))
        digest, size = manifest.digest(), sum(r.size for r in rows)
        _require_listable(manifest)
        place = room.store.place(guest.run, save.step, guest.attempt)
        room.store.commit(save.staging, place, set(save.files), manifest.seal(run_key), lambda: room.leash(guest),
                          save.syncing.wait())
        facts = {"step": save.step, "kind": save.kind, "digest": digest, "items": items, "bytes": size,
                 "files": len(rows), "parent": save.parent}
        try:
            room.record(EventType.CHECKPOINT_COMMITTED, guest, facts)
        except BaseException:
            room.store.withdraw(place)  # what is not on record is not there
            raise
        self._loading.follow(guest, digest)
        return Answer({"digest": digest, "bytes": size})

    def _close_all(self, save: Save) -> None:
        """Refuse while any file can still be written, and when all together are larger than the save may be: from
        here on no file grows. Raises Conflict (``conflict.open_writer``), Denied (``denied.budget``), OSError."""
        size, there = 0, save.staging.names()
        for name in sorted(save.files):
            if name not in there:
                raise Untrusted(f"{name} is not in the staging folder", code="files")
            fd = close_off(save.staging.folder / name)
            try:
                size += os.fstat(fd).st_size
            finally:
                os.close(fd)
        if size > save.limit:
            raise _too_large(size)

    def _prove(self, guest: Guest, save: Save, name: str, run_key: bytes, wait_ms: int | None = None) -> Proof:
        """Return the file's row and the names of its items without an offset, once nobody can write it and every
        chunk of it is sealed as told."""
        self._room.leash(guest)
        wrapped = save.files[name]
        fd = close_off(save.staging.folder / name, wait_ms)
        try:
            if os.fstat(fd).st_size > save.limit:
                raise _too_large(os.fstat(fd).st_size)
            save.syncing.begin(name, fd)
            if wrapped_of(fd) != wrapped:
                raise Untrusted(f"{name} carries another key than it was given", code="sealed")
            reader = Reader(fd, unwrap_file_key(run_key, wrapped, guest.run, save.step, name), guest.run, save.step)
            try:
                save.counted[name] = len(reader.items)
                if sum(save.counted.values()) > MAX_ITEMS:
                    raise Malformed(f"a checkpoint has at most {MAX_ITEMS} items", code="items",
                                    next_step="save fewer, larger tensors")
                digest = reader.prove()
                names = [i.name for i in reader.items if not i.offset]
            finally:
                reader.close()
            self._room.store.remember(fd, digest)
            return FileRow(name, os.fstat(fd).st_size, digest, wrapped), names
        finally:
            os.close(fd)


def _too_large(size: int) -> Refusal:
    return over_budget("this save is larger than one save of this run may be", size,
                       "save less at once, or make room on the node's state disk")


def _assets(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_ASSETS or not all(isinstance(v, str) for v in value.values()):
        raise Malformed(f"assets are at most {MAX_ASSETS} names, each with its file", code="wire")
    return {str(k): v for k, v in value.items()}


def _require_listable(manifest: Manifest) -> None:
    """Refuse what could be saved and then not be listed in one message; raises Malformed (``malformed.wire``)."""
    wire.encode({"ok": True, "load": "0" * 16, **listing(manifest)})
