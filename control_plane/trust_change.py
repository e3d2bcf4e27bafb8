"""A change of the persons that nodes believe: asked by an administrator, signed by two who are pinned already.

Rules:
1. Only an enrolled, enabled safety officer is added, with the person key that he registered. Names come from the
   caller, persons and keys from our store.
2. Two or more persons stay pinned, and two who are pinned can sign the change: else it could never be done.
3. Each vote signs version and digest of exactly the new list (interlock/trust-approval/v1). The request is bound to
   the list in force: when another change comes first, it is void.
4. Before a version is published it passes the very check that the supervisors make (killswitch/trust.py).
5. The version is above every version that a node reported, so that a restored database cannot use one twice; what no
   backup could have lost is not believed, else one node could use up all numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from control_plane.auth import approvals
from control_plane.parts import Parts
from control_plane.store import approvals as rows
from control_plane.store import bundles, people
from control_plane.store.db import now_us, writing
from control_plane.trust_list import THRESHOLD, TrustList, cooldown, newest, put, signed_for
from interlock.errors import Conflict, Denied, Malformed, NotFound, Untrusted
from interlock.event import Event, EventType
from interlock.signed import key_id, public_from_text
from killswitch import trust as supervisors

VOID = "void"
LOST = 64  # versions that a restored database may have forgotten


@dataclass(frozen=True)
class Pin:
    """A person and the public key (base64) that stands, or shall stand, in the list."""

    person: str
    name: str
    key: str

    def as_json(self) -> dict[str, str]:
        """Return what a request's body and the API show."""
        return {"person": self.person, "name": self.name, "key": self.key}

    @property
    def key_id(self) -> str:
        """Return the short id by which people compare keys."""
        return key_id(public_from_text(self.key))


@dataclass(frozen=True)
class Change:
    """The new list and what makes it new; `head` is the list that it replaces."""

    version: int
    persons: tuple[Pin, ...]
    added: tuple[Pin, ...]
    removed: tuple[Pin, ...]
    head: str

    def body(self) -> dict[str, Any]:
        """Return what an approval request shows and its digest binds; persons sign version and persons_digest."""
        return {
            **supervisors.approval_body(self.version, {p.person: p.key for p in self.persons}),
            **{name: [p.as_json() for p in getattr(self, name)] for name in ("persons", "added", "removed")},
        }


def pins_of(connection: Connection, held: TrustList) -> list[Pin]:
    """Return the pinned persons of a list with their names."""
    found = [(p, people.by_id(connection, p["person"])) for p in held.persons]
    return [Pin(p["person"], one.name if one else p["person"], p["key"]) for p, one in found]


def signing(connection: Connection, held: TrustList) -> list[Pin]:
    """Return those pinned persons whose votes count now: enabled officers with the very key that is pinned."""
    able = []
    for pin in pins_of(connection, held):
        person = people.by_id(connection, pin.person)
        if approvals.able(connection, person) and person is not None and person.person_key == pin.key:
            able.append(pin)
    return able


def waiting(connection: Connection, held: TrustList) -> list[Pin]:
    """Return the enabled officers with a person key who are not pinned, oldest first."""
    found = [people.by_id(connection, p) for p, _ in bundles.officers(connection) if p not in held.keys]
    return [Pin(p.id, p.name, p.person_key) for p in found if p is not None and approvals.able(connection, p)]


