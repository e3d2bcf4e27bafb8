"""The digest of a data set: by content, names and links; told beside the run, never in its way."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from interlock.event import EventType
from interlock.order import Dataset, Labels, LaunchOrder, Plan
from interlock.tier import Tier
from runners import data_digest
from runners.station import Station


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "d"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "b" / "c.txt").write_text("two" * 1000)
    (folder / "empty").touch()
    (folder / "link").symlink_to("a.txt")
    (folder / "out").symlink_to("/etc")
    return folder


def taken(root: Path) -> dict[str, Any]:
    return data_digest.digest_of(root, threading.Event())


def test_the_same_content_has_the_same_digest_wherever_it_lies(root: Path, tmp_path: Path) -> None:
    first = taken(root)
    assert (first["files"], first["bytes"]) == (3, 3003)
    root.rename(tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / "a.txt", (1, 1))
    assert taken(tmp_path / "elsewhere") == first
    assert taken(tmp_path / "elsewhere" / "a.txt")["bytes"] == 3


@pytest.mark.parametrize("change", [
    lambda d: (d / "a.txt").write_text("onf"), lambda d: (d / "a.txt").rename(d / "a2.txt"),
    lambda d: (d / "empty").unlink(), lambda d: (d / "new").touch(),
    lambda d: ((d / "link").unlink(), (d / "link").symlink_to("b/c.txt")),
    lambda d: ((d / "link").unlink(), (d / "link").write_text("one")),
    lambda d: ((d / "a.txt").write_text("on"), (d / "empty").write_text("e")),
])
def test_every_change_shows(root: Path, change: Any) -> None:
    before = taken(root)
    change(root)
    assert taken(root)["digest"] != before["digest"]


def test_a_link_is_not_followed_and_a_pipe_is_not_read(root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert taken(root)["files"] == 3


def _told(root: Path, over: threading.Event, *paths: Path) -> list[tuple[EventType, dict[str, Any]]]:
    found: list[tuple[EventType, dict[str, Any]]] = []
    station = SimpleNamespace(roots=(root.parent,), record=lambda kind, _order, facts: found.append((kind, facts)))
    plan = Plan(("x",), Tier.NONE, "lab", datasets=tuple(Dataset(p.name, str(p)) for p in paths))
    order = LaunchOrder("l", "run_1", 1, Labels("lab", "a", "a", "run_1", "n", Tier.NONE), plan, 0, 1000, 1000, {})
    data_digest.tell(cast(Station, station), order, over)
    return found


def test_each_data_set_is_told_also_one_without_digest(root: Path, tmp_path: Path) -> None:
    found = _told(root, threading.Event(), root, tmp_path / "missing")
    assert [kind for kind, _ in found] == [EventType.DATA_DIGESTED] * 2
    assert found[0][1] == {"name": "d", "path": str(root), **taken(root)}
    assert (found[1][1]["digest"], found[1][1]["why"]) == ("", "NotFound")


def test_gives_up_when_the_run_is_over_or_the_data_is_too_much(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    over.set()
    assert _told(root, over, root)[0][1]["digest"] == ""
    monkeypatch.setattr(data_digest, "MAX_BYTES", 1000)
    assert _told(root, threading.Event(), root)[0][1]["digest"] == ""
    monkeypatch.setattr(data_digest, "MAX_BYTES", 1 << 20)
    assert _told(root, threading.Event(), root)[0][1]["digest"].startswith("sha256:")
