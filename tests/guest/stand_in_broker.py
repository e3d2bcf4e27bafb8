"""A broker for tests of the guest library: the wire's save and load operations over one folder, in this process.

It checks what the real one checks (every chunk, sizes, digests, the manifest) and nothing of policy. `orders` lets a
guest under test arrange what cannot happen by itself: keys that are late, a stop, a store that somebody altered.
"""

import base64
import json
import os
import shutil
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from interlock import wire
from interlock.canon import digest_bytes
from interlock.errors import Conflict, Halted, NotFound, Refusal, Unavailable, Untrusted
from interlock.manifest import FileRow, Manifest, file_name, verify
from interlock.sealed import Reader, unwrap_file_key, wrap_file_key

RUN = "run_guest"


class StandIn:
    """Serves `folder`/s from a thread of its own until `end`."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "s")
        self.store, self.staging = folder / "store", folder / "staging"
        self.store.mkdir()
        self.staging.mkdir()
        self.run_key = os.urandom(32)
        self.saves: dict[str, dict[str, Any]] = {}
        self.loads: dict[str, Manifest] = {}
        self.asked: list[str] = []
        self.late_keys, self.stopped, self.checks_digests = 0, False, True
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(32)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop serving."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer, suppress(OSError):  # a guest that was killed hung up
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        data = peer.recv(wire.LIMIT)
        if not data:
            return
        asked = json.loads(data)
        fds: list[int] = []
        try:
            with self._lock:
                self.asked.append(asked["op"])
                answer, fds = self._do(asked.pop("op"), asked)
            message: dict[str, Any] = {"ok": True, **answer}
        except Refusal as refusal:
            message = {"ok": False, "error": refusal.as_json()}
        except Exception as error:  # it goes on serving: a guest that waits for ever says less than this
            message = {"ok": False, "error": Conflict(repr(error), code="stand_in").as_json()}
        try:
            socket.send_fds(peer, [json.dumps(message).encode()], fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _do(self, op: str, asked: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        if op == "orders":
            return self._orders(**asked), []
        if self.stopped:
            raise Halted("a stop order covers this run", code="order")
        if self.late_keys:
            self.late_keys -= 1
            raise Unavailable("the run key has not come yet", code="keys")
        found = getattr(self, f"_{op}")(**asked)
        return found if isinstance(found, tuple) else (found, [])

    def _orders(self, **orders: Any) -> dict[str, Any]:
        for name in ("late_keys", "stopped", "checks_digests"):
            setattr(self, name, orders.get(name, getattr(self, name)))
        if "alter" in orders:
            getattr(self, f"_alter_{orders['alter']}")()
        steps = [f"{m.step}" for m in self._manifests()]
        left = sum(1 for _ in self.staging.iterdir())
        asked, self.asked = self.asked, []
        return {"steps": steps, "staged": left, "asked": asked[-200:]}

    # Saving

    def _save_begin(self, step: int, kind: str) -> dict[str, Any]:
        for save in list(self.saves):
            self._save_abort(save)
        if any(m.step == step for m in self._manifests()):
            raise Conflict("this step is there already", code="step")
        save = f"s{len(os.listdir(self.store))}x{os.urandom(4).hex()}"
        (self.staging / save).mkdir()
        self.saves[save] = {"step": step, "kind": kind, "keys": {}}
        newest = self._manifests()
        return {"save": save, "parent": newest[-1].digest() if newest else None}

    def _open_save(self, save: str) -> dict[str, Any]:
        if save not in self.saves:
            raise NotFound("no such save", code="save")
        return self.saves[save]

    def _save_file(self, save: str, name: str) -> tuple[dict[str, Any], list[int]]:
        found = self._open_save(save)
        fd = os.open(self.staging / save / file_name(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        key = os.urandom(32)
        wrapped = wrap_file_key(self.run_key, key, RUN, found["step"], name)
        found["keys"][name] = (key, wrapped)
        return {"key": _text(key), "wrapped": _text(wrapped)}, [fd]

    def _save_commit(self, save: str, items: int, assets: dict[str, str]) -> dict[str, Any]:
        found = self._open_save(save)
        rows, counted = [], 0
        for name, (key, wrapped) in found["keys"].items():
            path = self.staging / save / name
            counted += self._verified(path, key, found["step"])
            data = path.read_bytes()
            rows.append(FileRow(name, len(data), digest_bytes(data), wrapped))
        if counted != items:
            raise Conflict("the count of items differs", code="items")
        newest = self._manifests()
        manifest = Manifest(
            RUN, found["step"], 1, found["kind"], newest[-1].digest() if newest else None, items, assets, tuple(rows),
        )
        (self.staging / save / "manifest.json").write_bytes(manifest.seal(self.run_key))
        (self.staging / save).rename(self.store / f"{found['step']}-1")
        del self.saves[save]
        return {"digest": manifest.digest(), "bytes": sum(r.size for r in rows)}

    def _verified(self, path: Path, key: bytes, step: int) -> int:
        fd = os.open(path, os.O_RDONLY)
        try:
            reader = Reader(fd, key, RUN, step)
            try:
                reader.verify()
                return len(reader.items)
            finally:
                reader.close()
        finally:
            os.close(fd)

    def _save_abort(self, save: str) -> dict[str, Any]:
        self._open_save(save)
        del self.saves[save]
        shutil.rmtree(self.staging / save)
        return {}

    # Loading

    def _manifests(self) -> list[Manifest]:
        found = [verify(p.read_bytes(), self.run_key) for p in self.store.glob("*/manifest.json")]
        return sorted(found, key=lambda m: m.step)

    def _load_begin(self, step: int | None = None, version: str | None = None) -> dict[str, Any]:
        fitting = [m for m in self._manifests() if step in (None, m.step) and version in (None, m.digest())]
        if not fitting:
            raise NotFound("no such checkpoint", code="checkpoint")
        found = fitting[-1]
        load = os.urandom(4).hex()
        self.loads[load] = found
        return {
            "load": load, "run": found.run, "step": found.step, "kind": found.kind, "digest": found.digest(),
            "assets": dict(found.assets), "files": [{"name": f.name, "size": f.size} for f in found.files],
        }

    def _load_file(self, load: str, name: str) -> tuple[dict[str, Any], list[int]]:
        manifest = self.loads[load]
        row = next((f for f in manifest.files if f.name == name), None)
        if row is None:
            raise NotFound("the manifest has no such file", code="file")
        path = self.store / f"{manifest.step}-1" / name
        if self.checks_digests and digest_bytes(path.read_bytes()) != row.digest:
            raise Untrusted("the file is not the one that was committed", code="digest")
        key = unwrap_file_key(self.run_key, row.wrapped, RUN, manifest.step, name)
        return {"key": _text(key)}, [os.open(path, os.O_RDONLY)]

    # What somebody with write access to the store could do

    def _newest(self) -> Path:
        return self.store / f"{self._manifests()[-1].step}-1"

    def _alter_flip(self) -> None:
        path = self._newest() / "r0-0.sealed"
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)

    def _alter_plain(self) -> None:
        (self._newest() / "r0-0.sealed").write_bytes(b"\0" * 4096)

    def _alter_swap(self) -> None:
        one, two = (self._newest() / f"r0-{n}.sealed" for n in (0, 1))
        kept = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(kept)

    def _alter_older(self) -> None:
        """Put the file of the step before in place of the newest one's."""
        before = self.store / f"{self._manifests()[-2].step}-1"
        shutil.copy(before / "r0-0.sealed", self._newest() / "r0-0.sealed")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
