"""Story: training on two ranks is killed at one of them and goes on from its last committed step (docs/flow.md)."""

import base64
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stories.lab import DOCS, ROOT, Lab

pytestmark = [pytest.mark.root, pytest.mark.guest]
SCRIPT = ROOT / "examples" / "train" / "train_bytes.py"
SMALL = ("--width", "32", "--layers", "1", "--context", "32", "--batch", "4", "--megabytes", "0.3")


def until(ask: Callable[[], Any], seconds: float, why: Callable[[], object] = str) -> Any:
    """Return the first truthy answer; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < end, why()
        time.sleep(0.2)
    return found


def output(lab: Lab, run: str, attempt: int) -> str:
    found = lab.api("remy", f"/api/runs/{run}/output", after=0, attempt=attempt)
    return base64.b64decode(found["data"]).decode(errors="replace")


def rank_of(run: str, rank: int) -> int:
    """Return the pid, on this host, of a training process: of the run's control group, with that rank."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                inside = run in (folder / "cgroup").read_text()
                words = (folder / "cmdline").read_bytes().split(b"\0")
                named = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if inside and b"/code/train_bytes.py" in words and b"LOCAL_RANK=%d" % rank in named:
                return int(folder.name)
    return 0


def test_a_killed_rank_costs_the_steps_since_the_last_commit(lab: Lab) -> None:
    placed = lab.must("train", "--detach", "--ranks", "2", "--data", f"text={DOCS}", "--", str(SCRIPT), *SMALL,
                      "--steps", "40", "--save-every", "4", "--slow", "0.2", who="remy")
    run = placed["run"]

    def row() -> dict[str, Any]:
        return lab.api("remy", f"/api/runs/{run}")

    def told() -> str:
        return f"{row()['attempts']} {output(lab, run, 1)[-1500:]} {output(lab, run, 2)[-1500:]}"

    def committed() -> list[int]:
        return [c["step"] for c in lab.api("remy", f"/api/runs/{run}/progress")["checkpoints"]]

    until(committed, 120, told)
    os.kill(until(lambda: rank_of(run, 1), 5, told), signal.SIGKILL)
    at_kill = max(committed())
    until(lambda: row()["attempt"] == 2, 60, told)
    until(lambda: row()["state"] not in ("placed", "admitted", "live") and not row()["attempt"] > 2, 120, told)
    last = row()
    assert (last["state"], last["outcome"]["exit"], last["attempt"]) == ("ended", 0, 2), told()
    said = output(lab, run, 2)
    resumed = int(said.partition("resumes at step ")[2].split()[0])
    assert resumed >= at_kill >= 4
    result = json.loads(next(line for line in said.splitlines() if line.startswith('{"result"')))["result"]
    assert (result["steps"], result["resumed_from"]) == (40, resumed)
    assert result["weights"] in {c["digest"] for c in until(
        lambda: [c for c in lab.api("remy", f"/api/runs/{run}/progress")["checkpoints"] if c["kind"] == "weights"], 10)}
    first, _ = row()["attempts"]
    assert (first["state"], first["outcome"]["exit"] in (0, None)) == ("ended", False)
    records = until(lambda: [r["event"] for r in lab.api("olga", "/api/audit/records", run=run, limit=1000,
                                                         type="run.restarted")["records"]], 10)
    assert [(e["facts"]["attempt"], e["actor"]) for e in records] == [(2, "control")]
    points = lab.api("remy", f"/api/runs/{run}/progress")["points"]
    assert {p["attempt"] for p in points} == {1, 2}
    assert all(p["metrics"]["loss_micro"] > 0 for p in points)


def test_refuses_an_environment_that_no_node_offers(lab: Lab) -> None:
    error = lab.refused("not_found.environment", "train", "--environment", "elsewhere", "--", str(SCRIPT), who="remy")
    assert error["next_step"]
