"""Story 3: the control plane dies; the run dies by its lease, at most TTL + 2 s later."""

import time

import pytest

from tests.stories.lab import Lab

pytestmark = pytest.mark.root
LIMIT_MS = 10_000 + 2_000


def test_a_critical_run_dies_by_its_lease(lab: Lab) -> None:
    run = lab.hostile(2)
    before = lab.supervisor()
    lab.kill("control_plane")
    assert lab.attempt(run, 1)["state"] == "live"
    while True:
        now = lab.supervisor()
        entry = next(r for r in now["runs"] if (r["run"], r["attempt"]) == (run, 1))
        took = now["now_ms"] - before["now_ms"]
        if entry["state"] == "gone" or took > LIMIT_MS + 5_000:
            break
        time.sleep(0.25)
    assert entry["state"] == "gone"
    assert entry["why"] != "ended"
    assert took <= LIMIT_MS, took
    lab.up()
    row = lab.api("rolf", f"/api/runs/{run}")
    for _ in range(100):
        if row["state"] not in ("live", "admitted", "placed"):
            break
        time.sleep(0.2)
        row = lab.api("rolf", f"/api/runs/{run}")
    assert row["state"] in ("ended", "stopped", "lost")
