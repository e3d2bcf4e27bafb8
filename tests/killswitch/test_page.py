"""The stop page and the deadline page, read as other processes read them."""

import os
import time
from pathlib import Path

import pytest

from interlock.order import Labels, Mode, Scope, StopOrder
from interlock.permit import boottime_ms
from killswitch import page
from killswitch.page import DeadlineWriter, StopPage, StopPageWriter, read_deadline_ms
from killswitch.state import StopState
from tests.killswitch.site import Site

LABELS: Labels = Site().labels()


class Pages:
    def __init__(self, folder: Path) -> None:
        self.page, self.file, self.state = folder / "stop-page", folder / "stop-state.json", StopState()
        self.writer = StopPageWriter(self.page, self.file)
        self.writer.write(self.state)
        self.reader = StopPage(self.page, self.file)

    def patch(self, offset: int, data: bytes) -> None:
        self.page.chmod(0o644)
        with open(self.page, "r+b") as out:
            out.seek(offset)
            out.write(data)

    def stop(self, id_: str = "a") -> None:
        self.state.apply_stop(StopOrder(id_, Scope.parse("tenant:acme"), Mode.KILL, 1, "otto", ""))
        self.writer.write(self.state)


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(tmp_path)


def test_says_what_is_stopped(pages: Pages) -> None:
    assert pages.reader.stopped(LABELS) is None
    before = pages.reader.epoch()
    pages.stop()
    found = pages.reader.stopped(LABELS)
    assert found is not None
    assert found.id == "a"
    assert pages.reader.epoch() == before + 1
    assert pages.reader.stopped(Site(node="b").labels(tenant="other")) is None
    assert oct(pages.page.stat().st_mode & 0o777) == oct(pages.file.stat().st_mode & 0o777) == "0o444"


def stale(pages: Pages) -> bool:
    found = pages.reader.stopped(LABELS)
    one, two = pages.reader.epoch(), pages.reader.epoch()
    return found is not None and found.id == "stale" and one < 0 and two < 0 and one != two


def test_refuses_when_the_page_is_older_than_two_seconds(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    now = page.boottime_ns()
    monkeypatch.setattr(page, "boottime_ns", lambda: now + 1_990_000_000)
    assert pages.reader.stopped(LABELS) is None
    monkeypatch.setattr(page, "boottime_ns", lambda: now + 2_100_000_000)
    assert stale(pages)


@pytest.mark.parametrize(
    ("offset", "data"), [(0, b"ILKSTOPX"), (8, b"\x02"), (16, bytes(16)), (32, b"\x01"), (56, bytes(32))]
)
def test_refuses_when_magic_version_boot_sequence_or_hash_is_off(pages: Pages, offset: int, data: bytes) -> None:
    assert pages.reader.stopped(LABELS) is None
    pages.patch(offset, data)
    assert stale(pages)


def test_refuses_when_page_or_state_is_missing_short_or_odd(pages: Pages, tmp_path: Path) -> None:
    fresh = Pages(tmp_path)
    fresh.file.unlink()
    assert stale(fresh)
    fresh.file.write_text("{}")
    assert stale(fresh)
    fresh.page.unlink()
    assert stale(fresh)
    fresh.page.write_bytes(b"")
    assert stale(fresh)


def test_reads_on_after_a_restart_of_the_supervisor(
    pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pages.reader.stopped(LABELS) is None
    again = Pages(tmp_path)
    again.stop("b")
    now = page.boottime_ns()
    monkeypatch.setattr(page, "boottime_ns", lambda: now + 2_100_000_000)
    again.writer.write(again.state)
    found = pages.reader.stopped(LABELS)
    assert found is not None
    assert found.id == "b"


def test_refuses_when_the_state_cannot_be_published(pages: Pages) -> None:
    pages.file.unlink()
    pages.file.mkdir()
    pages.stop()
    assert stale(pages)


def test_a_wall_clock_jump_changes_nothing(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in (-86_400, 86_400):
        shifted = time.time() + day
        monkeypatch.setattr(time, "time", lambda shifted=shifted: shifted)
        monkeypatch.setattr(time, "time_ns", lambda shifted=shifted: int(shifted * 1e9))
        assert pages.reader.stopped(LABELS) is None


def test_the_deadline_page_holds_one_number(tmp_path: Path) -> None:
    path = tmp_path / "run_1.1"
    writer = DeadlineWriter(path, 123_456)
    assert read_deadline_ms(path) == 123_456
    raw = path.read_bytes()
    assert (len(raw), raw[:8], int.from_bytes(raw[8:16], "little")) == (4096, b"ILKDEAD1", 123_456_000_000)
    assert raw[16:32].hex() == Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    writer.set(boottime_ms() + 5)
    assert read_deadline_ms(path) > 123_456
    writer.set(0)
    assert read_deadline_ms(path) == 0
    writer.remove()
    with pytest.raises(FileNotFoundError):
        read_deadline_ms(path)


def test_refuses_when_the_deadline_page_is_of_another_boot_or_short(tmp_path: Path) -> None:
    path = tmp_path / "run_1.1"
    DeadlineWriter(path, 1 << 40)
    assert read_deadline_ms(path) == 1 << 40
    raw = path.read_bytes()
    os.chmod(path, 0o644)
    for bad in (raw[:16] + bytes(16) + raw[32:], raw[:100], b"X" + raw[1:]):
        path.write_bytes(bad)
        assert read_deadline_ms(path) == 0
