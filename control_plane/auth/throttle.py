"""Counters against guessing: per account, per source address, for the whole site; one set for every path.

Rules: an attempt is charged BEFORE it is checked, so that parallel guesses gain nothing; success gives the
account's charge back, not the address's earlier ones; a lock answers 429 with `retry_after_s`, also to the
right code. STOP is never asked here: a session or key that exists goes on working under any storm.
The address is the transport's peer, never a header. Source: 63B-4 §3.2.2 (at most 100 failures in a row).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, Engine

from control_plane.store import sessions as rows
from control_plane.store.db import now_us, writing
from interlock.errors import TooMany

_SECOND = 1_000_000


@dataclass(frozen=True)
class Limit:
    """`failures` within `window_s` are let through; one more locks for `lock_s`."""

    key: str
    failures: int
    window_s: int = 900
    lock_s: int = 900


def _hashed(text: str) -> str:
    """Names come from the outside: keep them out of the table, and of bounded length."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32]


def for_password(name: str, source_ip: str) -> tuple[Limit, ...]:
    """Return the counters of one password attempt. One address locks an account for itself only."""
    account = _hashed(name)
    return (
        Limit(f"password:{account}:{source_ip[:64]}", 10),
        Limit(f"password:{account}", 100),
        *_everyone(source_ip),
    )


def for_code(person: str, source_ip: str, session: str = "") -> tuple[Limit, ...]:
    """Return the counters of one code attempt; a half login has its own, smaller one."""
    half = (Limit(f"half:{_hashed(session)}", 5),) if session else ()
    return (*half, Limit(f"code:{person}", 10), *_everyone(source_ip))


def for_link(source_ip: str) -> tuple[Limit, ...]:
    """Return the counters of one attempt to use a one-time secret."""
    return (Limit(f"link:{source_ip[:64]}", 50), Limit("link", 1000, 60, 60))


def _everyone(source_ip: str) -> tuple[Limit, ...]:
    return (Limit(f"ip:{source_ip[:64]}", 200), Limit("site", 5000, 300, 60))


def _locked(limit: Limit, until_us: int, now: int) -> TooMany:
    wait = max(1, -(-(until_us - now) // _SECOND))
    return TooMany(
        "too many failed attempts", next_step=f"try again in {wait} s; a session or key that you have still works",
        details={"retry_after_s": wait, "counter": limit.key.split(":")[0]},
    )


def _charge(connection: Connection, limit: Limit, now: int) -> TooMany | None:
    """Add one failure; return the refusal when the counter is, or now becomes, locked."""
    old = rows.throttle_of(connection, limit.key)
    if old is not None and old.locked_us > now:
        return _locked(limit, old.locked_us, now)
    stale = old is None or old.locked_us > 0 or abs(now - old.window_us) >= limit.window_s * _SECOND
    failures = 1 if stale or old is None else old.failures + 1
    window = now if stale or old is None else old.window_us
    locked = now + limit.lock_s * _SECOND if failures > limit.failures else 0
    rows.put_throttle(connection, rows.Throttle(limit.key, failures, window, locked))
    return _locked(limit, locked, now) if locked else None


def charge(engine: Engine, limits: Iterable[Limit]) -> None:
    """Charge one attempt to each counter before anything is checked.

    Raises TooMany (429, `retry_after_s`) when one is locked; the charges stay in any case.
    """
    with writing(engine) as connection:
        now = now_us()  # under the lock: an attempt that waited must not count as before the window
        refusals = [_charge(connection, limit, now) for limit in limits]
    for refusal in refusals:
        if refusal is not None:
            raise refusal


def succeeded(connection: Connection, limits: Iterable[Limit]) -> None:
    """Clear the account's counters; take this one attempt off those of the address and the site."""
    for limit in limits:
        old = rows.throttle_of(connection, limit.key)
        if old is None or old.locked_us:
            continue
        left = max(0, old.failures - 1) if limit.key.startswith(("ip:", "site", "link")) else 0
        rows.put_throttle(connection, rows.Throttle(old.key, left, old.window_us, 0))
