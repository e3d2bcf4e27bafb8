"""`interlock run`: plan, second factor bound to it, approvals, output, exit status."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.command import execute
from interlock.canon import digest, digest_bytes
from tests.cli.server import Asked, PeopleServer, error


def _placed(server: PeopleServer, **last: Any) -> None:
    """A run that is placed, prints two pieces and ends as `last` says."""
    pieces = [b"hello ", b"world\n"]

    def output(asked: Asked) -> tuple[int, Any]:
        at = int(asked.query["after"])
        index = {0: 0, 6: 1}.get(at)
        data = pieces[index] if index is not None else b""
        return 200, {"data": base64.b64encode(data).decode(), "next": at + len(data), "ended": index is None,
                     "state": last.get("state", "ended") if index is None else "live", "outcome": last.get("outcome")}

    server.routes["POST /api/runs"] = (201, {"run": "run_1", "state": "placed"})
    server.routes["GET /api/runs/run_1/output"] = output


def _stores(asked: Asked) -> tuple[int, Any]:
    return 200, {"digest": digest_bytes(asked.body)}


def test_output_is_passed_on_and_the_status_is_the_commands(server, remy, capfd) -> None:
    _placed(server, outcome={"exit": 3})
    assert execute(["run", "--", "false"]) == 3
    assert capfd.readouterr().out == "hello world\n"


@pytest.mark.parametrize(("outcome", "status"), [({"exit": 0}, 0), ({"exit": 42}, 42), ({"signal": 9}, 137)])
def test_exit_status(interlock, server, remy, outcome, status) -> None:
    _placed(server, outcome=outcome)
    found, value, err = interlock("run", "--", "x")
    assert (found, value["exit"], value["run"]) == (status, status, "run_1")
    assert "hello world" in err


@pytest.mark.parametrize(("state", "why", "code"), [
    ("stopped", "order:stop_9", "stopped.order"), ("ended", "lease", "stopped.lease"), ("stopped", "", "stopped.run"),
    ("ended", "order:stop_9", "stopped.order")])
def test_a_stopped_run_exits_75(interlock, server, remy, state, why, code) -> None:
    _placed(server, state=state, outcome={"exit": 0, "why": why})
    status, value, _ = interlock("run", "--", "x")
    assert (status, value["error"]["code"]) == (75, code)
    assert value["error"]["details"]["run"] == "run_1"


def test_a_run_that_the_node_refused_or_lost_is_a_refusal(interlock, server, remy) -> None:
    _placed(server, state="refused", outcome={"error": {"code": "layer_missing.bwrap", "message": "no bwrap"}})
    assert interlock("run", "--", "x")[:1] == (3,)
    _placed(server, state="lost")
    assert interlock("run", "--", "x")[1]["error"]["code"] == "unavailable.run_lost"


def test_the_plan_holds_code_by_digest_and_data(interlock, server, remy, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"print(1)\n")
    _placed(server, outcome={"exit": 0})
    server.routes["POST /api/code"] = _stores
    status, value, _ = interlock("run", "--code", str(script), "--data", "docs=/usr/share/doc", "--pids", "64",
                                 "--guest", "--restarts", "2", "--", "python3", "/code/train.py")
    assert status == 0
    plan = server.sent("POST", "/api/runs")[0].json["plan"]
    assert plan["code"] == [{"name": "train.py", "digest": digest_bytes(b"print(1)\n")}]
    assert plan["datasets"] == [{"name": "docs", "path": "/usr/share/doc"}]
    assert (plan["argv"], plan["pids"], plan["guest"], plan["restarts"], plan["tenant"]) == (
        ["python3", "/code/train.py"], 64, True, 2, "lab")
    assert value["plan_digest"] == digest(plan)


def test_refuses_when_other_bytes_were_stored(interlock, server, remy, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"print(1)\n")
    _placed(server, outcome={"exit": 0})
    server.routes["POST /api/code"] = (200, {"digest": digest_bytes(b"print(2)\n")})
    status, value, _ = interlock("run", "--code", str(script), "--", "x")
    assert (status, value["error"]["code"]) == (1, "malformed.code")
    assert not server.sent("POST", "/api/runs")


@pytest.mark.parametrize("data", ["docs", "=/x", "docs=relative"])
def test_refuses_when_data_is_no_absolute_path(interlock, remy, data) -> None:
    status, value, _ = interlock("run", "--data", data, "--", "x")
    assert (status, value["error"]["code"]) == (2, "usage.data")


def test_an_unknown_tier_is_the_servers_to_refuse(interlock, server, remy) -> None:
    server.routes["POST /api/runs"] = lambda a: (
        error(422, "malformed.tier") if a.json["plan"]["tier"] == "odd" else (500, {}))
    status, value, _ = interlock("run", "--tier", "odd", "--", "x")
    assert (status, value["error"]["code"]) == (1, "malformed.tier")


def _wants_factor(asked: Asked) -> tuple[int, Any]:
    return (201, {"run": "run_1"}) if asked.json.get("step_up") == "su_1" else error(403, "step_up_required")


def test_the_second_factor_is_bound_to_the_digest_of_the_plan(interlock, server, remy, monkeypatch) -> None:
    _placed(server, outcome={"exit": 0})
    server.routes["POST /api/runs"] = _wants_factor
    server.routes["POST /api/step-up"] = (200, {"step_up": "su_1"})
    monkeypatch.setenv("INTERLOCK_CODE", "123456")
    assert interlock("run", "--tier", "high", "--", "x")[0] == 0
    plan = server.sent("POST", "/api/runs")[0].json["plan"]
    assert server.sent("POST", "/api/step-up")[0].json == {"code": "123456", "action": "launch", "bound": digest(plan)}


def test_refuses_when_no_code_is_at_hand(interlock, server, remy, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    server.routes["POST /api/runs"] = _wants_factor
    status, value, _ = interlock("run", "--tier", "high", "--", "x")
    assert (status, value["error"]["code"]) == (1, "step_up_required")


def test_a_proof_that_was_given_serves_the_second_try(interlock, server, remy) -> None:
    """Approvals come later; the code given for this very plan need not be given again within its life."""
    def gate(asked: Asked) -> tuple[int, Any]:
        if not asked.json.get("step_up"):
            return error(403, "step_up_required")
        if not asked.json.get("approval"):
            return error(403, "approval_required", request="req_1", needed=2, given=0)
        return 201, {"run": "run_1", "state": "placed"}

    server.routes["POST /api/runs"] = gate
    server.routes["POST /api/step-up"] = (200, {"step_up": "su_1"})
    status, value, _ = interlock("run", "--no-wait", "--code-otp", "123456", "--", "x")
    assert (status, value["error"]["details"]["step_up"]) == (1, "su_1")
    status, value, _ = interlock("run", "--detach", "--approval", "req_1", "--step-up", "su_1", "--", "x")
    assert (status, value["run"]) == (0, "run_1")
    assert len(server.sent("POST", "/api/step-up")) == 1


def test_without_waiting_the_approval_request_is_named(interlock, server, remy) -> None:
    server.routes["POST /api/runs"] = error(403, "approval_required", request="req_1", needed=2, given=0)
    status, value, _ = interlock("run", "--no-wait", "--tier", "critical", "--", "x")
    assert status == 1
    assert value["error"]["details"]["request"] == "req_1"


def test_waiting_for_approvals_starts_the_run_with_them(interlock, server, remy) -> None:
    _placed(server, outcome={"exit": 0})
    server.routes["POST /api/runs"] = lambda a: (
        (201, {"run": "run_1"}) if a.json.get("approval") == "req_1"
        else error(403, "approval_required", request="req_1", needed=2, given=0))
    votes = iter([2, 1, 0])
    server.routes["GET /api/approvals/req_1"] = lambda _: (200, {"state": "open", "missing": next(votes)})
    assert interlock("run", "--tier", "critical", "--", "x")[0] == 0
    assert next(votes, None) is None


def test_refuses_when_the_approval_was_refused(interlock, server, remy) -> None:
    server.routes["POST /api/runs"] = error(403, "approval_required", request="req_1", needed=2, given=0)
    server.routes["GET /api/approvals/req_1"] = (200, {"state": "refused", "missing": 2})
    assert interlock("run", "--tier", "critical", "--", "x")[1]["error"]["code"] == "denied.approval"


def test_a_control_plane_that_goes_away_is_waited_for(interlock, server, remy, monkeypatch) -> None:
    monkeypatch.setattr("control_plane.cli.launch.time.sleep", lambda _: None)
    _placed(server, outcome={"exit": 0})
    inner = server.routes["GET /api/runs/run_1/output"]
    gone = iter([True, True])
    server.routes["GET /api/runs/run_1/output"] = lambda a: (502, b"") if next(gone, False) else inner(a)
    status, _, err = interlock("run", "--", "x")
    assert status == 0
    assert "hello world" in err


def _leaves_file(server: PeopleServer, data: bytes, told: str, name: str = "result.json") -> None:
    _placed(server, outcome={"exit": 0})
    server.routes["GET /api/runs/run_1/files"] = (200, {"files": [{"name": name, "digest": told}]})
    server.routes[f"GET /api/runs/run_1/files/{name}"] = (200, data)


def test_files_are_saved_after_their_digest_was_checked(interlock, server, remy, tmp_path: Path) -> None:
    _leaves_file(server, b"{}\n", digest_bytes(b"{}\n"))
    _, value, _ = interlock("run", "--save", str(tmp_path / "out"), "--", "x")
    assert (tmp_path / "out" / "result.json").read_bytes() == b"{}\n"
    assert value["files"][0]["digest"] == digest_bytes(b"{}\n")


def test_refuses_when_a_file_differs_from_its_digest(interlock, server, remy, tmp_path: Path) -> None:
    _leaves_file(server, b"{}\n", digest_bytes(b"other"))
    assert interlock("run", "--save", str(tmp_path / "out"), "--", "x")[1]["error"]["code"] == "malformed.digest"
    assert not (tmp_path / "out" / "result.json").exists()


def test_refuses_when_a_file_would_leave_the_folder(interlock, server, remy, tmp_path: Path) -> None:
    _leaves_file(server, b"x", digest_bytes(b"x"), name="../evil")
    assert interlock("files", "run_1", "--save", str(tmp_path / "out"))[1]["error"]["code"] == "malformed.name"
    assert not (tmp_path / "evil").exists()


def test_runs_logs_and_why(interlock, server, remy, capfd) -> None:
    _placed(server, outcome={"exit": 0})
    server.routes["GET /api/runs"] = (200, {"runs": [{"run": "run_1", "state": "live", "created_us": 1}]})
    server.routes["GET /api/why/run_1"] = (200, {"decisions": [{"action": "launch", "effect": "allow"}]})
    assert interlock("runs")[1]["runs"][0]["run"] == "run_1"
    assert interlock("why", "run_1")[1]["decisions"][0]["effect"] == "allow"
    assert "hello world" in interlock("logs", "run_1")[2]
    assert "hello world" in interlock("logs", "--follow", "run_1")[2]
    assert execute(["why", "run_1"]) == 0
    assert "launch" in capfd.readouterr().out


def test_restart_asks_the_gate_again(interlock, server, remy) -> None:
    server.routes["POST /api/runs/run_1/restart"] = error(423, "stopped.order")
    assert interlock("restart", "run_1")[1]["error"]["code"] == "stopped.order"
    server.routes["POST /api/runs/run_1/restart"] = (201, {"run": "run_1", "attempt": 2})
    assert interlock("restart", "--detach", "run_1")[1]["attempt"] == 2


def test_one_object_on_stdout_whatever_the_run_prints(interlock, server, remy) -> None:
    _placed(server, outcome={"exit": 0})
    server.routes["GET /api/runs/run_1/output"] = (200, {
        "data": "", "next": 0, "ended": True, "state": "ended", "outcome": {"exit": 0}})
    assert json.loads(json.dumps(interlock("run", "--", "x")[1]))["state"] == "ended"
