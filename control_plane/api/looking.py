"""Looks that repeat: the gate is asked once a minute by one reader about one thing, so that a command which follows
its run does not fill the ledger. Another role, another bundle or another credential is another question at once."""

import time

from fastapi import Request

from control_plane.api.context import Caller, pass_gate
from interlock.call import Action, Resource
from interlock.errors import Denied, NotFound

LOOK_S = 60.0
MAX_KEPT = 20_000
Key = tuple[object, ...]


def may(request: Request, caller: Caller, resource: Resource, *, own: bool = False) -> bool:
    """Return whether `caller` may look at `resource`. Raises Denied (``denied.scope``: a key without it) or what
    else the gate raises."""
    caller.require_scope(Action.LOOK)
    kept: dict[Key, tuple[float, bool]] = request.app.state.__dict__.setdefault("looks", {})
    slot = getattr(request.app.state, "slot", None)
    bundle = slot.active if slot is not None else None
    key = (caller.session or caller.id, caller.roles, bundle.digest if bundle else "", resource, own)
    now = time.monotonic()
    at, verdict = kept.get(key, (-LOOK_S, False))
    if now - at < LOOK_S:
        return verdict
    try:
        pass_gate(request, caller, Action.LOOK, resource, own=own)
        verdict = True
    except Denied:
        verdict = False
    if len(kept) >= MAX_KEPT:
        kept.clear()  # asking anew is always right
    kept[key] = now, verdict
    return verdict


def require(request: Request, caller: Caller, resource: Resource, *, own: bool) -> None:
    """Refuse a look; what one may not see does not exist. Raises NotFound, or as `may`."""
    if not may(request, caller, resource, own=own):
        raise unseen(resource.kind)


def unseen(kind: str) -> NotFound:
    """Return the one refusal for what does not exist and for what is not the caller's: nobody learns which."""
    steps = {"run": "interlock runs", "model": "interlock model list"}
    return NotFound(f"no such {kind}, or it is not yours", code=kind, next_step=steps.get(kind, ""))
