"""Every audit event as one enum, and the record of one event (requirement S15).

Names are constants ``room.what``; they are never translated and never reused. Fields that do not apply
are absent, never empty strings. Times are integer microseconds since the epoch; order is the log index.
"""

import secrets
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from interlock.canon import canonical


class EventType(StrEnum):
    """What can happen, one line each (docs/formats/record.md lists them)."""

    CALL_DECIDED = "gate.decided"
    SIGNED_IN = "identity.signed_in"
    SIGN_IN_REFUSED = "identity.sign_in_refused"
    STEPPED_UP = "identity.stepped_up"
    ENROLLED = "identity.enrolled"
    INVITED = "identity.invited"
    BOOTSTRAP_LINK = "identity.bootstrap_link"
    RECOVERY = "identity.recovery"
    SESSION_ENDED = "identity.session_ended"
    PARTNER_ENROLLED = "identity.partner_enrolled"
    KEY_MINTED = "identity.api_key_minted"
    KEY_REVOKED = "identity.api_key_revoked"
    APPROVAL_ASKED = "approval.asked"
    APPROVAL_GIVEN = "approval.given"
    APPROVAL_REFUSED = "approval.refused"
    BUNDLE_PUBLISHED = "policy.bundle_published"
    BUNDLE_REFUSED = "policy.bundle_refused"
    NODE_INVITED = "node.join_file_made"
    NODE_JOINED = "node.joined"
    NODE_REFUSED = "node.refused"
    NODE_PROBED = "node.probed"
    TRUST_CHANGED = "node.trust_changed"
    RUN_GRANTED = "run.granted"
    RUN_INTENT = "run.intent"
    RUN_STARTED = "run.started"
    RUN_ENDED = "run.ended"
    RUN_REFUSED = "run.refused"
    RUN_STEP = "run.step"
    DATA_DIGESTED = "data.digested"
    RUN_RESTARTED = "run.restarted"
    CHECKPOINT_BEGUN = "checkpoint.begun"
    CHECKPOINT_COMMITTED = "checkpoint.committed"
    CHECKPOINT_REFUSED = "checkpoint.refused"
    CHECKPOINT_LOADED = "checkpoint.loaded"
    RUN_KEY_MADE = "key.made"
    RUN_KEY_RELEASED = "key.released"
    RUN_KEY_REFUSED = "key.refused"
    MODEL_REGISTERED = "registry.model"
    VERSION_REGISTERED = "registry.version"
    VERSION_MOVED = "registry.version_moved"
    REGISTRY_REFUSED = "registry.refused"
    ENGINE_READY = "engine.ready"
    INFERRED = "infer.answered"
    INFER_REFUSED = "infer.refused"
    LEASE_REFUSED = "run.lease_refused"
    STOP_ACCEPTED = "stop.accepted"
    STOP_LOCAL = "stop.local"
    STOP_RECEIPT = "stop.receipt"
    STOP_UNCONFIRMED = "stop.unconfirmed"
    RESUME_ASKED = "resume.asked"
    RESUME_SIGNED = "resume.signed"
    RESUME_ORDERED = "resume.ordered"
    RECOVERING = "control.recovering"
    STARTED = "control.started"
    EXPORTED = "audit.exported"
    STREAM_OPENED = "stream.opened"
    STREAM_CLOSED = "stream.closed"
    STREAM_LOST = "stream.lost"
    INCIDENT = "incident.raised"


def new_event_id() -> str:
    """Return a UUIDv7-shaped id in hex: 48 bits of milliseconds, then random bits (RFC 9562)."""
    ms = time.time_ns() // 1_000_000
    value = (ms << 80) | (0x7 << 76) | (secrets.randbits(12) << 64) | (0b10 << 62) | secrets.randbits(62)
    return f"{value:032x}"


@dataclass(frozen=True)
class Event:
    """One thing that happened; `canonical()` are the leaf bytes, hashed and signed as stored.

    `facts` holds what the type needs (decision, plan digest, exit status, duration_us, source_ip,
    model, input and output digests ...); values are of the canonical subset and hold no secret.
    """

    type: EventType
    actor: str
    tenant: str = ""
    run: str = ""
    call: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=new_event_id)
    occurred_us: int = field(default_factory=lambda: time.time_ns() // 1000)

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object; absent fields are left out."""
        full: dict[str, Any] = {
            "v": 1, "id": self.id, "type": self.type.value, "actor": self.actor, "occurred_us": self.occurred_us,
            "tenant": self.tenant, "run": self.run, "call": self.call, "facts": self.facts,
        }
        return {k: v for k, v in full.items() if v not in ("", {})}

    def canonical(self) -> bytes:
        """Return the canonical bytes; raises Malformed on floats and odd values."""
        return canonical(self.as_json())


@dataclass(frozen=True)
class Written:
    """What record() returns: the record is durable. `stream` and `seq` say where."""

    event_id: str
    stream: str
    seq: int
