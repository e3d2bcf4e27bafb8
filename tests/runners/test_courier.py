"""Deliveries: in order, bounded, patient with a control plane that is away, honest about what is lost."""

import os
import threading
from pathlib import Path

import pytest

from interlock.errors import Conflict, Malformed, Refusal, Unavailable
from runners import courier
from runners.collector import collect
from runners.courier import FILES, OUTPUT, Courier
from runners.outlet import Outlet, ship


class Receiver:
    """Takes deliveries like the control plane; `away` and `gap` bend it."""

    def __init__(self) -> None:
        self.states, self.data, self.files = [], b"", {}
        self.away, self.refuse_output = 0, None

    def _maybe(self) -> None:
        if self.away > 0:
            self.away -= 1
            raise Unavailable("away", code="control_plane")

    def state(self, run, attempt, body) -> None:
        self._maybe()
        self.states.append(body["state"])

    def output(self, run, attempt, offset, data) -> int:
        self._maybe()
        if self.refuse_output is not None:
            raise self.refuse_output
        if offset > len(self.data):
            raise Conflict("a piece is missing", code="offset", details={"next": len(self.data)})
        self.data += data[len(self.data) - offset:]
        return len(self.data)

    def file(self, run, attempt, name, data) -> None:
        self._maybe()
        self.files[name] = data


@pytest.fixture
def work(short, monkeypatch):
    monkeypatch.setattr(courier, "PAUSE_S", 0.05)
    monkeypatch.setattr(courier, "BEAT_S", 0.05)
    return short


def _courier(folder, receiver, heard: list[Refusal]) -> Courier:
    made = Courier(folder, "run_1", 1, receiver, heard.append)
    made.start()
    return made


def test_everything_arrives_in_order_though_nobody_was_there_at_first(work):
    receiver, heard = Receiver(), []
    receiver.away = 6
    folder = courier.begin(work, "run_1", 1)
    made = _courier(folder, receiver, heard)
    for state in ("admitted", "live"):
        made.tell({"state": state})
    (folder / OUTPUT).write_bytes(b"x" * 600_000)
    (folder / FILES).mkdir()
    (folder / FILES / "r.txt").write_bytes(b"r")
    made.finish({"state": "ended"})
    assert made.delivered.wait(10)
    assert receiver.states == ["admitted", "live", "ended"]
    assert receiver.data == b"x" * 600_000
    assert receiver.files == {"r.txt": b"r"}
    assert not folder.exists()
    assert heard == []


def test_another_program_takes_up_what_was_left(work):
    folder = courier.begin(work, "run_1", 2)
    (folder / OUTPUT).write_bytes(b"left")
    assert courier.left_behind(work) == [(folder, "run_1", 2)]
    receiver = Receiver()
    receiver.data = b"le"  # that much had arrived before
    made = _courier(folder, receiver, [])
    made.finish({"state": "ended"})
    assert made.delivered.wait(10)
    assert receiver.data == b"left"


def test_a_restored_receiver_gets_it_again(work):
    folder, receiver = courier.begin(work, "run_1", 1), Receiver()
    made = _courier(folder, receiver, [])
    (folder / OUTPUT).write_bytes(b"first,")
    made.grown.set()
    deadline = threading.Event()
    while receiver.data != b"first,":
        deadline.wait(0.02)
    receiver.data = b""
    with (folder / OUTPUT).open("ab") as more:
        more.write(b"second")
    made.finish({"state": "ended"})
    assert made.delivered.wait(10)
    assert receiver.data == b"first,second"


def test_refused_output_is_complained_about_once_and_the_end_still_arrives(work):
    folder, receiver, heard = courier.begin(work, "run_1", 1), Receiver(), []
    receiver.refuse_output = Malformed("too much", code="output_limit")
    (folder / OUTPUT).write_bytes(b"x")
    made = _courier(folder, receiver, heard)
    made.finish({"state": "ended"})
    assert made.delivered.wait(10)
    assert [h.code for h in heard] == ["malformed.output_limit"]
    assert receiver.states == ["ended"]


def test_refuses_when_the_receiver_makes_no_progress(short):
    (short / "o").write_bytes(b"abc")
    with pytest.raises(Malformed):
        ship(short / "o", 0, lambda offset, data: offset)
    assert ship(short / "o", 0, lambda offset, data: offset + len(data)) == 3
    assert ship(short / "missing", 5, lambda offset, data: 0) == 5


def test_output_beyond_the_limit_is_drained_and_counted(short):
    read, write = os.pipe()
    outlet = Outlet(read, short / "log", 10, threading.Event())
    outlet.start()
    os.write(write, b"0123456789abcdef")
    os.close(write)
    outlet.join(5)
    assert (short / "log").read_bytes() == b"0123456789"
    assert (outlet.written, outlet.truncated) == (10, 6)


def test_a_full_disk_does_not_stall_the_run():
    read, write = os.pipe()
    outlet = Outlet(read, Path("/dev/full"), 10, threading.Event())
    outlet.start()
    os.write(write, b"0123")
    os.close(write)
    outlet.join(5)
    assert (outlet.written, outlet.truncated) == (0, 4)
    assert "space" in outlet.failed


def test_the_collector_follows_nothing_and_keeps_to_the_budget(short):
    out = short / "work" / "out"
    out.mkdir(parents=True)
    (out / "b.txt").write_bytes(b"22")
    (out / "a.txt").write_bytes(b"1")
    (out / "c.txt").write_bytes(b"333")
    (short / "secret").write_bytes(b"s")
    (out / "link").symlink_to(short / "secret")
    (out / "sp ace").write_bytes(b"")
    harvest = collect(short / "work", 4)
    assert [(f.name, f.data) for f in harvest.files] == [("a.txt", b"1"), ("b.txt", b"22")]
    assert dict(harvest.skipped)["c.txt"].startswith("over the byte budget")
    assert {n for n, _ in harvest.skipped} == {"c.txt", "link", "sp ace"}
    assert collect(short / "nothing", 4).files == ()


def test_the_collector_refuses_a_folder_that_is_a_link(short):
    (short / "secret").mkdir()
    (short / "secret" / "key").write_bytes(b"k")
    (short / "work").mkdir()
    (short / "work" / "out").symlink_to(short / "secret")
    assert collect(short / "work", 100).files == ()
    (short / "work" / "out").unlink()
    (short / "secret").rename(short / "work" / "out")
    assert [f.name for f in collect(short / "work", 100).files] == ["key"]  # control
