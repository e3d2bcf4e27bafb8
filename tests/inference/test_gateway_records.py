"""What is on record, when, and what never is."""

import hashlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from audit.spool import Spool, unshipped
from interlock.order import ScopeKind
from tests.inference.gateway_room import Room, credential, wait_for
from tests.inference.stand_in import VERSION, Script


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def test_an_answer_is_on_record_whole(room: Room) -> None:
    body = json.dumps({"model": "nova", "prompt": "once", "max_tokens": 50}).encode()
    with room.engine("nova", Script(text="hello")), room.client("rae") as client:
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    decided, = room.records.of("gate.decided")
    found, = room.settled("infer.answered")
    assert found.call == decided.call == answer.json()["id"] == answer.headers["x-request-id"]
    assert (found.actor, found.tenant, found.run) == ("key_rae0000000", "lab", "run_nova")
    facts = found.facts
    assert facts.pop("duration_us") >= facts.pop("first_us") > 0
    assert facts == {
        "source_ip": "127.0.0.1", "person": "rae", "model": "nova", "version": VERSION, "tier": "high",
        "profile": "full", "route": "/v1/completions", "decision": decided.id, "input": sha(body),
        "input_bytes": len(body), "output": sha(b"hello"), "output_bytes": 5, "tokens_in": 3, "tokens_out": 6,
        "estimated": False, "stream": False, "withheld": 0, "outcome": "ok",
    }
    assert decided.facts["call"]["resource"] == {
        "kind": "model", "name": "nova", "tenant": "lab", "tier": "high", "ancestors": ["sol"]}
    assert decided.facts["call"]["bound"] == VERSION


def test_nothing_is_asked_of_an_engine_before_the_decision_is_durable(room: Room) -> None:
    with room.engine() as script:
        room.records.full = True
        answer = room.ask("rae")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_recorded.full")
        assert not script.asked
        room.records.full = False
        assert room.ask("rae").status_code == 200  # control


@pytest.mark.parametrize("stream", [False, True])
def test_from_tier_high_on_the_last_byte_waits_for_the_record(room: Room, stream: bool) -> None:
    with room.engine("nova", Script(text="hello")), room.engine("luna", Script(text="hello")):
        room.records.refuse = "infer.answered"
        high = room.ask("rae", model="nova", stream=stream)
        if stream:
            assert high.text.endswith("\n\n")
            assert "[DONE]" not in high.text
            assert json.loads(high.text.splitlines()[-2].removeprefix("data: "))["error"]["code"] == "not_recorded.full"
        else:
            assert (high.status_code, high.json()["error"]["code"]) == (503, "not_recorded.full")
            assert "hello" not in high.text
        room.records.refuse = ""
        answers: list[str] = []
        room.records.held.clear()
        asking = threading.Thread(target=lambda: answers.append(room.ask("rae", model="nova", stream=stream).text))
        asking.start()
        asking.join(0.3)
        assert not answers
        room.records.held.set()
        asking.join(5)
        assert "[DONE]" in answers[0] if stream else "hello" in answers[0]  # control
        room.records.held.clear()
        assert room.ask("rae", model="luna", stream=stream).status_code == 200  # tier none: written meanwhile
        assert len(room.records.of("infer.answered")) == 1
        room.records.held.set()
        room.settled("infer.answered", 2)


def test_refusals_are_on_record(room: Room) -> None:
    with room.engine("luna"), room.engine("astra"):
        for who, body in (("rae", {"max_tokens": 0}), ("eve", {"model": "astra"}), ("rae", {"model": "idle"}),
                          ("rae", {"model": "a prompt in the wrong place".replace(" ", "-")})):
            assert room.ask(who, **body).status_code >= 400
        room.ask("rae", "/v1/chat/completions", model="astra", messages=[{"role": "user", "content": "x"}],
                 tools=[{"type": "function"}])
    found = [(e.actor, e.facts["code"], e.facts.get("model")) for e in room.settled("infer.refused", 5)]
    assert sorted(found, key=str) == [  # written by several threads
        ("key_eve0000000", "not_found.model", None), ("key_rae0000000", "denied.tools", "astra"),
        ("key_rae0000000", "malformed.request", None), ("key_rae0000000", "not_found.model", None),
        ("key_rae0000000", "unavailable.engine", "idle"),
    ]
    assert all(e.call.startswith("call_") for e in room.records.of("infer.refused"))


