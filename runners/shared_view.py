"""What broker and gateway may decide with: the launcher's files in `STATE/shared`, verified here once more.

| file | what | who wrote it |
|---|---|---|
| `trust.json` | the node's trust list: grant keys, bundle signers | runners/pinned.py |
| `signers.json` | bundle signers that local root pinned | runners/entitlements.py |
| `bundle/active` | the policy bundle in force | runners/entitlements.py |
| `snapshot.json` | the signed entitlements | runners/entitlements.py |
| `confirmed.json` | when bundle and snapshot were last confirmed together | runners/entitlements.py |

Only files of root (or of this very user) that nobody else may write count. What does not verify counts as absent:
no bundle decides nothing, no snapshot gives nobody a role. The age belongs to the one snapshot whose nonce
`confirmed.json` names, in this boot; while the launcher is between two files the age of before goes on growing.
"""

import json
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlock.call import Call, Decision, number, text
from interlock.canon import parse
from interlock.errors import Refusal, Unavailable, Untrusted
from interlock.permit import boottime_ms
from interlock.signed import Signed
from killswitch import trust
from killswitch.store import boot_id
from policy import bundle as bundles
from policy import decide as deciding
from policy import snapshot as snapshots
from policy.facts import NEVER_MS, Facts
from policy.rbac import Engine
from policy.snapshot import Snapshot
from runners.folders import Folders

TRUST, SIGNERS, SNAPSHOT, CONFIRMED = "trust.json", "signers.json", "snapshot.json", "confirmed.json"
LIMIT = 64 << 20
Mark = tuple[int, int, int]


def facts_of(
    snapshot: Snapshot | None, age_ms: int, person: str, tenant: str, told: Mapping[str, object]
) -> Facts:
    """Return the facts of a decision about `person`: roles and programmes from the snapshot alone.

    Args: `told` what somebody whom we trust says of this call (`mfa_age_ms`, `mfa_bound`, `approvals`: a count or
    a list of persons, `own`); a field of another kind counts as absent.
    """
    age, bound = told.get("mfa_age_ms"), told.get("mfa_bound")
    return Facts(
        roles=frozenset() if snapshot is None else snapshot.roles_of(person, tenant),
        programmes=frozenset() if snapshot is None else snapshot.programmes_of(person),
        bundle_age_ms=age_ms, own=told.get("own") is True,
        mfa_age_ms=age if isinstance(age, int) and not isinstance(age, bool) else None,
        mfa_bound=bound if isinstance(bound, str) else "", approvals=_approvals(told.get("approvals"), person),
    )


def _approvals(told: object, owner: str) -> int:
    """Return how many other persons approved: a count, or a list of persons without the owner and doubles."""
    if isinstance(told, list):
        return len({p for p in told if isinstance(p, str)} - {owner})
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else 0


class SharedView:
    """Reads the files again when they change. Thread-safe: `_lock` guards everything that is kept."""

    def __init__(self, found: Folders) -> None:
        self._folder: Path = found.shared
        self._bundle = found.shared / "bundle" / "active"
        self._boot = boot_id()
        self._lock = threading.Lock()
        self._seen: tuple[Mark | None, ...] = ()
        self._trust: trust.Trust | None = None
        self._engine: Engine | None = None
        self._snapshot: Snapshot | None = None
        self._confirmed_ms = -NEVER_MS

    def decide(self, call: Call, facts: Facts) -> Decision:
        """Decide by the bundle in force; without one everything of a run or a caller is denied. Never raises."""
        with self._lock:
            self._look()
            engine = self._engine
        return deciding.decide(engine, call, facts)

    def facts_of(self, person: str, tenant: str, **told: object) -> Facts:
        """Return what is known of `person` in `tenant`; `told` as in the function of this name."""
        with self._lock:
            self._look()
            snapshot, age = self._snapshot, self._age_ms()
        return facts_of(snapshot, age, person, tenant, told)

    def snapshot(self) -> Snapshot | None:
        """Return the verified entitlements, or None."""
        with self._lock:
            self._look()
            return self._snapshot

    def age_ms(self) -> int:
        """Return milliseconds since the question was sent whose answer confirmed bundle and snapshot together."""
        with self._lock:
            self._look()
            return self._age_ms()

    def _age_ms(self) -> int:
        return min(NEVER_MS, boottime_ms() - self._confirmed_ms)

    def _look(self) -> None:
        """Take up what changed since the last look."""
        shared = self._folder
        paths = (shared / TRUST, shared / SIGNERS, self._bundle, shared / SNAPSHOT, shared / CONFIRMED)
        marks = tuple(_mark(p) for p in paths)
        if marks == self._seen:
            return
        before = self._seen or (None,) * len(marks)
        keys_moved = not self._seen or marks[0] != before[0]
        if keys_moved:
            self._trust = _trust(paths[0])
        if keys_moved or marks[1:3] != before[1:3]:
            self._engine = self._read_bundle(paths[1], paths[2])
        if keys_moved or marks[3] != before[3]:
            self._snapshot = self._read_snapshot(paths[3])
        self._confirm(paths[4])
        self._seen = marks

    def _read_bundle(self, local: Path, archive: Path) -> Engine | None:
        try:
            rows = [{"name": n, "key": k} for n, k in self._trust.signers] if self._trust else []
            rows += _signers(local)
            return Engine(bundles.read(_read(archive), bundles.pinned(rows), None, stored=True))
        except Refusal:
            return None

    def _read_snapshot(self, path: Path) -> Snapshot | None:
        try:
            signed = Signed.from_json(parse(_read(path), limit=LIMIT))
            keys = self._trust.grant_keys if self._trust else {}
            return snapshots.verify(signed, keys, text(signed.body(), "nonce", limit=128))
        except Refusal:
            return None

    def _confirm(self, path: Path) -> None:
        """Move the age on when `path` speaks of exactly this boot, this snapshot and this bundle."""
        if self._snapshot is None or self._engine is None:
            self._confirmed_ms = -NEVER_MS
            return
        try:
            told = parse(_read(path), limit=4096)
            sent_ms = number(told, "confirmed_ms")
            same = (text(told, "boot_id"), text(told, "nonce"), number(told, "bundle_version", low=1)) == (
                self._boot, self._snapshot.nonce, self._engine.bundle.version)
        except (Refusal, AttributeError):
            return
        if same and sent_ms <= boottime_ms():
            self._confirmed_ms = max(self._confirmed_ms, sent_ms)


def _mark(path: Path) -> Mark | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _read(path: Path) -> bytes:
    """Return the bytes of a shared file; raises Unavailable or Untrusted (``untrusted.shared``)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unavailable(f"cannot read {path.name}: {error.strerror}", code="shared",
                          next_step="start the node again: it writes the file anew") from None
    with os.fdopen(fd, "rb") as source:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise Untrusted(f"others can write {path.name}", code="shared", next_step="start the node again")
        return source.read(LIMIT)


def _trust(path: Path) -> trust.Trust | None:
    try:
        return trust.load(path)
    except (Refusal, OSError):
        return None


def _signers(path: Path) -> list[dict[str, Any]]:
    """Return the local pins; none where there is no such file. Raises Untrusted (``untrusted.shared``)."""
    try:
        rows = json.loads(_read(path))
    except Unavailable:
        return []
    except ValueError:
        rows = None
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise Untrusted("signers.json is no list of signers", code="shared", next_step="start the node again")
    return rows