def propose(connection: Connection, add: Sequence[str], remove: Sequence[str], seen: Iterable[int] = ()) -> Change:
    """Return the change that these names mean.

    Args: `seen` the versions that nodes reported. Raises Malformed, NotFound, Denied (``denied.no_role``)
    or Conflict (``bootstrap``, ``pinned``, ``not_pinned``, ``trust_threshold``, ``signers``).
    """
    held = newest(connection)
    if not held.ready:
        raise Conflict("the first two officers are pinned by themselves when they enrol", code="bootstrap",
                       next_step="invite safety officers")
    if not (add or remove) or set(add) & set(remove):
        raise Malformed("a change adds or removes persons, nobody both ways", code="trust_change")
    present = {p.name: p for p in pins_of(connection, held)}
    gone = [_pinned(present, name) for name in dict.fromkeys(remove)]
    fresh = [_fresh(connection, held, name) for name in dict.fromkeys(add)]
    stay = [p for p in present.values() if p not in gone]
    if len(stay) + len(fresh) < THRESHOLD:
        raise Conflict(f"{THRESHOLD} officers or more stay pinned", code="trust_threshold",
                       next_step="add another officer in the same change")
    if len(signing(connection, held)) < THRESHOLD:
        raise Conflict("fewer than two pinned officers can sign: nodes would refuse any change", code="signers",
                       next_step="join the nodes again, see docs/runbooks/officers.md")
    top = max(v for v in (held.version, *seen) if v <= held.version + LOST)
    return Change(top + 1, (*stay, *fresh), tuple(fresh), tuple(gone), held.head)


def _pinned(present: dict[str, Pin], name: str) -> Pin:
    if name not in present:
        raise Conflict("one of these persons is not pinned", code="not_pinned", next_step="see interlock trust show",
                       details={"name": name})
    return present[name]


def _fresh(connection: Connection, held: TrustList, name: str) -> Pin:
    person = people.by_name(connection, name)
    if person is None:
        raise NotFound("no such person", code="person", next_step="see interlock trust show", details={"name": name})
    if person.id in held.keys:
        raise Conflict("one of these persons is pinned already", code="pinned", next_step="see interlock trust show",
                       details={"name": name})
    if not approvals.able(connection, person) or not person.person_key:
        raise Denied("only an enabled safety officer with a person key is pinned", code="no_role",
                     next_step="invite the person as safety_officer", details={"name": name})
    return Pin(person.id, person.name, person.person_key)


def settle(parts: Parts, now: approvals.Standing) -> TrustList:
    """Publish the list of a request that has just got its votes; nodes get it with their next heartbeats.

    Raises what `approvals.use` raises, Denied (a new person is no officer any more) or Untrusted (a supervisor would
    refuse it); the request is void then.
    """
    request = now.request
    try:
        with writing(parts.engine) as connection:
            return _publish(parts, connection, request)
    except BaseException:
        with writing(parts.engine) as connection:
            rows.close(connection, request.id, VOID)
        raise


def _publish(parts: Parts, connection: Connection, request: rows.Request) -> TrustList:
    held = newest(connection)
    now = approvals.use(connection, request.id, kind=approvals.TRUST, bound=request.digest, head=held.head)
    for row in request.body["added"]:
        if _fresh(connection, held, row["name"]).as_json() != row:
            raise Conflict("a person of this list has another key now", code="approval_changed", next_step="ask again")
    persons = [{"person": p["person"], "key": p["key"]} for p in request.body["persons"]]
    made = TrustList(int(request.body["version"]), persons, list(approvals.signatures(connection, now)),
                     cooldown(held, parts.settings))
    check(parts, held, made)
    put(connection, made, now_us())
    parts.ledger.record(Event(EventType.TRUST_CHANGED, "control", facts={
        "version": made.version, "persons": sorted(made.keys), "request": request.id, "asked_by": request.asked_by,
        "added": [p["person"] for p in request.body["added"]], "approvers": sorted(now.approvers),
        "removed": [p["person"] for p in request.body["removed"]], "reason": request.reason}), connection)
    return made


def check(parts: Parts, held: TrustList, made: TrustList) -> None:
    """Raise Untrusted, Conflict or Malformed where a supervisor with the list `held` would refuse `made`."""
    old, new = (signed_for("site", one, parts.signers, parts.settings, []) for one in (held, made))
    accepted = supervisors.replace(supervisors.first(old), new)
    if accepted.persons != made.keys:
        raise Untrusted("a supervisor would read another list", code="trust")


def alarm(connection: Connection, held: TrustList) -> str:
    """Return why the present list is not good enough for its purpose, empty when it is."""
    count = len(signing(connection, held))
    if count < THRESHOLD:
        return f"{count} pinned officers can sign: no stop can be resumed"
    if count == THRESHOLD:
        return "two pinned officers can sign: a stop that one of them gives cannot be resumed; pin a third"
    return ""
