"""Resume orders: two persons lift exactly the stops they saw, and nothing else.

Rules (protocol.md §3, §4):
1. Each of at least two different persons signed ``{request, clears, head, person}`` with the key registered for
   him, and still is an enabled safety officer now.
2. None of them asked for one of these stops, none owns a run that one of these stops covered.
3. The order log's head is the one they signed: what came in between voids the request.
4. The cool-down since the newest of these stops has passed, and the database was not restored in between.
   Nothing resumes by itself later: what cannot be ordered at the second vote is void and asked anew.
5. The epoch is above every order's; the order log takes it put-if-absent, before the database and the push.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection

from control_plane.auth.approvals import Standing as Votes
from control_plane.auth.site import APPROVER
from control_plane.desk import OrderDesk
from control_plane.signing import Signers, pins
from control_plane.standing import Standing
from control_plane.store import approvals, orders, people, runs
from control_plane.store.db import now_us, reading, writing
from interlock.call import new_id, texts
from interlock.canon import digest
from interlock.errors import Conflict, Denied, Malformed, Unavailable, Untrusted
from interlock.event import Event, EventType
from interlock.order import Labels, ResumeApproval, ResumeOrder
from interlock.signed import RESUME, RESUME_APPROVAL, Signed, public_from_text, sign, verify

THRESHOLD = 2
VOID = "void"


@dataclass(frozen=True)
class Question:
    """What two persons are asked: which stops, at which head of the order log."""

    request: str
    clears: tuple[str, ...]
    head: str
    asked_us: int

    @classmethod
    def of(cls, request: approvals.Request) -> "Question":
        """Return the question of a stored request; raises Malformed."""
        return cls(request.id, texts(request.body, "clears"), request.head, request.asked_us)

    def body(self) -> dict[str, object]:
        """Return what each person signs, without his own name."""
        return {"request": self.request, "clears": list(self.clears), "head": self.head}

    def digest(self) -> str:
        """Return the digest that a vote and a second factor are bound to."""
        return digest(self.body())


@dataclass(frozen=True)
class Vote:
    """One person's signed approval, with what our store says about him now."""

    person: str
    key: str
    officer: bool
    signed: Signed


def ask(desk: OrderDesk, request: str, clears: Sequence[str], cooldown_ms: int) -> Question:
    """Return the question for these stops. Raises Conflict (not active), Malformed, Stale or Unavailable."""
    wanted = tuple(sorted(set(clears)))
    if not wanted:
        raise Malformed("a resume names the stops that it lifts", code="clears")
    with reading(desk.engine) as connection:
        standing = desk.granting(connection)
        accepted = max((_accepted_us(connection, i) for i in wanted), default=0)
    active = {s.id for s in standing.active}
    if not set(wanted) <= active:
        raise Conflict("one of these stops is not in force", code="not_stopped",
                       next_step="see interlock stops", details={"ids": sorted(set(wanted) - active)})
    _cooled(accepted, cooldown_ms)
    return Question(request, wanted, standing.head, now_us())


def check_vote(question: Question, vote: Vote) -> None:
    """Raise Untrusted or Denied unless this person signed exactly this question with his registered key."""
    body = verify(vote.signed, RESUME_APPROVAL, pins(public_from_text(vote.key)))
    if ResumeApproval.from_json(body) != ResumeApproval(question.request, question.clears, question.head, vote.person):
        raise Untrusted("an approval is for something else", code="approval", next_step="sign this very request")
    if not vote.officer:
        raise Denied("who approved is no enabled safety officer any more", code="approver")


def apart(persons: set[str], standing: Standing, clears: Sequence[str], labels: Sequence[Labels]) -> None:
    """Raise Denied (``denied.same_person``) when a person asked for one of the stops or owns a run under it."""
    for stop in (standing.stops[i] for i in clears):
        owners = {r.owner for r in labels if stop.scope.matches(r)}
        if persons & {stop.actor, *owners}:
            raise Denied("who asked for a stop, or owns a run under it, does not resume it", code="same_person",
                         next_step="ask an officer who is neither")


