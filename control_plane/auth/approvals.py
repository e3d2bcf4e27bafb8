"""Approvals by other persons, bound to the digest of what they saw.

Rules:
1. A vote counts for distinct persons other than who asked, who owns it and, for a resume, who stopped; for a
   version, other than who registered it and who owns its run (I11).
2. It binds to the request's digest, and to a head where the request names one: a resume's to the head of the
   order log, a change of trust's to the list in force (I12).
3. Everything is asked again at use: open, not expired, same digest, same head, and every approver is still
   enrolled and still an approver. One refusal ends the request.
4. A request is used once, by one statement. UNIQUE(request, person) settles parallel votes.
5. A vote on a resume or a change of trust is a pinned person's, with his own signature by the pinned key, checked
   at the vote and again at use: nodes count nobody else. The control plane alone resumes and pins nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from control_plane.auth.site import ADMINISTRATOR, APPROVER
from control_plane.store import approvals as rows
from control_plane.store import bundles, people
from control_plane.store.db import now_us
from interlock.call import new_id
from interlock.canon import digest
from interlock.errors import ApprovalRequired, Conflict, Denied, Malformed, NotFound, Refusal, Untrusted
from interlock.signed import RESUME_APPROVAL, TRUST_APPROVAL, Signed, key_id, public_from_text, verify

LAUNCH, RESUME, TRUST, VERSION = "launch", "resume", "trust", "version"
_SECOND = 1_000_000
LIFE_S = {LAUNCH: 86_400, RESUME: 3_600, TRUST: 86_400, VERSION: 7 * 86_400}
SIGNED = frozenset({RESUME, TRUST})  # kinds that persons sign with their keys
FLOOR = {LAUNCH: 1, RESUME: 2, TRUST: 2, VERSION: 1}  # never fewer, whatever a caller asks for


@dataclass(frozen=True)
class Standing:
    """Where a request stands now. `approvers` are ids of persons whose votes count; `void` says why others do not."""

    request: rows.Request
    approvers: tuple[str, ...]
    void: tuple[tuple[str, str], ...]

    @property
    def given(self) -> int:
        """Return how many persons' approvals count at this moment."""
        return len(self.approvers)

    @property
    def missing(self) -> int:
        """Return how many further persons are needed."""
        return max(0, self.request.needed - self.given)


def new_request_id() -> str:
    """Return an id for a request whose body names it (a resume's does)."""
    return new_id("req")


def ask(
    connection: Connection, *, kind: str, body: Mapping[str, Any], tenant: str, asked_by: str, owner: str,
    needed: int, reason: str = "", head: str = "", life_s: int | None = None, request: str = "",
) -> rows.Request:
    """Leave a request behind; the same person's open request for the same digest and head is returned instead.

    Args: `body` what is voted on (a plan, or ``{request, clears, head}`` of a resume), its digest is the bound;
    `life_s` seconds, at most those of the kind; `request` an id from `new_request_id`. Raises Malformed.
    """
    if kind not in LIFE_S:
        raise Malformed("unknown kind of an approval request", code="approval")
    now, bound = now_us(), digest(dict(body))
    old = rows.same(connection, kind, bound, asked_by, now)
    if old is not None and old.head == head:
        return old
    life = max(1, min(LIFE_S[kind], life_s if life_s is not None else LIFE_S[kind]))
    made = rows.Request(
        request or new_request_id(), kind, bound, dict(body), tenant, asked_by, owner, reason[:1000],
        max(needed, FLOOR[kind]), now, now + life * _SECOND, rows.OPEN, head,
    )
    rows.add(connection, made)
    return made


def _actor(text: str) -> str:
    """Return the person in an actor of a stop order (``per_…`` or ``person:per_…``)."""
    return text.rpartition(":")[2]


