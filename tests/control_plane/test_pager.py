"""NOT_CONFIRMED pages people within five seconds, also when nothing came at all."""

import json
import time
from dataclasses import replace
from pathlib import Path

from control_plane.pager import Pager
from control_plane.ticker import Ticker
from interlock.event import EventType
from tests.control_plane.conftest import House


def hooked(house: House, folder: Path, **more: int) -> Path:
    out, script = folder / "paged", folder / "hook"
    script.write_text(f"#!/bin/sh\ncat >> {out}; echo >> {out}\n")
    script.chmod(0o700)
    house.parts = replace(house.parts, settings=replace(house.parts.settings, on_unconfirmed=(str(script),), **more))
    return out


def pages(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.read_text().splitlines() if line] if out.exists() else []


def test_pages_once_when_nothing_came(staffed: House, tmp_path: Path) -> None:
    staffed.host()
    order = staffed.stop("everything")
    out = hooked(staffed, tmp_path, unconfirmed_ms=300)
    pager = Pager(staffed.parts)
    assert pager.look() == []
    time.sleep(0.35)
    assert pager.look() == [order]
    assert pager.look() == []
    assert [p["order"] for p in pages(out)] == [order]
    staffed.parts.desk.record_late()
    staffed.parts.ledger.sequence()
    assert len(staffed.parts.ledger.rows(type=EventType.STOP_UNCONFIRMED.value)) == 1


def test_pages_at_once_for_a_survivor_and_not_for_a_proof(staffed: House, tmp_path: Path) -> None:
    host = staffed.host()
    out = hooked(staffed, tmp_path)
    good, bad = staffed.stop("tenant:a"), staffed.stop("tenant:b")
    host.beat(receipts=[host.receipt(good).as_json(), host.receipt(bad, "not_confirmed", 3).as_json()])
    assert Pager(staffed.parts).look() == [bad]
    assert [p["state"] for p in pages(out)] == ["not_confirmed"]


def test_a_faulty_job_does_not_end_the_others(staffed: House) -> None:
    ticker = Ticker.of(staffed.parts)

    def broken() -> None:
        raise RuntimeError("x")

    ticker.jobs[0].act = broken
    ticker.tick()
    assert ticker.faults == {ticker.jobs[0].name: "RuntimeError"}
    assert staffed.parts.ledger.head().size > 0
