"""A site in memory: its keys, its people, and a control plane that tests bend into attacks.

It speaks the real formats: what it signs is checked by the real supervisor.
"""

import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.call import new_id
from interlock.canon import canonical
from interlock.keyfile import write_ed25519
from interlock.order import (
    Labels,
    LaunchOrder,
    Lease,
    Mode,
    Plan,
    ResumeApproval,
    ResumeOrder,
    Scope,
    StopOrder,
)
from interlock.signed import (
    BREAK_GLASS,
    GRANT,
    LEASE,
    RESUME,
    RESUME_APPROVAL,
    STOP,
    STOPS,
    TRUST,
    TRUST_APPROVAL,
    Signed,
    public_text,
    sign,
)
from interlock.tier import Tier
from killswitch.trust import persons_digest

Key = Ed25519PrivateKey


def key() -> Key:
    return Ed25519PrivateKey.generate()


@dataclass
class Site:
    """Keys and people of one node; the epoch is the control plane's."""

    node: str = "node-a"
    grant: Key = field(default_factory=key)
    stop: Key = field(default_factory=key)
    people: dict[str, Key] = field(default_factory=lambda: {n: key() for n in ("ada", "bela", "cleo")})
    cooldown_ms: int = 0
    epoch: int = 1

    def trust_body(self, **over: Any) -> dict[str, Any]:
        return {
            "version": 1, "node": self.node, "grant": [public_text(self.grant.public_key())],
            "stop": [public_text(self.stop.public_key())],
            "persons": [{"person": p, "key": public_text(k.public_key())} for p, k in sorted(self.people.items())],
            "threshold": 2, "signers": [], "cooldown_ms": self.cooldown_ms, "approvals": [], **over,
        }

    def trust(self, **over: Any) -> Signed:
        return sign(TRUST, self.trust_body(**over), self.grant)

    def trust_approval(self, person: str, version: int, persons: dict[str, Key], **more: Any) -> dict[str, Any]:
        digest = persons_digest({p: public_text(k.public_key()) for p, k in persons.items()})
        body = {"version": version, "persons_digest": digest, **more}
        return sign(TRUST_APPROVAL, body, self.people[person]).as_json()

    def join(self, state: Path) -> None:
        folder = state / "supervisor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / "supervisor.key").exists():  # the real join makes it before it is trusted
            write_ed25519(folder / "supervisor.key", Ed25519PrivateKey.generate())
        (folder / "trust.json").write_bytes(canonical(self.trust().as_json()))
        (folder / "trust.json").chmod(0o600)

    def labels(self, run: str = "run_1", **over: Any) -> Labels:
        return Labels(**{"tenant": "acme", "subject": "svc", "owner": "olga", "run": run, "node": self.node,
                         "tier": Tier.CRITICAL, "model": "", "lineage": (), **over})

    def launch(self, run: str = "run_1", attempt: int = 1, *, signer: Key | None = None, **over: Any) -> dict[str, Any]:
        labels = over.pop("labels", None) or self.labels(run)
        plan = Plan(("true",), labels.tier, "acme", pids=64, memory_mb=256)
        order = LaunchOrder(**{
            "id": new_id("launch"), "run": run, "attempt": attempt, "labels": labels, "plan": plan,
            "epoch": self.epoch, "lease_ms": 10_000, "absent_ms": 10_000, "facts": {}, **over,
        })
        return sign(GRANT, order.as_json(), signer or self.grant).as_json()

    def lease(self, beat: dict[str, Any], *, signer: Key | None = None, **over: Any) -> dict[str, Any]:
        lease = Lease(**{"nonce": beat["nonce"], "run": beat["run"], "attempt": beat["attempt"], "node": self.node,
                         "duration_ms": 10_000, "epoch": self.epoch, **over})
        return sign(LEASE, lease.as_json(), signer or self.grant).as_json()

    def stop_order(self, scope: str = "everything", *, signer: Key | None = None, **over: Any) -> Signed:
        order = StopOrder(**{"id": new_id("stop"), "scope": Scope.parse(scope), "mode": Mode.KILL,
                             "epoch": self.epoch, "actor": "otto", "reason": "test", **over})
        return sign(STOP, order.as_json(), signer or self.stop)

    def right(self, scope: str = "everything") -> Signed:
        order = StopOrder("right_1", Scope.parse(scope), Mode.KILL, 0, "otto", "kept by on-call")
        return sign(BREAK_GLASS, order.as_json(), self.stop)

    def approval(self, person: str, clears: list[str], **over: Any) -> dict[str, Any]:
        signer = over.pop("signer", None) or self.people[person]
        value = ResumeApproval(**{"request": "request_1", "clears": tuple(sorted(clears)), "head": "h",
                                  "person": person, **over})
        return sign(RESUME_APPROVAL, value.as_json(), signer).as_json()

    def resume(self, clears: list[str], people: tuple[str, ...] = ("ada", "bela"), **over: Any) -> Signed:
        self.epoch += 1
        signer = over.pop("signer", None) or self.grant
        approvals = over.pop("approvals", None) or [self.approval(p, clears) for p in people]
        order = ResumeOrder(**{"id": new_id("resume"), "epoch": self.epoch, "clears": tuple(sorted(clears)),
                               "head": "h", "approvals": tuple(approvals), **over})
        return sign(RESUME, order.as_json(), signer)

    def snapshot(self, nonce: str, orders: list[dict[str, Any]] | None = None, cleared: list[str] | None = None,
                 *, signer: Key | None = None) -> dict[str, Any]:
        body = {"nonce": nonce, "orders": orders or [], "cleared": cleared or [], "epoch": self.epoch}
        return sign(STOPS, body, signer or self.stop).as_json()

    def answer(self, beats: dict[str, Any], **over: Any) -> dict[str, Any]:
        """Return what an honest control plane answers; `over` bends it."""
        return {
            "leases": [self.lease(b) for b in beats["beats"]], "refused": [], "orders": [],
            "stops": self.snapshot(beats["nonce"]), "trust": None, "acked": [], "receipts_acked": [], **over,
        }


def short_folder() -> Path:
    """Return a new folder under /tmp whose name is short enough for unix sockets."""
    path = Path(f"/tmp/ks{secrets.token_hex(3)}")
    path.mkdir(mode=0o755)
    return path


def save(path: Path, signed: Signed) -> Path:
    path.write_text(json.dumps(signed.as_json()))
    return path
