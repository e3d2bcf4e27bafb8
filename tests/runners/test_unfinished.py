"""A gateway that died left calls open: its successor says so of each, once."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from audit import segment
from audit.spool import Spool
from interlock.call import Action, Call, Decision, Effect, Resource, Subject
from interlock.event import Event, EventType
from interlock.tier import Tier
from policy.facts import Facts
from policy.gate import decision_event
from runners.gateway_line import GatewayLine
from runners.unfinished import unfinished
from tests.inference.test_gateway_process import USER, Host
from tests.runners.conftest import needs_root


def decided(call: str, action: Action = Action.INFER, effect: Effect = Effect.ALLOW) -> Event:
    model = Resource("model", "luna", "lab", Tier.HIGH)
    asked = Call(action, Subject("key_1", "lab", "service", "rae"), model, "run_1",
                 "sha256:" + "5e" * 32, "127.0.0.1", call)
    return decision_event(asked, Facts(), Decision(effect, "x", "x"), 0)


def killed(spool: Spool) -> None:
    """Let go of a spool as a process does that is killed: no closing record."""
    spool._let_go()


def test_each_open_call_gets_its_end_once(tmp_path: Path) -> None:
    first = Spool(tmp_path, "n1", "gateway")
    for event in (
        decided("call_open"), decided("call_ended"), decided("call_refused"),
        decided("call_denied", effect=Effect.DENY), decided("call_other", Action.LOOK),
        decided("call_less", effect=Effect.DENY), decided("call_less", Action.INFER_RESTRICTED),
        Event(EventType.INFERRED, "key_1", "lab", "run_1", "call_ended", {"outcome": "ok"}),
        Event(EventType.INFER_REFUSED, "key_1", "lab", call="call_refused", facts={"code": "denied.tools"}),
    ):
        first.record(event)
    killed(first)
    second = Spool(tmp_path, "n1", "gateway")
    found = unfinished(tmp_path)
    assert {(e.call, e.facts["outcome"], e.facts["profile"], e.facts["model"]) for e in found} == {
        ("call_open", "unknown", "full", "luna"), ("call_less", "unknown", "restricted", "luna")}
    assert all((e.actor, e.tenant, e.run, e.facts["person"]) == ("key_1", "lab", "run_1", "rae") for e in found)
    killed(second)  # before it could write them: the next one finds them again
    third = Spool(tmp_path, "n1", "gateway")
    again = unfinished(tmp_path)
    assert [e.call for e in again] == [e.call for e in found]
    for event in again:
        third.record(event)
    assert unfinished(tmp_path) == []
    killed(third)


def test_what_cannot_be_read_is_said_and_stops_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = Spool(tmp_path, "n1", "gateway")
    first.record(decided("call_open"))
    killed(first)
    assert len(unfinished(tmp_path)) == 1  # control
    (tmp_path / first.stream / segment.file_name(0)).write_bytes(b"rot")
    assert unfinished(tmp_path) == []
    assert "cannot be read" in capfd.readouterr().err


@pytest.mark.root
@needs_root
def test_a_gateway_that_starts_says_so_before_it_serves() -> None:
    folder = Path(tempfile.mkdtemp(prefix="ilu", dir="/tmp"))
    folder.chmod(0o755)
    host = Host(folder)
    try:
        host.line.end()
        assert b"unknown" not in host.recorded()  # control
        spool = Spool(host.found.gateway_spool, "node-1", "gateway")
        spool.record(decided("call_open"))
        killed(spool)
        for each in host.found.gateway_spool.rglob("*"):
            os.chown(each, USER, USER)
        host.line = GatewayLine(host.found, "node-1", str(USER), 0)
        assert b'"outcome":"unknown"' in host.recorded()
    finally:
        host.line.end()
        shutil.rmtree(folder)
