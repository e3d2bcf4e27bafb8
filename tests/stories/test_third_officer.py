"""Story: two officers pin a third; then the first one stops, and the other two resume."""

import json
import time
from typing import Any

import pytest

from interlock.signed import Signed
from tests.stories.lab import Lab

pytestmark = pytest.mark.root


def believed(lab: Lab) -> dict[str, Any]:
    """The list that the supervisor holds, as it lies on its disk."""
    return Signed.from_json(json.loads((lab.state / "supervisor" / "trust.json").read_text())).body()


def wait_for(condition: Any, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.2)


def stop_by_olga(lab: Lab, olga: str) -> str:
    """A stop of what runs in her own name: nobody else's run is touched, all of a stop's proof is there."""
    found = lab.must("stop", f"subject:{olga}", "--reason", "story", who="olga")
    assert found["state"] == "confirmed"
    assert found["order"] in stops(lab)
    return str(found["order"])


def stops(lab: Lab) -> list[str]:
    return [s["id"] for s in lab.supervisor()["stops"]]


def test_a_third_officer_is_pinned_by_two_and_resumes_what_the_first_stopped(lab: Lab) -> None:
    olga, opal = (lab.api(who, "/api/whoami")["person"] for who in ("olga", "opal"))
    held = lab.must("trust", "show", who="ada")
    assert [p["name"] for p in held["persons"]] == ["olga", "otto"]
    assert "opal" in [p["name"] for p in held["waiting"]]
    assert "cannot be resumed" in lab.must("status", who="casey")["trust"]["warning"]
    assert {p["person"] for p in believed(lab)["persons"]} == {p["person"] for p in held["persons"]}

    # The gap: she may not lift her own stop, and no node knows the third officer's key.
    order = stop_by_olga(lab, olga)
    early = lab.must("resume", order, "--reason", "over", who="casey")["request"]
    lab.refused("denied.self_approval", "approve", early, who="olga", code="000000")
    lab.refused("denied.unpinned", "approve", early, who="opal", code="000000")

    lab.refused("denied", "trust", "change", "--add", "opal", "--reason", "third", who="olga")
    lab.refused("conflict.trust_threshold", "trust", "change", "--remove", "otto", "--reason", "x", who="ada")
    asked = lab.must("trust", "change", "--add", "opal", "--reason", "a third officer", who="ada")
    for who, code in (("ada", "denied.self_approval"), ("opal", "denied.unpinned"), ("casey", "denied.no_role")):
        lab.refused(code, "approve", asked["request"], who=who, code="000000")
    assert lab.must("approve", asked["request"], who="olga", code=lab.code("olga"))["missing"] == 1
    assert believed(lab)["version"] == held["version"], "one signature changes nothing"
    done = lab.must("approve", asked["request"], who="otto", code=lab.code("otto"))
    assert done["effect"]["trust"] == asked["body"]["version"]

    wait_for(lambda: believed(lab)["version"] == asked["body"]["version"])
    assert opal in {p["person"] for p in believed(lab)["persons"]}
    wait_for(lambda: all(n["version"] == asked["body"]["version"]
                         for n in lab.must("trust", "show", who="ada")["nodes"]))
    assert lab.must("status", who="casey")["trust"]["warning"] == ""

    request = lab.must("resume", order, "--reason", "over", who="casey")["request"]
    lab.must("approve", request, who="opal", code=lab.code("opal"))
    assert order in stops(lab)
    lab.must("approve", request, who="otto", code=lab.code("otto"))
    wait_for(lambda: order not in stops(lab))
    assert lab.api("casey", f"/api/stops/{order}")["cleared_by"]
    events = lab.api("olga", "/api/audit/records", type="node.trust_changed", limit=50)["records"]
    assert any(asked["request"] in json.dumps(e) for e in events)
