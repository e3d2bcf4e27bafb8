"""`interlock model` and `interlock partner` against a server that speaks the seams."""

from typing import Any

import pytest

from control_plane.cli import models
from control_plane.cli.command import execute
from control_plane.engine_plan import engine_plan
from interlock.tier import Tier
from tests.cli.server import Asked, PeopleServer, error

DIGEST = "sha256:" + "ab" * 32
OLDER = "sha256:" + "cd" * 32


def version(number: int, state: str, digest: str = DIGEST, **more: Any) -> dict[str, Any]:
    return {"version": digest, "model": "aurora", "number": number, "tier": "high", "state": state, "run": "run_1",
            "step": 9, "lineage": {"parents": [], "models": ["base"], "datasets": [], "code": []}, "engines": [],
            "created_us": 1_800_000_000_000_000, **more}


def aurora(*found: dict[str, Any]) -> dict[str, Any]:
    return {"name": "aurora", "tenant": "lab", "tier": "high", "owner_name": "remy", "versions": list(found)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "POLL_S", 0.01)


def test_registers(interlock, remy, server: PeopleServer) -> None:
    server.routes["POST /api/models/aurora/versions"] = (201, {"version": DIGEST, "number": 1, "state": "draft"})
    status, value, _ = interlock("model", "register", "aurora", "--run", "run_1", "--step", "0", "--tier", "high")
    assert (status, value["number"]) == (0, 1)
    assert server.sent("POST", "/api/models/aurora/versions")[0].json == {"run": "run_1", "step": 0, "tier": "high"}
    interlock("model", "register", "aurora", "--run", "run_1")
    assert server.sent("POST", "/api/models/aurora/versions")[1].json == {"run": "run_1"}


def test_lists_and_shows_for_people(remy, server: PeopleServer, capfd: pytest.CaptureFixture[str]) -> None:
    engines = [{"run": "run_7", "attempt": 1, "node": "n1", "state": "live", "ready": True}]
    found = aurora(version(2, "serving", engines=engines), version(1, "draft", OLDER))
    server.routes["GET /api/models"] = (200, {"models": [found]})
    server.routes["GET /api/models/aurora"] = (200, found)
    assert execute(["model", "list"]) == 0
    shown = capfd.readouterr().out
    assert "aurora@2" in shown
    assert "1 of 1 ready" in shown
    assert execute(["model", "show", "aurora"]) == 0
    assert DIGEST in capfd.readouterr().out
    assert execute(["model", "show", "aurora@2"]) == 0
    assert "run_7" in capfd.readouterr().out


def test_submits_the_newest_draft_or_the_one_that_is_named(interlock, remy, server: PeopleServer) -> None:
    server.routes["GET /api/models/aurora"] = (
        200, aurora(version(3, "approved", "sha256:" + "ee" * 32), version(2, "draft"), version(1, "draft", OLDER)))
    for digest in (DIGEST, OLDER):
        server.routes[f"POST /api/versions/{digest}/submit"] = (200, {"request": "req_1", "needed": 1})
    status, value, _ = interlock("model", "submit", "aurora")
    assert (status, value["version"], value["request"]) == (0, DIGEST, "req_1")
    assert interlock("model", "submit", "aurora@1")[1]["version"] == OLDER
    assert interlock("model", "submit", "aurora@9")[1]["error"]["code"] == "not_found.version"
    assert interlock("model", "submit", "aurora@x")[1]["error"]["code"] == "usage.version"