def test_floods_of_refusals_are_summed_up(room: Room) -> None:
    with room.client() as client:
        for _ in range(30):
            client.get("/v1/models", headers={"authorization": "Bearer x"})
        for _ in range(20):
            client.get("/v1/models")
        room.call(room.gateway.evidence.sum_up)
        assert len(room.records.of("infer.refused")) <= 4
        time.sleep(1.05)
        room.call(room.gateway.evidence.sum_up)
        wait_for(lambda: sum(e.facts["count"] for e in room.records.of("infer.refused")) >= 45)
        counts: dict[tuple[str, str], int] = {}
        for e in room.records.of("infer.refused"):
            key = e.actor, e.facts["code"]
            counts[key] = counts.get(key, 0) + e.facts["count"]
        assert counts["unknown", "untrusted.api_key"] == 30
        assert 14 <= counts["anonymous", "too_many.rate"] <= 17
        assert len(room.records.of("infer.refused")) <= 6


def test_a_denial_of_the_gate_is_its_own_record(room: Room) -> None:
    with room.engine():
        room.page.stop(ScopeKind.SUBJECT, "rae")
        assert room.ask("rae").status_code == 423
    decided, = room.records.of("gate.decided")
    assert decided.facts["decision"]["code"] == "stopped"
    assert not room.records.of("infer.answered") + room.records.of("infer.refused")


def test_no_key_no_prompt_and_no_answer_is_in_records_errors_or_logs(
    room: Room, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt, answer, told = "canaryprompt7x", "canaryanswer9y", "canarytool3z"
    spool = Spool(tmp_path / "spool", "node-1", "gateway")
    try:
        room.gateway.evidence.record = spool.record
        shown: list[str] = []

        def ask(who: str, path: str = "/v1/chat/completions", **more: Any) -> None:
            found = room.ask(who, path, messages=[{"role": "user", "content": prompt}], user=prompt, **more)
            shown.append(json.dumps(dict(found.headers)) + ("" if found.status_code == 200 else found.text))

        with room.engine("luna", Script(text=answer)), room.engine("astra", Script(text=answer)):
            for who in ("rae", "pat", "eve", "liz", "nobody", ""):
                ask(who)
                ask(who, model="astra", tools=[{"function": told}])
                ask(who, max_tokens=0)
                ask(who, model=prompt)
                ask(who, **{prompt[:6]: prompt})
            room.gateway.calls.directory = None  # type: ignore[assignment]
            ask("rae")  # a fault in our own code
            with room.client("rae") as client:
                client.post("/v1/completions", content=prompt.encode() + credential("rae").encode())
                client.get("/v1/models", params={"key": credential("rae")})
        room.call(room.gateway.evidence.sum_up)
        wait_for(lambda: not room.gateway.evidence._under_way)
    finally:
        room.gateway.evidence.record = room.records
        spool.close()
    records = b"".join(body for s in unshipped(tmp_path / "spool") for body in s.bodies)
    assert records.count(b"infer.answered") >= 4  # control: the search has something to find in
    logged = "".join(capfd.readouterr())
    assert "a call failed: AttributeError" in logged
    everything = records.decode() + logged + "".join(shown)
    for secret in (prompt, answer, told, *(credential(w)[24:] for w in ("rae", "pat", "nobody"))):
        assert secret not in everything
    raw = subprocess.run(["grep", "-rlaE", f"{prompt}|{answer}|{'s' * 30}", str(tmp_path)], capture_output=True,
                         check=False)
    assert raw.stdout == b""
    assert os.listdir(tmp_path / "spool")