def excluded(connection: Connection, request: rows.Request) -> frozenset[str]:
    """Return the persons whose vote never counts on this request."""
    barred = {request.asked_by, request.owner}
    if request.kind == RESUME:
        clears = request.body.get("clears")
        stops = [str(c) for c in clears] if isinstance(clears, list) else []
        barred |= {_actor(a) for a in rows.stopped_by(connection, stops)}
    if request.kind == VERSION:
        barred |= rows.made_by(connection, str(request.body.get("version", "")))
    return frozenset(barred - {""})


def able(connection: Connection, person: people.Person | None) -> bool:
    """Return whether this person is an approver now."""
    if person is None or not person.enrolled:
        return False
    held = people.roles_of(connection, person.id, person.tenant)
    return APPROVER in held and ADMINISTRATOR not in held


def _pinned(connection: Connection, person: people.Person | None) -> bool:
    """Return whether nodes are told to believe the very key that this person registered."""
    if person is None or not person.person_key:
        return False
    return bundles.pinned(connection).get(person.id) == person.person_key


def _statement(request: rows.Request, person: str) -> tuple[str, dict[str, Any]]:
    """Return the format and the body that this person signs: of a trust change, what its version and list are."""
    if request.kind == TRUST:
        return TRUST_APPROVAL, {name: request.body[name] for name in ("version", "persons_digest")}
    return RESUME_APPROVAL, {**request.body, "person": person}


def _verified(request: rows.Request, person: people.Person, signed: object) -> dict[str, Any]:
    """Return the signed approval after checking key and statement; raises Untrusted or Malformed."""
    value = Signed.from_json(signed)
    key = public_from_text(person.person_key)
    format_, wanted = _statement(request, person.id)
    if verify(value, format_, {key_id(key): key}) != wanted:
        raise Untrusted("the signature is over something else than this request", code="approval",
                        next_step="read the request again and sign its present body")
    return value.as_json()


def standing(connection: Connection, request: rows.Request) -> Standing:
    """Count the votes as of now: roles, accounts and signatures of the approvers are asked again."""
    barred, good, void = excluded(connection, request), [], []
    for vote in rows.votes(connection, request.id):
        person = people.by_id(connection, vote.person)
        if not vote.approve:
            continue
        if vote.person in barred:
            void.append((vote.person, "asked, owns or stopped it"))
        elif person is None or not able(connection, person):
            void.append((vote.person, "is no approver any more"))
        elif request.kind in SIGNED and not _pinned(connection, person):
            void.append((vote.person, "is not pinned on the nodes"))
        elif request.kind in SIGNED and not _signature_holds(request, person, vote.signed):
            void.append((vote.person, "the signature does not verify against the registered key"))
        else:
            good.append(vote.person)
    return Standing(request, tuple(dict.fromkeys(good)), tuple(void))


def _signature_holds(request: rows.Request, person: people.Person, signed: object) -> bool:
    try:
        _verified(request, person, signed)
    except Refusal:
        return False
    return True


def found(connection: Connection, request: str) -> rows.Request:
    """Return the request of that id; raises NotFound."""
    one = rows.one(connection, request)
    if one is None:
        raise NotFound("no such approval request", code="approval")
    return one


def check_open(request: rows.Request, head: str | None) -> None:
    """Refuse a request that is closed, expired or bound to another head. Raises Conflict (409).

    Args: `head` the present head that requests of this kind are bound to, None when there is none.
    """
    if request.state != rows.OPEN:
        raise Conflict(f"this request is {request.state}", code=f"approval_{request.state}", next_step="ask again")
    if now_us() >= request.expires_us:
        raise Conflict("this request has expired", code="approval_expired", next_step="ask again")
    if request.head and request.head != head:
        raise Conflict("what this is about moved since it was asked; nobody approves what was not seen",
                       code="approval_changed", next_step="ask again")


_UNPINNED = "no node knows your person key: only pinned officers sign this"


