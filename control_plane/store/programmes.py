"""Queries about partner programmes. A membership is live until it was ended or its last day has passed."""

from typing import Any

from sqlalchemy import Connection, Row, and_, insert, select, update

from control_plane.store.tables import people, programme_members


def _live(now_us: int) -> Any:
    return and_(programme_members.c.ended_us == 0, programme_members.c.until_us > now_us)


def put_member(
    connection: Connection, programme: str, person: str, *, organisation: str, until_us: int, by: str, now_us: int
) -> bool:
    """Enrol a person, or give a membership a new end; return whether he was no live member before."""
    was = person in {p for p, m in live(connection, now_us) if m == programme}
    values = {"organisation": organisation, "until_us": until_us, "by": by, "at_us": now_us, "ended_us": 0}
    same = (programme_members.c.programme == programme) & (programme_members.c.person == person)
    if connection.execute(update(programme_members).where(same).values(**values)).rowcount == 0:
        connection.execute(insert(programme_members).values(programme=programme, person=person, **values))
    return not was


def end_member(connection: Connection, programme: str, person: str, now_us: int) -> bool:
    """End a live membership in one statement; False when there is none."""
    same = (programme_members.c.programme == programme) & (programme_members.c.person == person)
    done = connection.execute(update(programme_members).where(same, _live(now_us)).values(ended_us=now_us))
    return done.rowcount == 1


def live(connection: Connection, now_us: int) -> list[tuple[str, str]]:
    """Return (person, programme) of every live membership of an enrolled, not disabled person."""
    wanted = (
        select(programme_members.c.person, programme_members.c.programme)
        .join(people, people.c.id == programme_members.c.person)
        .where(_live(now_us), people.c.totp_active.is_(True), people.c.disabled.is_(False))
        .order_by(programme_members.c.person, programme_members.c.programme)
    )
    return [(str(r.person), str(r.programme)) for r in connection.execute(wanted)]


def of_person(connection: Connection, person: str, now_us: int) -> frozenset[str]:
    """Return the programmes in which this person is a live member."""
    wanted = select(programme_members.c.programme).where(programme_members.c.person == person, _live(now_us))
    return frozenset(connection.execute(wanted).scalars())


def every(connection: Connection) -> list[Row[Any]]:
    """Return all memberships with the person's name and tenant, those that are over included."""
    wanted = (
        select(programme_members, people.c.name, people.c.tenant, people.c.disabled)
        .join(people, people.c.id == programme_members.c.person)
        .order_by(programme_members.c.programme, people.c.name)
    )
    return list(connection.execute(wanted))
