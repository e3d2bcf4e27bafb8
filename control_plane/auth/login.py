"""Sign-in: password, then code, each charged before it is checked; and what ends a sign-in.

Rules: the same words and the same work for an unknown name, a wrong password and a disabled account (I13);
password alone makes a half login that serves the second factor only (I7); every success makes a NEW session
id (I9); a change of password or roles and disabling end every session of the person in one transaction.
"""

import contextlib
from dataclasses import dataclass

from sqlalchemy import Connection

from control_plane.auth import passwords, sessions, throttle, totp
from control_plane.auth.links import checked_roles
from control_plane.auth.site import ADMINISTRATOR, APPROVER, Site, state
from control_plane.store import people
from control_plane.store import sessions as rows
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Call, Resource, Subject
from interlock.errors import Conflict, NotFound, NotRecorded, TooMany, Unavailable, Untrusted
from interlock.event import Event, EventType
from policy.decide import Facts


@dataclass(frozen=True)
class SignedIn:
    """A fresh session: its credential (shown once), the person, whether the second factor was given."""

    session: str
    person: people.Person
    factor: bool


def _refused(site: Site, claimed: str, reason: str, source_ip: str) -> None:
    """Record a failed sign-in with the identity claimed; a ledger that is down changes nothing."""
    shown = claimed[:64].encode("ascii", "backslashreplace").decode()
    event = Event(EventType.SIGN_IN_REFUSED, shown or "-", facts={"reason": reason, "source_ip": source_ip})
    with contextlib.suppress(NotRecorded, Unavailable):
        site.ledger.record(event)


def _ask_gate(site: Site, person: people.Person, source_ip: str) -> None:
    with reading(site.engine) as connection:
        roles = people.roles_of(connection, person.id, person.tenant)
        facts = Facts(roles=roles, bundle_age_ms=0, state=state(connection))
    subject = Subject(person.id, person.tenant, "person", person.id)
    what = Resource("person", person.name, person.tenant)
    site.gate.ask(Call(Action.SIGN_IN, subject, what, source_ip=source_ip), facts)


def _by_password(site: Site, name: str, password: str, source_ip: str) -> people.Person:
    limits = throttle.for_password(name, source_ip)
    throttle.charge(site.engine, limits)
    with reading(site.engine) as connection:
        person = people.by_name(connection, name)
    good = passwords.matches(person.password_hash if person else "", password)
    if person is None or not good or not person.enrolled:
        _refused(site, name, "password", source_ip)
        raise Untrusted("name or password is not valid", code="login", next_step="check both and try again")
    with writing(site.engine) as connection:
        throttle.succeeded(connection, limits)
    return person


def sign_in(
    site: Site, name: str, password: str, code: str | None, source_ip: str, client: str = "cli"
) -> SignedIn:
    """Sign in; without a code the session is a half login.

    Raises Untrusted (``untrusted.login``, ``untrusted.factor``), TooMany, or what the gate raises.
    """
    person = _by_password(site, name, password, source_ip)
    if code is None:
        _ask_gate(site, person, source_ip)
        with writing(site.engine) as connection:
            session = sessions.begin(connection, person.id, factor=False, client=client)
        return SignedIn(session, person, False)
    return _with_code(site, person, code, source_ip, client, "")


def complete(site: Site, credential: str, code: str, source_ip: str, client: str = "cli") -> SignedIn:
    """Give the second factor to a half login; a new session replaces it. Raises as `sign_in`.

    After 5 wrong codes the half login ends.
    """
    with reading(site.engine) as connection:
        session, person = sessions.current(connection, credential)
    if session.factor:
        raise sessions.no_session()
    try:
        return _with_code(site, person, code, source_ip, client, session.hash)
    except TooMany:
        with writing(site.engine) as connection:
            rows.end_session(connection, session.hash, now_us())
        raise


def _with_code(site: Site, person: people.Person, code: str, source_ip: str, client: str, half: str) -> SignedIn:
    limits = throttle.for_code(person.id, source_ip, half)
    throttle.charge(site.engine, limits)
    try:
        _ask_gate(site, person, source_ip)
        with writing(site.engine) as connection:
            totp.accept(connection, site.kek, person, code)
            if half and not rows.end_session(connection, half, now_us()):
                raise sessions.no_session()
            session = sessions.begin(connection, person.id, factor=True, client=client)
            throttle.succeeded(connection, limits)
            facts = {"name": person.name, "client": client, "source_ip": source_ip}
            site.ledger.record(Event(EventType.SIGNED_IN, person.id, person.tenant, facts=facts), connection)
    except Untrusted as refusal:
        _refused(site, person.name, refusal.code, source_ip)
        raise
    return SignedIn(session, person, True)


def sign_out(site: Site, session: str, person: people.Person) -> None:
    """End the session with that hash."""
    with writing(site.engine) as connection:
        if rows.end_session(connection, session, now_us()):
            _ended(site, connection, person, "signed out", person.id)


def _ended(site: Site, connection: Connection, person: people.Person, why: str, by: str) -> None:
    facts = {"why": why, "person": person.id}
    site.ledger.record(Event(EventType.SESSION_ENDED, by, person.tenant, facts=facts), connection)


def _cut_off(site: Site, connection: Connection, person: people.Person, why: str, by: str) -> None:
    rows.end_sessions(connection, person.id, now_us())
    _ended(site, connection, person, why, by)


def _known(connection: Connection, person: str) -> people.Person:
    found = people.by_id(connection, person)
    if found is None:
        raise NotFound("no such person", code="person")
    return found


def _another_administrator(connection: Connection, person: str) -> None:
    """Refuse to take the last administrator away. Raises Conflict."""
    held = {p.id for p in people.with_role(connection, ADMINISTRATOR)}
    if held == {person}:
        raise Conflict("this is the last administrator", code="last_administrator",
                       next_step="invite another administrator first")


def disable(site: Site, person: str, by: str) -> None:
    """Disable a person: sessions, API keys and links that he made end in the same transaction.

    Raises NotFound or Conflict (``conflict.last_administrator``).
    """
    with writing(site.engine) as connection:
        found = _known(connection, person)
        _another_administrator(connection, person)
        people.set_disabled(connection, person, True)
        rows.revoke_keys(connection, person, now_us())
        people.expire_links_of(connection, person, now_us())
        _cut_off(site, connection, found, "disabled", by)


def change_roles(site: Site, person: str, roles: frozenset[str], by: str) -> None:
    """Replace a person's roles; his sessions end in the same transaction.

    Raises NotFound, Malformed or Conflict (duties, person key, ``conflict.last_administrator``).
    """
    wanted = frozenset(checked_roles(roles)) if roles else frozenset()
    with writing(site.engine) as connection:
        found = _known(connection, person)
        if ADMINISTRATOR not in wanted:
            _another_administrator(connection, person)
            people.expire_links_of(connection, person, now_us())
        if APPROVER in wanted and not found.person_key:
            raise Conflict("an approver has a person key, and this person enrolled without one", code="person_key",
                           next_step="invite the person anew; the command interlock enrol makes the key")
        people.set_roles(connection, person, found.tenant, wanted)
        _cut_off(site, connection, found, "roles changed to " + (", ".join(sorted(wanted)) or "none"), by)


def change_password(site: Site, person: str, password: str, by: str) -> None:
    """Replace a password; every session ends, and the second factor is asked as before (I6)."""
    with reading(site.engine) as connection:
        found = _known(connection, person)
    passwords.check_new(password, found.name)
    fresh = passwords.hashed(password)
    with writing(site.engine) as connection:
        people.set_password(connection, person, fresh)
        _cut_off(site, connection, found, "password changed", by)