def why_not(connection: Connection, request: rows.Request, person: str) -> str:
    """Return why this person cannot vote on it, empty when he can (the gate's own reasons apart)."""
    if request.state != rows.OPEN:
        return f"it is {request.state}"
    if now_us() >= request.expires_us:
        return "it has expired: ask again"
    if person in excluded(connection, request):
        return "you asked for it, own it or gave the stop: another person must vote"
    if not able(connection, people.by_id(connection, person)):
        return f"only {APPROVER} votes, and nobody who administers people"
    if request.kind in SIGNED and not _pinned(connection, people.by_id(connection, person)):
        return _UNPINNED
    if any(v.person == person for v in rows.votes(connection, request.id)):
        return "you have voted"
    return ""


def check_voter(connection: Connection, request: rows.Request, person: str) -> None:
    """Refuse a person whose vote can never count.

    Raises Denied (``denied.self_approval``, ``denied.no_role``, ``denied.unpinned``).
    """
    if person in excluded(connection, request):
        raise Denied("you asked for it, own it or gave the stop: your vote does not count", code="self_approval",
                     next_step="another person must approve")
    if not able(connection, people.by_id(connection, person)):
        raise Denied(f"only {APPROVER} votes, and nobody who administers people", code="no_role",
                     next_step="ask a safety officer")
    if request.kind in SIGNED and not _pinned(connection, people.by_id(connection, person)):
        raise Denied(_UNPINNED, code="unpinned",
                     next_step="see interlock trust show; an administrator asks: interlock trust change --add NAME")


def vote(
    connection: Connection, request: rows.Request, person: people.Person, *, approve: bool, reason: str = "",
    signed: object = None, head: str | None = None,
) -> Standing:
    """Cast one vote and return where the request stands now.

    Raises Conflict (closed, expired, changed, voted), Denied (self approval, no role, not pinned), Untrusted or
    Malformed (signature of a resume or a trust change).
    """
    check_open(request, head)
    check_voter(connection, request, person.id)
    proof = _verified(request, person, signed) if approve and request.kind in SIGNED else None
    try:
        with connection.begin_nested():
            rows.add_vote(connection, request.id, person.id, approve=approve, reason=reason[:1000], signed=proof,
                          now_us=now_us())
    except IntegrityError:
        raise Conflict("you have voted on this request", code="voted") from None
    if not approve:
        rows.close(connection, request.id, rows.REFUSED)
    return standing(connection, found(connection, request.id))


def use(
    connection: Connection, request: str, *, kind: str, bound: str, head: str | None = None, asked_by: str = ""
) -> Standing:
    """Use an approval up for exactly the digest `bound`, after asking everything again.

    Call it in the transaction of the effect. Raises NotFound, Conflict (another digest, closed, expired, head
    moved, used by a parallel call) or ApprovalRequired (details: request, needed, given).
    """
    one = found(connection, request)
    if one.kind != kind or one.digest != bound or asked_by not in ("", one.asked_by):
        raise Conflict("the approval is for something else: a byte outside it needs a new one",
                       code="approval_changed", next_step="ask for a new approval of exactly this")
    check_open(one, head)
    now = standing(connection, one)
    if now.given < one.needed:
        raise missing(now)
    if not rows.close(connection, request, rows.USED):
        raise Conflict("the approval was used by a parallel call", code="approval_used", next_step="ask again")
    return now


def missing(now: Standing) -> ApprovalRequired:
    """Return the refusal that names the request and how many persons are missing."""
    return ApprovalRequired(
        f"{now.missing} more person(s) must approve", next_step=f"interlock approve {now.request.id}",
        details={
            "request": now.request.id, "needed": now.request.needed, "given": now.given, "bound": now.request.digest,
        },
    )


def signatures(connection: Connection, now: Standing) -> tuple[dict[str, Any], ...]:
    """Return the Signed approvals of the persons who count, as JSON, for the resume order or the trust list."""
    return tuple(
        v.signed for v in rows.votes(connection, now.request.id) if v.person in now.approvers and v.signed is not None
    )
