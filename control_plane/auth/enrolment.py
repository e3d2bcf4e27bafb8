"""Enrolment through a one-time link: password, person key, second factor; active only after one right code.

Rules: until the code is confirmed nobody can sign in with what was chosen; roles come from the link's row,
never from the request; link, factor, roles, session and record become durable together or not at all; no two
persons share a person key, else one could sign as two.
"""

from dataclasses import dataclass, replace

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from control_plane.auth import links, passwords, sessions, throttle, totp
from control_plane.auth.site import APPROVER, Site, state
from control_plane.store import people
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Call, Resource, Subject, new_id
from interlock.errors import Conflict, Malformed
from interlock.event import Event, EventType
from interlock.signed import public_from_text, public_text
from policy.decide import Facts


@dataclass(frozen=True)
class Begun:
    """A pending enrolment: the authenticator's secret, shown to this person once."""

    person: str
    totp_secret: str
    totp_uri: str


def _chosen(link: people.Link, name: str) -> str:
    if link.kind == links.INVITATION:
        if name not in ("", link.name):
            raise Malformed("the invitation is for another name", code="name", next_step="leave the name out")
        return link.name
    return links.checked_name(name)


def begin(site: Site, secret: str, name: str, password: str, person_key: str, source_ip: str) -> Begun:
    """Take password and public person key, and hand out a second factor that is not active yet.

    May be repeated with the same link until it is confirmed. Raises Untrusted (link), Malformed (name,
    password, key), Conflict (name or key taken) or TooMany.
    """
    throttle.charge(site.engine, throttle.for_link(source_ip))
    with reading(site.engine) as connection:
        link = links.open_link(connection, secret)
    wanted = _chosen(link, name)
    passwords.check_new(password, wanted)
    key = _key(link, person_key)
    factor = totp.new_secret()
    person = people.Person(
        link.person or new_id("per"), wanted, link.tenant, "person", "", passwords.hashed(password), None, -1, False,
        key, False, now_us(),
    )
    person = replace(person, totp_sealed=totp.seal(site.kek, person.id, factor))
    try:
        with writing(site.engine) as connection:
            _keep(connection, secret, person)
            throttle.succeeded(connection, throttle.for_link(source_ip))
    except IntegrityError:
        raise Conflict("this name is taken", code="name", next_step="choose another name") from None
    return Begun(person.id, factor, totp.uri(factor, wanted))


def _key(link: people.Link, person_key: str) -> str:
    """Return the public person key; a browser has none, which is enough for everybody but an approver."""
    if person_key or APPROVER in link.role_names:
        return public_text(public_from_text(person_key))
    return ""


def _keep(connection: Connection, secret: str, person: people.Person) -> None:
    link = links.open_link(connection, secret)  # again, under the write lock
    if person.person_key and any(p.id != person.id for p in people.by_key(connection, person.person_key)):
        raise Conflict("another person has this person key", code="person_key", next_step="make a key of your own")
    if not people.bind_link(connection, link.hash, person.id):
        raise Conflict("this enrolment was begun elsewhere at the same moment", code="enrolment", next_step="try again")
    if not people.replace_pending(connection, person):
        people.add(connection, person)


def confirm(site: Site, secret: str, code: str, source_ip: str, client: str = "cli") -> tuple[str, people.Person]:
    """Confirm with one code; the link is used up here. Return (session credential, person).

    Raises Untrusted (link, code), Conflict, TooMany, or what the gate raises.
    """
    throttle.charge(site.engine, throttle.for_link(source_ip))
    with reading(site.engine) as connection:
        link = links.open_link(connection, secret)
        person = people.by_id(connection, link.person)
        facts = Facts(bundle_age_ms=0, state=state(connection))
    if person is None:
        raise links.no_link()
    limits = throttle.for_code(person.id, source_ip)
    throttle.charge(site.engine, limits)
    subject = Subject(person.id, person.tenant, "person", person.id)
    what = Resource("person", person.name, person.tenant)
    site.gate.ask(Call(Action.ENROL, subject, what, source_ip=source_ip), facts)
    with writing(site.engine) as connection:
        totp.accept(connection, site.kek, person, code)
        session = _finish(connection, link, person, client)
        throttle.succeeded(connection, (*limits, *throttle.for_link(source_ip)))
        site.ledger.record(_enrolled(link, person, source_ip), connection)
    return session, person


def _finish(connection: Connection, link: people.Link, person: people.Person, client: str) -> str:
    """Use the link up and make the person real; the link's one statement decides among parallel tries."""
    if not people.use_link(connection, link.hash, person.id, now_us()):
        raise links.no_link()
    if link.kind == links.BOOTSTRAP and people.site_fact(connection, links.ENROLLED_FACT):
        raise links.bootstrapped()
    if link.kind != links.INVITATION:
        people.put_site_fact(connection, links.ENROLLED_FACT, person.id)
    people.activate(connection, person.id)
    people.set_roles(connection, person.id, link.tenant, frozenset(link.role_names))
    return sessions.begin(connection, person.id, factor=True, client=client)


def _enrolled(link: people.Link, person: people.Person, source_ip: str) -> Event:
    facts = {
        "name": person.name, "roles": list(link.role_names), "by": link.made_by, "link": link.kind,
        "person_key": person.person_key, "source_ip": source_ip,
    }
    return Event(EventType.ENROLLED, person.id, person.tenant, facts=facts)
