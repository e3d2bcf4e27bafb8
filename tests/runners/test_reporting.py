"""Reports of committed checkpoints: each once, none blocked by another, nothing followed that is no manifest."""

import os

import pytest

from interlock.errors import Unavailable, Untrusted
from runners import reporting
from runners.reporting import Reporter


class Taker:
    """Takes reports; `answers` holds what to raise for a folder's manifest."""

    def __init__(self):
        self.taken, self.refuse = [], {}

    def checkpoint(self, run, attempt, manifest):
        if manifest in self.refuse:
            raise self.refuse[manifest]
        self.taken.append((run, attempt, manifest))
        return "sha256:" + "0" * 64


@pytest.fixture
def made(host):
    host.node.mkdir(parents=True)
    return host


def _put(host, run, folder, data):
    path = host.store / run / folder
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(data)


def test_each_manifest_is_reported_once_also_after_a_restart(made):
    taker = Taker()
    reporter = Reporter(made, taker)
    reporter.turn()  # no store yet
    _put(made, "run_1", "5-1", b"five")
    _put(made, "run_2", "7-3", b"seven")
    reporter.turn()
    assert sorted(taker.taken) == [("run_1", 1, b"five"), ("run_2", 3, b"seven")]
    _put(made, "run_1", "6-1", b"six")
    reporter.turn()
    Reporter(made, taker).turn()
    assert len(taker.taken) == 3
    assert sorted(p.name for p in (made.node / "reported").iterdir()) == ["run_1.5-1", "run_1.6-1", "run_2.7-3"]


def test_one_that_is_refused_blocks_no_other_and_is_asked_again_later(made, monkeypatch):
    now = [1_000_000]
    monkeypatch.setattr(reporting, "boottime_ms", lambda: now[0])
    taker = Taker()
    _put(made, "run_1", "1-1", b"bad")
    _put(made, "run_1", "2-1", b"good")
    taker.refuse = {b"bad": Untrusted("no", code="manifest")}
    reporter = Reporter(made, taker)
    with pytest.raises(Untrusted):
        reporter.turn()
    assert taker.taken == [("run_1", 1, b"good")]
    taker.refuse = {}
    reporter.turn()
    assert len(taker.taken) == 1
    now[0] += reporting.AGAIN_MS
    reporter.turn()
    assert len(taker.taken) == 2


def test_a_control_plane_that_is_away_is_asked_at_the_next_turn(made):
    taker = Taker()
    _put(made, "run_1", "1-1", b"one")
    taker.refuse = {b"one": Unavailable("away")}
    reporter = Reporter(made, taker)
    with pytest.raises(Unavailable):
        reporter.turn()
    taker.refuse = {}
    reporter.turn()
    assert taker.taken == [("run_1", 1, b"one")]


@pytest.mark.parametrize("odd", ["manifest", "step", "run", "pipe", "large"])
def test_refuses_to_follow_links_or_read_what_is_no_manifest(made, short, odd):
    taker = Taker()
    secret = short / "secret"
    (secret / "1-1").mkdir(parents=True)
    (secret / "1-1" / "manifest.json").write_bytes(b"secret")
    made.store.mkdir(parents=True)
    run = made.store / "run_1"
    if odd == "run":
        run.symlink_to(secret)
    elif odd == "step":
        run.mkdir()
        (run / "1-1").symlink_to(secret / "1-1")
    else:
        (run / "1-1").mkdir(parents=True)
        path = run / "1-1" / "manifest.json"
        if odd == "manifest":
            path.symlink_to(secret / "1-1" / "manifest.json")
        elif odd == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(b"x" * (reporting.MAX_BYTES + 1))
    _put(made, "run_2", "1-1", b"good")
    _put(made, "run_2", "x-1", b"odd")
    Reporter(made, taker).turn()
    assert taker.taken == [("run_2", 1, b"good")]
