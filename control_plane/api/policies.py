"""The policy bundle in force, and publishing another."""

import base64
import binascii
from typing import Any

from fastapi import APIRouter, Request

from control_plane.api.context import Body, SignedIn, declare, pass_gate
from control_plane.parts import parts_of
from control_plane.signing import bundle_signers
from interlock.call import Action, Resource
from interlock.errors import Malformed, Refusal
from interlock.event import Event, EventType

router = APIRouter()

declare({
    ("GET", "/api/policy"): Action.LOOK,
    ("POST", "/api/policy/bundles"): Action.PUBLISH_BUNDLE,
})


class BundleBody(Body):
    """`archive` is the signed bundle in base64."""

    archive: str


@router.get("/api/policy")
def active(request: Request, caller: SignedIn) -> dict[str, Any]:
    """Return what decides at present; any signed-in person may see it."""
    parts = parts_of(request)
    pass_gate(request, caller, Action.LOOK, Resource("policy", "active", caller.tenant), own=True)
    bundle = parts.slot.active
    pinned = bundle_signers(parts.settings.places.trust)
    if bundle is None:
        return {"active": None, "signers": pinned}
    return {"active": {
        "version": bundle.version, "digest": bundle.digest, "created_us": bundle.created_us,
        "not_after_us": bundle.not_after_us, "signers": sorted(bundle.signers), "files": sorted(bundle.files),
    }, "signers": pinned}


@router.post("/api/policy/bundles")
def publish(request: Request, caller: SignedIn, body: BundleBody) -> dict[str, Any]:
    """Publish a bundle: its signatures carry the authority, the publisher only brings it. A refusal is recorded."""
    parts = parts_of(request)
    caller.require_person()
    pass_gate(request, caller, Action.PUBLISH_BUNDLE, Resource("policy", "bundle", caller.tenant))
    try:
        archive = base64.b64decode(body.archive, validate=True)
    except (ValueError, binascii.Error):
        raise Malformed("the archive is not base64", code="base64") from None
    try:
        bundle = parts.slot.publish(archive, caller.person)
    except Refusal as refusal:
        parts.desk.note(Event(EventType.BUNDLE_REFUSED, caller.person, caller.tenant, facts={
            "code": refusal.code, "reason": refusal.message}))
        raise
    parts.desk.note(Event(EventType.BUNDLE_PUBLISHED, caller.person, caller.tenant, facts={
        "version": bundle.version, "digest": bundle.digest, "signers": sorted(bundle.signers)}))
    parts.bell.ring()
    return {"version": bundle.version, "digest": bundle.digest, "signers": sorted(bundle.signers)}
