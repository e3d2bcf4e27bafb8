"""Story 1: a run is admitted, recorded and held on a lease (docs/flow.md)."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.stories.lab import DOCS, ROOT, Lab

pytestmark = pytest.mark.root
COUNT = ROOT / "examples" / "demo" / "count_docs.py"


def test_a_command_is_admitted_runs_and_leaves_records(lab: Lab, tmp_path: Path) -> None:
    done = lab.must("run", "--code", str(COUNT), "--data", f"docs={DOCS}", "--save", str(tmp_path / "out"),
                    "--", "python3", "/code/count_docs.py", who="remy")
    assert done["exit"] == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["bytes"] > 1_000_000
    assert not result["host_can_be_written"]
    wanted_types = {"gate.decided", "run.granted", "run.intent", "run.started", "run.ended"}
    records: dict[str, Any] = {}
    for _ in range(100):  # the node ships its spool a moment later
        found = lab.api("olga", "/api/audit/records", run=done["run"], limit=500)["records"]
        records = {r["event"]["type"]: r for r in found}
        if wanted_types <= set(records):
            break
        time.sleep(0.2)
    assert wanted_types <= set(records)
    order = [records[t]["index"] for t in ("run.granted", "run.intent", "run.started", "run.ended")]
    assert order == sorted(order)
    assert records["run.started"]["node"] != "control"
    why = lab.must("why", done["run"], who="remy")
    assert any(d["action"] == "launch" and d["effect"] == "allow" and d["bundle"] for d in why["decisions"])


def test_exit_status_and_output_are_the_commands_own(lab: Lab) -> None:
    status, value = lab.ask("run", "--", "sh", "-c", "echo told; exit 7", who="remy")
    assert (status, value["exit"]) == (7, 7)


@pytest.mark.parametrize(("code", "who", "words"), [
    ("denied", "casey", ("run", "--", "true")),
    ("step_up_required", "remy", ("run", "--no-wait", "--tier", "critical", "--", "true")),
    ("malformed.tier", "remy", ("run", "--tier", "galactic", "--", "true")),
    ("usage", "remy", ("run", "--pids", "0", "--", "true")),
    ("denied", "remy", ("invite", "mallory", "--role", "administrator")),
    ("denied", "ada", ("run", "--", "true")),
])
def test_refuses_when_(lab: Lab, code: str, who: str, words: tuple[str, ...]) -> None:
    before = {r["run"] for r in lab.api("olga", "/api/runs")["runs"]}
    error = lab.refused(code, *words, who=who)
    assert error["next_step"] or error["message"]
    assert {r["run"] for r in lab.api("olga", "/api/runs")["runs"]} == before, "a refusal starts nothing"


def test_refuses_when_data_lies_outside_the_data_roots(lab: Lab) -> None:
    status, value = lab.ask("run", "--data", "etc=/etc", "--", "ls", "/data/etc", who="remy")
    assert status != 0
    assert "passwd" not in json.dumps(value)
    assert lab.ask("run", "--data", f"docs={DOCS}", "--", "ls", "/data/docs", who="remy")[0] == 0
