"""Queries about sessions, proofs of the second factor, API keys and throttles.

Only hashes of credentials are stored. What may be used once is used by ONE conditional UPDATE.
"""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from control_plane.store.tables import api_keys, people, sessions, step_ups, throttles


@dataclass(frozen=True)
class Session:
    """One session; a half login has `factor` False. Times in microseconds, 0 = not ended."""

    hash: str
    person: str
    client: str
    factor: bool
    created_us: int
    seen_us: int
    ended_us: int


@dataclass(frozen=True)
class Proof:
    """A second factor that was shown for one action on one digest."""

    id: str
    session: str
    action: str
    bound: str
    at_us: int
    used_us: int


@dataclass(frozen=True)
class ApiKey:
    """An API key without its secret."""

    id: str
    hash: str
    person: str
    name: str
    scopes: tuple[str, ...]
    created_us: int
    expires_us: int
    used_us: int
    revoked_us: int


@dataclass(frozen=True)
class Throttle:
    """Failures of one key since `window_us`; locked until `locked_us`."""

    key: str
    failures: int
    window_us: int
    locked_us: int


def add_session(connection: Connection, session: Session) -> None:
    """Insert a session."""
    connection.execute(insert(sessions).values(**vars(session)))


def session_of(connection: Connection, hash_: str) -> Session | None:
    """Return the session of that hash, ended ones included."""
    row = connection.execute(select(sessions).where(sessions.c.hash == hash_)).one_or_none()
    return None if row is None else Session(**row._mapping)


def touch_session(connection: Connection, hash_: str, now_us: int) -> None:
    """Note that the session was used; an ended one stays ended."""
    connection.execute(
        update(sessions).where(sessions.c.hash == hash_, sessions.c.ended_us == 0, sessions.c.seen_us < now_us)
        .values(seen_us=now_us)
    )


def end_session(connection: Connection, hash_: str, now_us: int) -> bool:
    """End one session; False when it had ended."""
    done = connection.execute(
        update(sessions).where(sessions.c.hash == hash_, sessions.c.ended_us == 0).values(ended_us=now_us)
    )
    return done.rowcount == 1


def end_sessions(connection: Connection, person: str, now_us: int) -> int:
    """End every session of a person; return how many."""
    done = connection.execute(
        update(sessions).where(sessions.c.person == person, sessions.c.ended_us == 0).values(ended_us=now_us)
    )
    return done.rowcount


def add_proof(connection: Connection, proof: Proof) -> None:
    """Insert a proof."""
    connection.execute(insert(step_ups).values(**vars(proof)))


def proof_of(connection: Connection, proof: str) -> Proof | None:
    """Return the proof of that id."""
    row = connection.execute(select(step_ups).where(step_ups.c.id == proof)).one_or_none()
    return None if row is None else Proof(**row._mapping)


def use_proof(connection: Connection, proof: Proof, now_us: int) -> bool:
    """Use a proof up in one statement; False when it was used."""
    done = connection.execute(
        update(step_ups).where(
            step_ups.c.id == proof.id, step_ups.c.session == proof.session, step_ups.c.action == proof.action,
            step_ups.c.bound == proof.bound, step_ups.c.used_us == 0,
        ).values(used_us=now_us)
    )
    return done.rowcount == 1


def _key(row: Row[Any]) -> ApiKey:
    return ApiKey(**{**row._mapping, "scopes": tuple(json.loads(row.scopes))})


def add_key(connection: Connection, key: ApiKey) -> None:
    """Insert an API key."""
    connection.execute(insert(api_keys).values(**{**vars(key), "scopes": json.dumps(list(key.scopes))}))


def key_of(connection: Connection, key: str) -> ApiKey | None:
    """Return the API key of that id, revoked ones included."""
    row = connection.execute(select(api_keys).where(api_keys.c.id == key)).one_or_none()
    return None if row is None else _key(row)


def keys_of(connection: Connection, person: str) -> list[ApiKey]:
    """Return the API keys of a person, newest first."""
    wanted = select(api_keys).where(api_keys.c.person == person).order_by(api_keys.c.created_us.desc(), api_keys.c.id)
    return [_key(row) for row in connection.execute(wanted)]


def live_keys(connection: Connection, now_us: int, person: str = "") -> list[tuple[ApiKey, str]]:
    """Return (key, tenant of its person) of every key that lives, of enrolled persons who are not disabled.

    Args: `person` only this one's.
    """
    wanted = (
        select(api_keys, people.c.tenant).join(people, people.c.id == api_keys.c.person)
        .where(api_keys.c.revoked_us == 0, api_keys.c.expires_us > now_us, people.c.totp_active.is_(True),
               people.c.disabled.is_(False)).order_by(api_keys.c.id)
    )
    if person:
        wanted = wanted.where(api_keys.c.person == person)
    found = []
    for row in connection.execute(wanted):
        columns = {name: value for name, value in row._mapping.items() if name != "tenant"}
        found.append((ApiKey(**{**columns, "scopes": tuple(json.loads(row.scopes))}), str(row.tenant)))
    return found


def touch_key(connection: Connection, key: str, now_us: int) -> None:
    """Note the last use."""
    connection.execute(update(api_keys).where(api_keys.c.id == key).values(used_us=now_us))


def revoke_key(connection: Connection, key: str, person: str, now_us: int) -> bool:
    """Revoke a key of that person; False when there is none or it was revoked."""
    done = connection.execute(
        update(api_keys).where(api_keys.c.id == key, api_keys.c.person == person, api_keys.c.revoked_us == 0)
        .values(revoked_us=now_us)
    )
    return done.rowcount == 1


def revoke_keys(connection: Connection, person: str, now_us: int) -> int:
    """Revoke every key of a person; return how many."""
    done = connection.execute(
        update(api_keys).where(api_keys.c.person == person, api_keys.c.revoked_us == 0).values(revoked_us=now_us)
    )
    return done.rowcount


def throttle_of(connection: Connection, key: str) -> Throttle | None:
    """Return the counter under that key."""
    row = connection.execute(select(throttles).where(throttles.c.key == key)).one_or_none()
    return None if row is None else Throttle(**row._mapping)


def put_throttle(connection: Connection, throttle: Throttle) -> None:
    """Write a counter (inside a write transaction)."""
    values = {k: v for k, v in vars(throttle).items() if k != "key"}
    done = connection.execute(update(throttles).where(throttles.c.key == throttle.key).values(**values))
    if done.rowcount == 0:
        connection.execute(insert(throttles).values(**vars(throttle)))


def forget(connection: Connection, before_us: int) -> int:
    """Drop counters, proofs and sessions that were last of use before `before_us`; return how many.

    Whoever guesses names makes a row with each; what happened stands in the ledger, not here.
    """
    dead = (
        delete(throttles).where(throttles.c.window_us < before_us, throttles.c.locked_us < before_us),
        delete(step_ups).where(step_ups.c.at_us < before_us),
        delete(sessions).where(sessions.c.created_us < before_us, sessions.c.seen_us < before_us),
    )
    return sum(connection.execute(statement).rowcount for statement in dead)
