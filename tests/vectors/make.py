"""Make the vectors of interlock/signed.py from fixed test keys: one good and one bad value a format.

Run: .venv/bin/python -m tests.vectors.make. Ed25519 is deterministic, so the files never change unless a format
does; tests/test_vectors.py makes them again and compares. Each bad vector has exactly one fault.
"""

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock import signed as formats
from interlock.call import Action
from interlock.canon import canonical, digest, digest_bytes
from interlock.order import (
    Labels,
    LaunchOrder,
    Lease,
    Mode,
    Plan,
    ResumeApproval,
    ResumeOrder,
    Scope,
    ScopeKind,
    StopOrder,
)
from interlock.permit import issue
from interlock.signed import Signed, key_id, public_text, sign
from interlock.tier import Tier
from policy import archive, bundle
from policy.rules import EFFECT

HERE = Path(__file__).parent
SHA = "sha256:" + "ab" * 32
NOW = 1_800_000_000_000_000


def key(name: str) -> Ed25519PrivateKey:
    """Return the fixed test key of that name; never used outside tests."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"interlock test key {name}".encode()).digest())


GRANT, STOP, SUPERVISOR, ADA, BEN, MALLORY = (key(n) for n in ("grant", "stop", "supervisor", "ada", "ben", "mallory"))

STOP_ORDER = StopOrder("0f" * 16, Scope(ScopeKind.MODEL, "aurora"), Mode.KILL, 7, "per_oncall", "drill, größer")
LABELS = Labels("demo", "per_1", "per_1", "run_1", "node-1", Tier.CRITICAL, "aurora", ("base",))
PLAN = Plan(("sha256sum", "/data/docs/a"), Tier.CRITICAL, "demo", (("train.py", SHA),), model="aurora", guest=True)
LAUNCH = LaunchOrder("ord_1", "run_1", 1, LABELS, PLAN, 7, 10_000, 10_000,
                     {"roles": ["researcher"], "mfa_age_ms": 1200, "mfa_bound": PLAN.digest(), "approvals": 2})


def _approval(person: str, by: Ed25519PrivateKey) -> Signed:
    return sign(formats.RESUME_APPROVAL, ResumeApproval("apr_1", (STOP_ORDER.id,), SHA, person).as_json(), by)


RESUME = ResumeOrder("res_1", 8, (STOP_ORDER.id,), SHA,
                     (_approval("per_ada", ADA).as_json(), _approval("per_ben", BEN).as_json()))
STOP_SIGNED = sign(formats.STOP, STOP_ORDER.as_json(), STOP)
SNAPSHOT = {"nonce": "n1", "roles": [{"person": "per_1", "tenant": "demo", "role": "researcher"}],
            "programmes": [{"person": "per_1", "programme": "vetted"}], "disabled": ["per_2"], "bundle_version": 3,
            "keys": [{"id": "key_0123456789", "hash": SHA, "person": "per_1", "tenant": "demo", "scopes": ["infer"]}],
            "models": [{"name": "aurora", "tenant": "demo", "tier": "critical", "version": SHA, "state": "serving",
                        "lineage": ["base"]}], "epoch": 7}
STOPS = {"nonce": "n2", "orders": [STOP_SIGNED.as_json()], "cleared": ["1e" * 16], "epoch": 7}
RECEIPT = {"order": STOP_ORDER.id, "result": "confirmed", "why": "", "runs": [{"run": "run_1", "attempt": 1}],
           "survivors": [], "at_ms": 123_456, "latency_ms": 41, "node": "node-1", "boot_id": "b" * 32, "nonce": "n3"}
PERSONS = [{"person": "per_ada", "key": public_text(ADA.public_key())},
           {"person": "per_ben", "key": public_text(BEN.public_key())}]
APPROVED = {"version": 2, "persons_digest": digest(PERSONS)}
TRUST = {"version": 2, "node": "node-1", "grant": [public_text(GRANT.public_key())],
         "stop": [public_text(STOP.public_key())], "persons": PERSONS, "threshold": 2, "signers": [], "cooldown_ms": 0,
         "approvals": [sign(formats.TRUST_APPROVAL, APPROVED, k).as_json() for k in (ADA, BEN)]}
MODEL = f"""[request_definition]
r = sub, home, dom, obj, act, tier, facts
[policy_definition]
p = sub, dom, obj, act, tier, cond, eft
[role_definition]
g = _, _
[policy_effect]
e = {EFFECT}
[matchers]
m = g(r.sub, p.sub) && in_tenant(r.home, r.dom, p.dom) && is_object(r.obj, p.obj) && is_action(r.act, p.act) \
&& in_tier(r.tier, p.tier) && when(r.facts, p.cond)
"""


def _case(name: str, expect: str, value: Signed, *pinned: Ed25519PrivateKey, threshold: int = 1,
          keys: dict[str, str] | None = None) -> dict[str, Any]:
    found = keys or {key_id(k.public_key()): public_text(k.public_key()) for k in pinned}
    case: dict[str, Any] = {"name": name, "expect": expect, "keys": found, "threshold": threshold,
                            "signed": value.as_json()}
    if expect == "ok":
        case["body"] = value.body()
    return case


def _raw(format_: str, payload: bytes, by: Ed25519PrivateKey) -> Signed:
    """Sign bytes that are not canonical, as no honest signer does."""
    return Signed(format_, payload, ((key_id(by.public_key()), by.sign(format_.encode() + b"\n" + payload)),))


def signed_vectors() -> dict[str, list[dict[str, Any]]]:
    """Return file name → its vectors, a good one first."""
    lease = sign(formats.LEASE, Lease("n4", "run_1", 1, "node-1", 10_000, 7).as_json(), GRANT)
    grant = sign(formats.GRANT, LAUNCH.as_json(), GRANT)
    snapshot, stops = sign(formats.SNAPSHOT, SNAPSHOT, GRANT), sign(formats.STOPS, STOPS, STOP)
    receipt, trust = sign(formats.RECEIPT, RECEIPT, SUPERVISOR), sign(formats.TRUST, TRUST, GRANT)
    resume, approval = sign(formats.RESUME, RESUME.as_json(), GRANT), _approval("per_ada", ADA)
    pair = sign(formats.TRUST_APPROVAL, APPROVED, ADA, BEN)
    single = sign(formats.TRUST_APPROVAL, APPROVED, ADA)
    grant_id, wrong = key_id(GRANT.public_key()), public_text(MALLORY.public_key())
    return {
        "stop": [_case("good", "ok", STOP_SIGNED, STOP), _case(
            "the payload was edited", "untrusted.signature",
            replace(STOP_SIGNED, payload=STOP_SIGNED.payload.replace(b'"epoch":7', b'"epoch":8')), STOP)],
        "resume": [_case("good", "ok", resume, GRANT), _case(
            "signed for another format", "untrusted.format", sign(formats.STOP, RESUME.as_json(), GRANT), GRANT)],
        "resume-approval": [_case("good", "ok", approval, ADA), _case(
            "signed by a key that is not pinned", "untrusted.signature", _approval("per_ada", MALLORY), ADA)],
        "grant": [_case("good", "ok", grant, GRANT), _case(
            "signed bytes with a space in them", "malformed",
            _raw(formats.GRANT, grant.payload.replace(b'"attempt":1', b'"attempt": 1'), GRANT), GRANT)],
        "lease": [_case("good", "ok", lease, GRANT), _case(
            "a number with a point", "malformed",
            _raw(formats.LEASE, lease.payload.replace(b'"epoch":7', b'"epoch":7.0'), GRANT), GRANT)],
        "snapshot": [_case("good", "ok", snapshot, GRANT), _case(
            "a pinned key under another key's id", "untrusted.key_id", snapshot, keys={grant_id: wrong})],
        "stops": [_case("good", "ok", stops, STOP), _case(
            "a good signature beside a bad one of a pinned key", "untrusted.signature",
            replace(stops, signatures=(*stops.signatures, (grant_id, b"\0" * 64))), STOP, GRANT)],
        "receipt": [_case("good", "ok", receipt, SUPERVISOR), _case(
            "a key occurs twice", "malformed",
            _raw(formats.RECEIPT, receipt.payload.replace(b'"why":""', b'"why":"","why":""'), SUPERVISOR), SUPERVISOR)],
        "trust": [_case("good", "ok", trust, GRANT), _case(
            "the format id is part of what is signed", "untrusted.signature",
            replace(sign(formats.GRANT, TRUST, GRANT), format=formats.TRUST), GRANT)],
        "break-glass": [_case("good", "ok", sign(formats.BREAK_GLASS, STOP_ORDER.as_json(), STOP), STOP), _case(
            "a stop order is no right to stop", "untrusted.format", STOP_SIGNED, STOP)],
        "trust-approval": [_case("good", "ok", pair, ADA, BEN, threshold=2), _case(
            "one key twice is not two keys", "untrusted.signature",
            replace(single, signatures=single.signatures * 2), ADA, BEN, threshold=2)],
    }


def bundle_vectors() -> list[dict[str, Any]]:
    """Return a bundle by two signers and one whose policy file is not the signed one."""
    files = {"model.conf": MODEL.encode(), "policy.csv": b"p, researcher, same, */*, launch, none, -, allow\n"}
    manifest = {"schema": bundle.SCHEMA, "version": 3, "created_us": NOW, "not_after_us": NOW + bundle.DAY_US,
                "min_engine": 1, "files": {n: digest_bytes(b) for n, b in files.items()}}
    signed = sign(formats.BUNDLE, manifest, ADA, BEN)
    member = {bundle.SIGNED: canonical(signed.as_json())}
    keys = {key_id(k.public_key()): public_text(k.public_key()) for k in (ADA, BEN)}
    swapped = {**files, "policy.csv": b"p, everyone, *, */*, launch, none, -, allow\n"}
    return [
        {"name": name, "expect": expect, "keys": keys, "now_us": NOW,
         "archive": base64.b64encode(archive.pack({**found, **member})).decode(),
         **({"version": 3, "digest": digest_bytes(signed.payload)} if expect == "ok" else {})}
        for name, expect, found in (("good", "ok", files), ("a file was swapped", "untrusted.digest", swapped))
    ]


def permit_vectors() -> list[dict[str, Any]]:
    """Return a sealed permit and one with a changed byte."""
    secret = hashlib.sha256(b"interlock test permit key").digest()
    permit = issue(call=SHA, action=Action.LAUNCH, resource="model/aurora", run="run_1", expires_ms=99_000, epoch=7,
                   record="01" * 16)
    seal = permit.seal(secret)
    raw = bytearray(base64.urlsafe_b64decode(seal))
    raw[-2] ^= 1
    shown = {"call": SHA, "action": "launch", "resource": "model/aurora", "run": "run_1", "expires_ms": 99_000,
             "epoch": 7, "record": "01" * 16}
    return [
        {"name": "good", "expect": "ok", "key": secret.hex(), "seal": seal, "permit": shown},
        {"name": "one byte changed", "expect": "untrusted.permit", "key": secret.hex(),
         "seal": base64.urlsafe_b64encode(bytes(raw)).decode()},
    ]


def build() -> dict[str, str]:
    """Return file name → text of every vector file."""
    found: dict[str, Any] = {**signed_vectors(), "bundle": bundle_vectors(), "permit": permit_vectors()}
    return {f"{n}.json": json.dumps(v, indent=1, ensure_ascii=False, sort_keys=True) + "\n" for n, v in found.items()}


if __name__ == "__main__":
    for name, text in build().items():
        (HERE / name).write_text(text)
