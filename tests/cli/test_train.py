"""`interlock train`: the plan it makes, what it refuses by itself, and following a run over its restarts."""

import base64
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.command import execute
from interlock.canon import digest_bytes
from tests.cli.server import Asked, PeopleServer, error

VERSIONS = [f"sha256:{n:064x}" for n in range(3)]


@pytest.fixture
def script(tmp_path: Path, server: PeopleServer) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(b"print(1)\n")
    server.routes["POST /api/code"] = lambda asked: (200, {"digest": digest_bytes(asked.body)})
    server.routes["POST /api/runs"] = (201, {"run": "run_1", "state": "placed"})
    return path


def planned(server: PeopleServer) -> dict[str, Any]:
    plan = server.sent("POST", "/api/runs")[-1].json["plan"]
    assert isinstance(plan, dict)
    return plan


def test_several_ranks_go_through_torchrun_that_restarts_nothing(interlock, server, remy, script) -> None:
    status, value, _ = interlock("train", "--detach", "--ranks", "2", "--data", "text=/usr/share/doc", "--",
                                 str(script), "--steps", "9")
    assert (status, value["ranks"]) == (0, 2)
    plan = planned(server)
    assert plan["argv"] == ["python", "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2",
                            "--max-restarts=0", "/code/train.py", "--steps", "9"]
    wanted = {"ranks": 2, "environment": "guest", "guest": True, "checkpoints": True, "resume": True, "restarts": 3,
              "memory_mb": 4096, "tenant": "lab", "serve": False, "weights": []}
    assert {k: plan[k] for k in wanted} == wanted
    assert plan["code"] == [{"name": "train.py", "digest": digest_bytes(b"print(1)\n")}]


def test_one_rank_needs_no_torchrun_and_no_restart_no_resume(interlock, server, remy, script, tmp_path) -> None:
    more = tmp_path / "model.py"
    more.write_bytes(b"x = 1\n")
    assert interlock("train", "--detach", "--restarts", "0", "--environment", "own", "--model", "tiny", "--code",
                     str(more), "--", str(script))[0] == 0
    plan = planned(server)
    assert plan["argv"] == ["python", "/code/train.py"]
    assert (plan["resume"], plan["restarts"], plan["environment"], plan["model"]) == (False, 0, "own", "tiny")
    assert [row["name"] for row in plan["code"]] == ["train.py", "model.py"]


def test_weights_are_named_by_model_number_or_digest(interlock, server, remy, script) -> None:
    server.routes["GET /api/models/tiny"] = (200, {"name": "tiny", "versions": [
        {"version": VERSIONS[0], "number": 1, "state": "serving"}, {"version": VERSIONS[1], "number": 2,
                                                                    "state": "approved"},
        {"version": VERSIONS[2], "number": 3, "state": "retired"}]})
    for word, wanted in (("tiny", VERSIONS[1]), ("tiny@1", VERSIONS[0]), (VERSIONS[2], VERSIONS[2])):
        assert interlock("train", "--detach", "--weights", word, "--", str(script))[0] == 0
        assert planned(server)["weights"] == [wanted]
    status, value, _ = interlock("train", "--detach", "--weights", "tiny@9", "--", str(script))
    assert (status, value["error"]["code"]) == (1, "not_found.version")
    assert interlock("train", "--detach", "--weights", "tiny@x", "--", str(script))[0] == 2


@pytest.mark.parametrize("tier", ["high", "critical"])
def test_refuses_ranks_where_they_could_not_meet(interlock, server, remy, script, tier) -> None:
    status, value, _ = interlock("train", "--detach", "--ranks", "2", "--tier", tier, "--", str(script))
    assert (status, value["error"]["code"]) == (1, "denied.profile")
    assert value["error"]["next_step"]
    assert not server.sent("POST", "/api/runs")
    assert interlock("train", "--detach", "--tier", tier, "--", str(script))[0] == 0


@pytest.mark.parametrize("words", [("train", "x.py"), ("train", "--", "python3", "x.py"), ("train", "--", "absent.py"),
                                   ("train", "--ranks", "0", "--", "x.py")])
def test_refuses_what_is_no_training_script(interlock, server, remy, words) -> None:
    assert interlock(*words)[0] == 2
    assert not server.sent("POST", "/api/runs")


def test_an_unknown_tier_is_the_servers_to_refuse(interlock, server, remy, script) -> None:
    server.routes["POST /api/runs"] = error(422, "malformed.tier")
    status, value, _ = interlock("train", "--tier", "odd", "--ranks", "2", "--", str(script))
    assert (status, value["error"]["code"]) == (1, "malformed.tier")


def _restarted(server: PeopleServer, **last: Any) -> None:
    """A run whose first attempt says `one` and fails; the second says `two` and ends as `last` says."""
    said = {1: b"one\n", 2: b"two\n"}

    def output(asked: Asked) -> tuple[int, Any]:
        attempt, after = int(asked.query.get("attempt", 1)), int(asked.query["after"])
        data = said[attempt][after:]
        ended = attempt == 2 and not data
        return 200, {"data": base64.b64encode(data).decode(), "next": after + len(data), "ended": ended,
                     "attempt": 2 if attempt == 2 or not data else 1, "state": "ended" if ended else "live",
                     "outcome": {"exit": 0, **last} if ended else {"exit": 1}}

    server.routes["GET /api/runs/run_1/output"] = output


def test_following_goes_on_to_the_attempt_that_the_control_plane_starts(interlock, server, remy, script) -> None:
    _restarted(server)
    status, value, err = interlock("train", "--", str(script))
    assert (status, value["exit"], value["attempt"], err) == (0, 0, 2, "one\ntwo\n")


def test_a_person_is_told_of_the_next_attempt(server, remy, script, capfd) -> None:
    _restarted(server)
    assert execute(["train", "--", str(script)]) == 0
    out, err = capfd.readouterr()
    assert out == "one\ntwo\n"
    assert "attempt 1 is over; the output goes on with attempt 2" in err


def test_says_why_a_run_was_not_started_again(server, remy, script, capfd) -> None:
    _restarted(server, exit=1, not_restarted="conflict.restarts")
    assert execute(["train", "--", str(script)]) == 1
    assert "it was not started again: conflict.restarts" in capfd.readouterr().err
