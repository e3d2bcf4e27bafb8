"""Sessions: an opaque 256-bit credential, stored hashed, new at each step of a sign-in.

Rules: a half login serves the second factor only; idle 1 h, absolute 12 h, half login 10 min; ended at once
when the person signs out, is disabled, or gets another password or role. Sources: ASVS 5.0 7.2, 7.4.
"""

import contextlib
import secrets

from sqlalchemy import Connection, Engine

from control_plane.store import people
from control_plane.store import sessions as rows
from control_plane.store.db import now_us, writing
from interlock.canon import digest_bytes
from interlock.errors import Unavailable, Untrusted

PREFIX = "ils_"
_SECOND = 1_000_000
IDLE_US, ABSOLUTE_US, HALF_US = 3600 * _SECOND, 12 * 3600 * _SECOND, 600 * _SECOND
_TOUCH_US = 30 * _SECOND


def hash_of(credential: str) -> str:
    """Return the form under which a credential of 256 random bits is stored (ASVS 6.5.2)."""
    return digest_bytes(credential.encode(errors="replace"))


def begin(connection: Connection, person: str, *, factor: bool, client: str) -> str:
    """Open a session and return its credential, which is stored nowhere. `client`: cli or console."""
    credential = PREFIX + secrets.token_urlsafe(32)
    now = now_us()
    rows.add_session(connection, rows.Session(hash_of(credential), person, client, factor, now, now, 0))
    return credential


def no_session() -> Untrusted:
    """Return the one refusal for a credential that is unknown, ended, idle or too old."""
    return Untrusted("you are not signed in", code="session", next_step="sign in: interlock login NAME")


def live(session: rows.Session, now: int) -> bool:
    """Return whether the session may still be used at `now` (microseconds)."""
    if session.ended_us or now - session.seen_us >= IDLE_US:
        return False
    return now - session.created_us < (ABSOLUTE_US if session.factor else HALF_US)


def current(connection: Connection, credential: str) -> tuple[rows.Session, people.Person]:
    """Return the live session of a credential and its person; raises Untrusted (``untrusted.session``)."""
    session = rows.session_of(connection, hash_of(credential))
    if session is None or not live(session, now_us()):
        raise no_session()
    person = people.by_id(connection, session.person)
    if person is None or not person.enrolled:
        raise no_session()
    return session, person


def touch(engine: Engine, session: rows.Session) -> None:
    """Note that the session is in use; a write at most every 30 s. A database that takes no write refuses nobody."""
    now = now_us()
    if now - session.seen_us >= _TOUCH_US:
        with contextlib.suppress(Unavailable), writing(engine) as connection:
            rows.touch_session(connection, session.hash, now)