def order(desk: OrderDesk, grant: Ed25519PrivateKey, question: Question, votes: Sequence[Vote], cooldown_ms: int
          ) -> ResumeOrder:
    """Check everything and order the resume; returns it.

    Raises Denied, Untrusted, Conflict (the request is void, make a new one) or Unavailable, Stale (try later).
    """
    with reading(desk.engine) as connection:
        standing = desk.granting(connection)
        labels = [Labels.from_json(x) for x in runs.labels_of_all(connection)]
        recovered = int(people.site_fact(connection, "recovered_us") or 0)
        accepted = max((_accepted_us(connection, i) for i in question.clears), default=0)
    if question.head != standing.head:
        raise Conflict("the order log moved since this resume was asked for", code="head",
                       next_step="look again, and ask anew")
    if question.asked_us <= recovered:
        raise Conflict("the database was restored since this resume was asked for", code="recovered",
                       next_step="ask anew")
    if not set(question.clears) <= {s.id for s in standing.active}:
        raise Conflict("one of these stops is not in force any more", code="not_stopped")
    _enough(question, votes, standing, labels)
    _cooled(accepted, cooldown_ms)
    made = ResumeOrder(new_id("resume"), desk.next_epoch(), question.clears, question.head,
                       tuple(v.signed.as_json() for v in votes))
    desk.order_resume(sign(RESUME, made.as_json(), grant))
    desk.note(Event(EventType.RESUME_ORDERED, "control", facts={
        "order": made.id, "clears": list(made.clears), "epoch": made.epoch, "request": question.request,
        "persons": sorted(v.person for v in votes)}))
    return made


def _enough(question: Question, votes: Sequence[Vote], standing: Standing, labels: Sequence[Labels]) -> None:
    for vote in votes:
        check_vote(question, vote)
    persons, keys = {v.person for v in votes}, {v.key for v in votes}
    if min(len(persons), len(keys)) < THRESHOLD:
        raise Denied(f"{len(persons)} of {THRESHOLD} needed persons signed this resume", code="threshold",
                     next_step="let another safety officer approve")
    apart(persons, standing, question.clears, labels)


def _accepted_us(connection: Connection, stop: str) -> int:
    row = orders.one(connection, stop)
    return int(row.accepted_us) if row else now_us()


def _cooled(accepted_us: int, cooldown_ms: int) -> None:
    left = cooldown_ms - (now_us() - accepted_us) // 1000
    if left > 0:
        raise Unavailable("the cool-down after this stop has not passed", code="cooldown",
                          next_step=f"ask again in {left // 1000 + 1} s", details={"left_ms": left})


def settle(desk: OrderDesk, signers: Signers, now: Votes, cooldown_ms: int) -> ResumeOrder:
    """Order the resume of a request that has just got its votes. Raises as `order`; the request is void then."""
    request = now.request
    with reading(desk.engine) as connection:
        votes = _votes(connection, request, now.approvers)
    state = VOID
    try:
        made = order(desk, signers.grant, Question.of(request), votes, cooldown_ms)
        state = approvals.USED
    finally:
        with writing(desk.engine) as connection:
            approvals.close(connection, request.id, state)
    return made


def _votes(connection: Connection, request: approvals.Request, approvers: Sequence[str]) -> list[Vote]:
    found = []
    for vote in approvals.votes(connection, request.id):
        person = people.by_id(connection, vote.person)
        if person is None or vote.signed is None or vote.person not in approvers:
            continue
        officer = APPROVER in people.roles_of(connection, person.id, person.tenant) and not person.disabled
        found.append(Vote(person.id, person.person_key, officer, Signed.from_json(vote.signed)))
    return found


def readmit(desk: OrderDesk, signers: Signers, signed: Signed, persons: Sequence[dict[str, str]]) -> str:
    """Keep a resume that a node has applied and this order log does not know (a log that was lost); return its id.

    Args: `persons` the pinned ones. Raises Untrusted unless our grant key and two pinned persons signed it.
    """
    made = ResumeOrder.from_json(verify(signed, RESUME, signers.grant_pins))
    keys = {p["person"]: p["key"] for p in persons}
    good = set()
    for row in made.approvals:
        approval = ResumeApproval.from_json(Signed.from_json(row).body())
        if approval.person in keys and (approval.clears, approval.head) == (made.clears, made.head):
            verify(Signed.from_json(row), RESUME_APPROVAL, pins(public_from_text(keys[approval.person])))
            good.add(approval.person)
    if len(good) < THRESHOLD:
        raise Untrusted(f"{len(good)} of {THRESHOLD} needed persons signed this resume", code="threshold")
    return desk.order_resume(signed).id