def test_serves_with_a_factor_for_exactly_its_own_plan_and_waits(
    interlock, remy, server: PeopleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_CODE", "123456")
    bound = engine_plan(DIGEST, "aurora", Tier.HIGH, "lab").digest()
    looks: list[int] = []

    def serve(asked: Asked) -> Any:
        if asked.json.get("step_up") == "stp_1":
            return 201, {"run": "run_7", "state": "placed", "node": "n1", "attempt": 1}
        return error(403, "step_up_required", bound=bound, action="serve")

    def look(_: Asked) -> Any:
        looks.append(1)
        engines = [{"run": "run_7", "attempt": 2, "node": "n1", "state": "live", "ready": len(looks) > 3}]
        return 200, aurora(version(2, "approved", engines=engines if len(looks) > 1 else []))

    server.routes["GET /api/models/aurora"] = look
    server.routes[f"POST /api/versions/{DIGEST}/serve"] = serve
    server.routes["POST /api/step-up"] = (200, {"step_up": "stp_1"})
    server.routes["GET /api/runs/run_7/output"] = (200, {"data": "", "next": 0, "ended": False, "attempt": 1})
    status, value, _ = interlock("model", "serve", "aurora")
    assert (status, value["run"], value["state"], value["ready"]) == (0, "run_7", "serving", True)
    asked = server.sent("POST", "/api/step-up")[0].json
    assert (asked["action"], asked["bound"]) == ("serve", bound)
    assert interlock("model", "serve", "aurora", "--detach")[1]["state"] == "placed"


def test_gives_no_code_for_another_plan_than_its_own(
    interlock, remy, server: PeopleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_CODE", "123456")
    server.routes["GET /api/models/aurora"] = (200, aurora(version(2, "approved")))
    server.routes[f"POST /api/versions/{DIGEST}/serve"] = error(403, "step_up_required", bound="sha256:" + "0" * 64)
    server.routes["POST /api/step-up"] = (200, {"step_up": "stp_1"})
    status, value, _ = interlock("model", "serve", "aurora")
    assert (status, value["error"]["code"]) == (1, "untrusted.plan")
    assert server.sent("POST", "/api/step-up") == []


@pytest.mark.parametrize(("answer", "code"), [
    ({"state": "ended", "outcome": {"exit": 3, "why": "ended"}}, "unavailable.engine"),
    ({"state": "refused", "outcome": {"error": {"code": "not_found.environment", "message": "x"}}},
     "not_found.environment"),
    ({"state": "stopped", "outcome": {"why": "order:stop_1"}}, "stopped.order"),
])
def test_an_engine_that_ends_before_it_is_ready_is_reported(
    interlock, remy, server: PeopleServer, answer: dict[str, Any], code: str
) -> None:
    server.routes["GET /api/models/aurora"] = (200, aurora(version(2, "approved")))
    server.routes[f"POST /api/versions/{DIGEST}/serve"] = (201, {"run": "run_7", "state": "placed"})
    server.routes["GET /api/runs/run_7/output"] = (200, {"data": "", "next": 0, "ended": True, "attempt": 1, **answer})
    status, value, _ = interlock("model", "serve", "aurora@2")
    assert value["error"]["code"] == code
    assert status in (1, 3)


def test_waits_no_longer_than_it_is_told(interlock, remy, server: PeopleServer) -> None:
    server.routes["GET /api/models/aurora"] = (200, aurora(version(2, "approved")))
    server.routes[f"POST /api/versions/{DIGEST}/serve"] = (201, {"run": "run_7", "state": "placed"})
    server.routes["GET /api/runs/run_7/output"] = (200, {"data": "", "next": 0, "ended": False, "attempt": 1})
    status, value, _ = interlock("model", "serve", "aurora", "--limit", "1")
    assert (status, value["error"]["code"]) == (3, "unavailable.engine")


def test_retires_only_what_is_named_with_its_number(interlock, remy, server: PeopleServer) -> None:
    server.routes["GET /api/models/aurora"] = (200, aurora(version(2, "serving"), version(1, "approved", OLDER)))
    server.routes[f"POST /api/versions/{OLDER}/retire"] = (200, {"state": "retired", "stops": ["stop_1"]})
    assert interlock("model", "retire", "aurora")[1]["error"]["code"] == "usage.version"
    status, value, _ = interlock("model", "retire", "aurora@1")
    assert (status, value["state"]) == (0, "retired")


def test_partners(interlock, remy, server: PeopleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/api/programmes/trusted-testers/members"
    server.routes[f"POST {path}"] = (200, {"programme": "trusted-testers", "person": "per_p", "until_us": 5})
    status, value, _ = interlock("partner", "add", "trusted-testers", "paula", "--organisation", "Partner GmbH",
                                 "--days", "30", "--code", "123456")
    assert (status, value["person"]) == (0, "per_p")
    assert server.sent("POST", path)[0].json == {
        "person": "paula", "organisation": "Partner GmbH", "days": 30, "code": "123456"}
    assert interlock("partner", "add", "trusted-testers", "paula", "--organisation", "x", "--days", "366")[0] == 2
    server.routes["GET /api/programmes"] = (200, {"members": [
        {"programme": "trusted-testers", "name": "paula", "organisation": "Partner GmbH", "state": "live"}]})
    assert interlock("partner", "list")[1]["members"][0]["name"] == "paula"

    def end(asked: Asked) -> Any:
        return (200, {"ended": True}) if asked.json.get("code") == "654321" else error(403, "step_up_required")

    server.routes[f"DELETE {path}/paula"] = end
    monkeypatch.setenv("INTERLOCK_CODE", "654321")
    assert interlock("partner", "end", "trusted-testers", "paula")[1] == {"ended": True}
    assert [a.json for a in server.sent("DELETE", f"{path}/paula")] == [{}, {"code": "654321"}]
