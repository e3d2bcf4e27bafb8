"""Story 2: a hostile run is stopped, with proof, and stays stopped until two officers resume."""

import time

import pytest

from tests.stories.lab import Lab

pytestmark = pytest.mark.root
PROMISE_MS = 5_000


def test_stopped_with_proof_and_kept_stopped_until_two_resume(lab: Lab) -> None:
    run = lab.hostile(0, restarts=3)
    lab.refused("denied", "stop", "everything", who="remy")  # the owner stops his own runs, no more
    assert lab.attempt(run, 1)["state"] == "live"

    stop = lab.must("stop", f"run:{run}", "--reason", "story", who="casey")
    assert stop["state"] == "confirmed"
    assert stop["nodes"]
    for node in stop["nodes"]:
        assert (node["result"], node["survivors"]) == ("confirmed", [])
        assert node["latency_ms"] <= PROMISE_MS
    assert lab.attempt(run, 1)["state"] == "gone"

    lab.refused("stopped", "restart", "--detach", run, who="remy")
    for program in ("control_plane", "runners"):
        lab.kill(program)
    lab.up()
    lab.refused("stopped", "restart", "--detach", run, who="remy")

    asked = lab.must("resume", stop["order"], "--reason", "looked at it", who="casey")
    lab.refused("denied", "approve", asked["request"], who="casey", code=lab.code("casey"))  # he gave the stop
    lab.must("approve", asked["request"], who="olga", code=lab.code("olga"))
    lab.refused("stopped", "restart", "--detach", run, who="remy")
    assert lab.refused("conflict", "approve", asked["request"], who="olga", code=lab.code("olga"))
    lab.must("approve", asked["request"], who="otto", code=lab.code("otto"))
    assert lab.api("casey", f"/api/stops/{stop['order']}")["cleared_by"]
    assert stop["order"] not in [s["id"] for s in lab.supervisor()["stops"]]

    again = lab.must("restart", "--detach", run, who="remy")
    assert again["attempt"] == 2
    lab.alive(run, 2)
    last = lab.must("stop", f"run:{run}", "--reason", "the owner may", who="remy")
    assert last["state"] == "confirmed"


def test_a_local_stop_needs_no_control_plane(lab: Lab) -> None:
    run = lab.hostile(1)
    lab.kill("control_plane")
    status, value = lab.program("killswitch", "stop", "--run", run, "--reason", "local", "--json")
    assert status == 0, value
    assert lab.attempt(run, 1)["state"] == "gone"
    lab.up()
    stops = lab.api("casey", "/api/stops")["stops"]
    for _ in range(60):
        if any(s["scope"] == f"run:{run}" for s in stops):
            break
        stops = lab.api("casey", "/api/stops", wait=1)["stops"]
    assert any(s["scope"] == f"run:{run}" for s in stops), "told upward, so that a resume can name it (G10)"
    for _ in range(100):  # the node tells of the end a moment after it is up again
        if lab.api("olga", f"/api/runs/{run}")["state"] not in ("placed", "admitted", "live"):
            break
        time.sleep(0.2)
    lab.refused("stopped", "restart", "--detach", run, who="rhea")
