"""What sign-ins leave behind goes after a week; what is in use stays."""

from sqlalchemy import func, select

from control_plane.store import sessions as rows
from control_plane.store.db import now_us, reading, writing
from control_plane.store.tables import sessions, step_ups, throttles
from control_plane.ticker import KEPT_US, Ticker
from tests.control_plane.conftest import House


def _count(house: House) -> tuple[int, int, int]:
    with reading(house.parts.engine) as connection:
        found = [connection.execute(select(func.count()).select_from(t)).scalar_one() for t in
                 (throttles, step_ups, sessions)]
    return found[0], found[1], found[2]


def test_counters_proofs_and_sessions_of_last_week_are_dropped(staffed: House) -> None:
    kept = _count(staffed)
    assert kept[2] > 0, "people are signed in"
    old = now_us() - KEPT_US - 1
    with writing(staffed.parts.engine) as connection:
        person = connection.execute(select(sessions.c.person).limit(1)).scalar_one()
        for n in range(50):
            rows.put_throttle(connection, rows.Throttle(f"password:{n}", 1, old, 0))
        rows.put_throttle(connection, rows.Throttle("password:locked", 11, old, now_us() + 900_000_000))
        rows.put_throttle(connection, rows.Throttle("password:fresh", 1, now_us(), 0))
        rows.add_proof(connection, rows.Proof("stp_old", "s", "launch", "sha256:0", old, 0))
        rows.add_session(connection, rows.Session("sha256:old", person, "cli", True, old, old, 0))
    ticker = Ticker.of(staffed.parts)
    job = next(j for j in ticker.jobs if j.name == "sign-ins")
    job.act()
    assert _count(staffed) == (kept[0] + 2, kept[1], kept[2]), "a lock that stands and what is young stay"
