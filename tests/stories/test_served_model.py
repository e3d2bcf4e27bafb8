"""Story 6: a version is approved, served, called, stopped; nobody else reaches its engine (docs/flow.md)."""

import base64
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from runners import data_digest
from tests.stories import canary
from tests.stories.lab import DOCS, ROOT, Lab

pytestmark = [pytest.mark.root, pytest.mark.guest]
SCRIPT = ROOT / "examples" / "train" / "train_bytes.py"
SMALL = ("--width", "32", "--layers", "1", "--context", "32", "--batch", "4", "--megabytes", "0.3")
# Another run looks for a way to the engine, and for one to speak in its name.
PRY = r"""
import os, socket
found = []
for path in ("/run/interlock/engine.sock", "/run/interlock/broker.sock"):
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        try:
            socket.socket(socket.AF_UNIX, kind).connect(path); found.append(path)
        except OSError: pass
for place, folders, names in os.walk("/run"):
    found += [place + "/" + n for n in names + folders if "sock" in n or n.startswith("run_")]
for port in PORTS:
    try:
        socket.create_connection(("127.0.0.1", port), 1); found.append(port)
    except OSError: pass
print("found", found)
"""


def until(ask: Callable[[], Any], seconds: float, why: str) -> Any:
    end = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < end, why
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def served(lab: Lab) -> dict[str, str]:
    """A tiny model, trained, approved and served under a name of its own."""
    placed = lab.must("train", "--detach", "--model", "tale", "--data", f"text={DOCS}", "--", str(SCRIPT), *SMALL,
                      "--steps", "6", "--save-every", "3", who="rhea")
    run = placed["run"]
    until(lambda: lab.api("rhea", f"/api/runs/{run}")["state"] == "ended", 90, "the training did not end")
    until(lambda: any(c["kind"] == "weights" for c in lab.api("rhea", f"/api/runs/{run}/progress")["checkpoints"]), 20,
          "the weights were not reported")
    made = lab.must("model", "register", "tale", "--run", run, who="rhea")
    lab.refused("conflict.version_state", "model", "serve", "tale@1", who="rhea")
    asked = lab.must("model", "submit", "tale", who="rhea")
    lab.must("approve", asked["request"], who="odo", code=lab.code("odo"))
    engine = lab.must("model", "serve", "tale", who="rhea", wait=120)
    key = lab.must("keys", "mint", "story", "--scope", "infer", who="rhea")["key"]
    client = openai.OpenAI(base_url=lab.gateway_url, api_key=key, max_retries=0)
    until(lambda: _lists(client), 20, "the gateway does not know the key")
    return {"run": run, "version": made["version"], "engine": engine["run"], "key": key}


def _lists(client: openai.OpenAI) -> bool:
    try:
        return "tale" in {m.id for m in client.models.list()}
    except openai.AuthenticationError:
        return False


def test_a_call_is_decided_answered_and_recorded(lab: Lab, served: dict[str, str]) -> None:
    client = openai.OpenAI(base_url=lab.gateway_url, api_key=served["key"], max_retries=0)
    answer = client.completions.create(model="tale", prompt="the", max_tokens=5, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5

    def recorded() -> list[dict[str, Any]]:
        rows = lab.api("olga", "/api/audit/records", run=served["engine"], limit=500)["records"]
        return [r["event"] for r in rows if r["event"].get("call") == answer.id]

    found = until(lambda: len(rows := recorded()) >= 2 and rows, 20, "the call is not in the ledger")
    decided, done = (next(e for e in found if e["type"] == t) for t in ("gate.decided", "infer.answered"))
    assert decided["facts"]["decision"]["effect"] == "allow"
    assert (done["facts"]["version"], done["facts"]["outcome"]) == (served["version"], "ok")
    assert {"input", "output", "duration_us", "source_ip"} <= set(done["facts"])
    text = json.dumps(found)
    assert answer.choices[0].text not in text or len(answer.choices[0].text.strip()) < 4
    assert served["key"].rsplit("_", 2)[1] not in text


def test_lineage_names_the_data_by_content(lab: Lab, served: dict[str, str]) -> None:
    lineage = lab.must("model", "show", "tale", who="rhea")["versions"][0]["lineage"]
    assert lineage["dataset_digests"] == {str(DOCS): data_digest.digest_of(DOCS, threading.Event())["digest"]}


def test_refuses_when_another_run_looks_for_the_engine(lab: Lab, served: dict[str, str], tmp_path: Any) -> None:
    ports = [int(url.rsplit(":", 1)[1].split("/")[0]) for url in (lab.gateway_url, lab.people_url)]
    for port in ports:
        httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5)  # control: from the host both answer
    pry = tmp_path / "pry.py"
    pry.write_text(PRY.replace("PORTS", repr(ports)))
    status, value = lab.ask("run", "--code", str(pry), "--", "python3", "/code/pry.py", who="remy")
    assert status == 0, value
    out = lab.api("remy", f"/api/runs/{value['run']}/output", after=0)
    assert base64.b64decode(out["data"]).decode().strip() == "found []"


def test_a_stop_of_the_model_cuts_its_stream_denies_the_next_call_and_withholds_its_keys(
    lab: Lab, served: dict[str, str]
) -> None:
    client = openai.OpenAI(base_url=lab.gateway_url, api_key=served["key"], max_retries=0)
    stream = client.completions.create(model="tale", prompt="the", max_tokens=4000, temperature=0, stream=True)
    stopping = threading.Thread(target=lambda: lab.must("stop", "model:tale", "--reason", "story", who="casey"))
    next(stream)
    stopping.start()
    with pytest.raises(openai.APIError) as cut:
        list(stream)
    stopping.join(30)
    assert "stopped" in str(cut.value)
    with pytest.raises(openai.APIStatusError) as denied:
        client.completions.create(model="tale", prompt="the", max_tokens=1)
    assert denied.value.status_code == 423
    status, value = lab.program("runners", "ask-key", served["engine"], "1")
    assert status == 1
    assert value["error"]["code"].split(".")[0] in ("stopped", "conflict")
    refused = lab.refused("stopped", "model", "serve", "tale", who="rhea")
    assert "story" in refused["message"]


def test_nothing_of_it_lies_in_clear(lab: Lab, served: dict[str, str]) -> None:
    needles = {f"API key {n}": p.encode() for n, p in enumerate([served["key"], served["key"].rsplit("_", 2)[1]])}
    for name, key in canary.keys_of(lab.state).items():
        needles.update(canary.spelled(name, key))
    assert len(needles) > 10
    mine = lab.folder / "control"
    mine.write_text(f"x{served['key']}x")
    try:
        assert canary.leaks(needles, [mine])  # control
    finally:
        mine.unlink()
    assert canary.leaks(needles, canary.files_below(lab.folder)) == []
    assert canary.told_by_processes(needles) == []
