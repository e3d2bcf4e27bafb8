"""Queries about people, their roles and one-time links. Each takes the caller's open transaction.

Every single-use rule is ONE statement whose row count decides: a code, a link. Never read, then write.
"""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from control_plane.store.tables import links, people, roles, site


@dataclass(frozen=True)
class Person:
    """One row of people. `totp_last` is the last accepted timecode (30 s steps), -1 before the first."""

    id: str
    name: str
    tenant: str
    kind: str
    owner: str
    password_hash: str
    totp_sealed: bytes | None
    totp_last: int
    totp_active: bool
    person_key: str
    disabled: bool
    created_us: int

    @property
    def enrolled(self) -> bool:
        """Return whether this person confirmed a second factor and is not disabled."""
        return self.totp_active and not self.disabled


@dataclass(frozen=True)
class Link:
    """A one-time link: `kind` is bootstrap, recovery or invitation; `person` the pending enrolment."""

    hash: str
    kind: str
    name: str
    tenant: str
    role_names: tuple[str, ...]
    made_by: str
    expires_us: int
    used_us: int
    person: str


def _person(row: Row[Any] | None) -> Person | None:
    return None if row is None else Person(**row._mapping)


def by_name(connection: Connection, name: str) -> Person | None:
    """Return the person of that exact name."""
    return _person(connection.execute(select(people).where(people.c.name == name)).one_or_none())


def by_id(connection: Connection, person: str) -> Person | None:
    """Return the person of that id."""
    return _person(connection.execute(select(people).where(people.c.id == person)).one_or_none())


def by_key(connection: Connection, person_key: str) -> list[Person]:
    """Return everybody who registered that public person key (more than one is a fault)."""
    found = connection.execute(select(people).where(people.c.person_key == person_key)).all()
    return [Person(**row._mapping) for row in found]


def add(connection: Connection, person: Person) -> None:
    """Insert a person; IntegrityError when the name is taken."""
    connection.execute(insert(people).values(**vars(person)))


def replace_pending(connection: Connection, person: Person) -> bool:
    """Replace what a not yet confirmed person chose; False when the enrolment is confirmed already."""
    done = connection.execute(
        update(people).where(people.c.id == person.id, people.c.totp_active.is_(False)).values(
            name=person.name, password_hash=person.password_hash, totp_sealed=person.totp_sealed,
            totp_last=-1, person_key=person.person_key,
        )
    )
    return done.rowcount == 1


def activate(connection: Connection, person: str) -> bool:
    """Make the second factor active; False when it was."""
    done = connection.execute(
        update(people).where(people.c.id == person, people.c.totp_active.is_(False)).values(totp_active=True)
    )
    return done.rowcount == 1


def advance_timecode(connection: Connection, person: str, timecode: int) -> bool:
    """Use up every code up to `timecode` in one statement; False when it was used up before."""
    done = connection.execute(
        update(people).where(people.c.id == person, people.c.totp_last < timecode).values(totp_last=timecode)
    )
    return done.rowcount == 1


def set_password(connection: Connection, person: str, password_hash: str) -> None:
    """Replace the password hash."""
    connection.execute(update(people).where(people.c.id == person).values(password_hash=password_hash))


def set_disabled(connection: Connection, person: str, disabled: bool) -> None:
    """Disable or enable a person."""
    connection.execute(update(people).where(people.c.id == person).values(disabled=disabled))


def roles_of(connection: Connection, person: str, tenant: str) -> frozenset[str]:
    """Return the roles that are bound to the person in that tenant, as of this transaction."""
    wanted = select(roles.c.role).where(roles.c.person == person, roles.c.tenant == tenant)
    return frozenset(connection.execute(wanted).scalars())


def set_roles(connection: Connection, person: str, tenant: str, names: frozenset[str]) -> None:
    """Replace the roles of a person in a tenant."""
    connection.execute(delete(roles).where(roles.c.person == person, roles.c.tenant == tenant))
    for name in sorted(names):
        connection.execute(insert(roles).values(person=person, role=name, tenant=tenant))


def with_role(connection: Connection, role: str) -> list[Person]:
    """Return the enrolled, not disabled persons who hold `role` in their tenant, oldest first."""
    wanted = (
        select(people).join(roles, (roles.c.person == people.c.id) & (roles.c.tenant == people.c.tenant))
        .where(roles.c.role == role, people.c.totp_active.is_(True), people.c.disabled.is_(False))
        .order_by(people.c.created_us, people.c.id)
    )
    return [Person(**row._mapping) for row in connection.execute(wanted)]


def bindings(connection: Connection) -> list[tuple[str, str, str]]:
    """Return (person, tenant, role) of every enrolled, not disabled person (for the signed snapshot)."""
    wanted = (
        select(roles.c.person, roles.c.tenant, roles.c.role).join(people, people.c.id == roles.c.person)
        .where(people.c.totp_active.is_(True), people.c.disabled.is_(False)).order_by(roles.c.person, roles.c.role)
    )
    return [(r.person, r.tenant, r.role) for r in connection.execute(wanted)]


def disabled(connection: Connection) -> list[str]:
    """Return the ids of disabled persons (for the signed snapshot)."""
    wanted = select(people.c.id).where(people.c.disabled.is_(True)).order_by(people.c.id)
    return list(connection.execute(wanted).scalars())


def site_fact(connection: Connection, key: str) -> str:
    """Return the site's fact under `key`, empty when there is none."""
    return connection.execute(select(site.c.value).where(site.c.key == key)).scalar_one_or_none() or ""


def put_site_fact(connection: Connection, key: str, value: str) -> None:
    """Write the site's fact under `key` (inside a write transaction)."""
    if connection.execute(update(site).where(site.c.key == key).values(value=value)).rowcount == 0:
        connection.execute(insert(site).values(key=key, value=value))


def add_link(connection: Connection, link: Link) -> None:
    """Insert a link."""
    row = {**vars(link), "role_names": json.dumps(list(link.role_names))}
    connection.execute(insert(links).values(**row))


def link_of(connection: Connection, hash_: str) -> Link | None:
    """Return the link whose secret has that hash."""
    row = connection.execute(select(links).where(links.c.hash == hash_)).one_or_none()
    if row is None:
        return None
    return Link(**{**row._mapping, "role_names": tuple(json.loads(row.role_names))})


def bind_link(connection: Connection, hash_: str, person: str) -> bool:
    """Tie a fresh link to its pending person; False when another person is tied to it."""
    done = connection.execute(
        update(links).where(links.c.hash == hash_, links.c.person.in_(["", person])).values(person=person)
    )
    return done.rowcount == 1


def use_link(connection: Connection, hash_: str, person: str, now_us: int) -> bool:
    """Use the link up in one statement; False when it was used, ran out or belongs to another person."""
    done = connection.execute(
        update(links).where(
            links.c.hash == hash_, links.c.person == person, links.c.used_us == 0, links.c.expires_us > now_us
        ).values(used_us=now_us)
    )
    return done.rowcount == 1


def everybody(connection: Connection) -> list[Person]:
    """Return all persons by name, enrolled or not."""
    return [Person(**row._mapping) for row in connection.execute(select(people).order_by(people.c.name))]


def expire_links_of(connection: Connection, made_by: str, now_us: int) -> None:
    """End the unused links that this person made."""
    mine = (links.c.made_by == made_by) & (links.c.used_us == 0) & (links.c.expires_us > now_us)
    connection.execute(update(links).where(mine).values(expires_us=now_us))


def expire_links(connection: Connection, kind: str, now_us: int) -> None:
    """End the unused links of a kind (a new bootstrap link voids the older ones)."""
    connection.execute(
        update(links).where(links.c.kind == kind, links.c.used_us == 0, links.c.expires_us > now_us)
        .values(expires_us=now_us)
    )


def open_invitation(connection: Connection, name: str, now_us: int) -> bool:
    """Return whether an unused invitation for that name is still open."""
    wanted = select(links.c.hash).where(
        links.c.name == name, links.c.kind == "invitation", links.c.used_us == 0, links.c.expires_us > now_us
    )
    return connection.execute(wanted).first() is not None
