"""The spool under real faults: fsync order, kill -9, full disk, deleted files, two writers."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from audit import segment
from audit.leaf import GENESIS, chain, decode
from audit.spool import Spool, ack, marks, unshipped
from interlock.errors import Conflict, Malformed, NotRecorded, Refusal
from interlock.event import Event, EventType
from tests.audit.conftest import step


def _bodies(folder: Path) -> list[bytes]:
    return [body for shipment in unshipped(folder) for _, body in shipment.records]


def _check_chain(bodies: list[bytes]) -> None:
    prev = GENESIS
    for seq, body in enumerate(bodies):
        leaf = decode(body)
        assert (leaf.seq, leaf.prev) == (seq, prev)
        prev = chain(body)


@pytest.fixture
def spool(folder: Path) -> Iterator[Spool]:
    made = Spool(folder / "s", "n1", "launcher")
    yield made
    try:
        made.close()
    except NotRecorded:
        pass


def _fill(spool: Spool) -> tuple[int, NotRecorded]:
    """Record until refused; return how many went in and the refusal."""
    for n in range(4000):
        try:
            spool.record(step(n, pad="x" * 2000))
        except NotRecorded as error:
            return n, error
    raise AssertionError("the disk never got full")


def _hog(path: Path) -> None:
    """Take the rest of the disk."""
    with path.open("wb", buffering=0) as more:
        try:
            while True:
                more.write(bytes(4096))
        except OSError:
            return


def test_a_stream_opens_chains_and_closes(folder: Path) -> None:
    spool = Spool(folder, "n1", "launcher")
    written = spool.record(step(1))
    assert (written.stream, written.seq) == (spool.stream, 1)
    last = spool.record(step(2))
    stream, seq, digest = spool.mark()
    spool.close()
    bodies = _bodies(folder)
    assert (stream, seq, digest) == (spool.stream, last.seq, chain(bodies[2]))
    types = [decode(b).event["type"] for b in bodies]
    assert types == ["stream.opened", "run.step", "run.step", "stream.closed"]
    _check_chain(bodies)


def test_the_next_stream_names_its_predecessor(folder: Path) -> None:
    first = Spool(folder, "n1", "launcher")
    first.record(step(1))
    first.close()
    second = Spool(folder, "n1", "launcher")
    second.close()
    opened = decode(next(s for s in unshipped(folder) if s.stream == second.stream).bodies[0])
    before = opened.facts["predecessor"]
    assert (before["stream"], before["next_seq"], before["torn_bytes"]) == (first.stream, 3, 0)
    assert before["hash"] == chain(next(s for s in unshipped(folder) if s.stream == first.stream).bodies[-1])


def test_record_returns_only_after_fsync(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the one that writes nor for those whose records wait for the next batch."""
    real, gate, entered = os.fsync, threading.Event(), threading.Event()
    returned: list[int] = []

    def held(fd: int) -> None:
        entered.set()
        assert gate.wait(20)
        real(fd)

    def work() -> None:
        returned.append(spool.record(step(1)).seq)

    monkeypatch.setattr(os, "fsync", held)
    threads = [threading.Thread(target=work) for _ in range(4)]
    threads[0].start()
    assert entered.wait(5), "nothing was fsynced"
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.3)
    assert returned == [], "a record was given away before it was durable"
    gate.set()
    for thread in threads:
        thread.join(10)
    assert sorted(returned) == [1, 2, 3, 4]


def test_refuses_when_fsync_fails_and_never_succeeds_again(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.record(step(1))
    before = spool.mark()
    real = os.fsync

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(NotRecorded) as refused:
        spool.record(step(2))
    assert refused.value.code == "not_recorded.failed"
    assert refused.value.next_step
    monkeypatch.setattr(os, "fsync", real)
    for _ in range(2):
        with pytest.raises(NotRecorded, match="Input/output"):
            spool.record(step(3))
    assert spool.mark() == before


def test_refuses_when_the_spool_was_unlinked(spool: Spool, folder: Path) -> None:
    spool.record(step(1))
    next((folder / "s" / spool.stream).glob("*.seg")).unlink()
    with pytest.raises(NotRecorded) as refused:
        spool.record(step(2))
    assert refused.value.code == "not_recorded.unlinked"
    with pytest.raises(NotRecorded):
        spool.record(step(3))


def test_refuses_when_the_folder_was_moved_away_or_the_file_replaced(folder: Path) -> None:
    for harm in ("move", "replace"):
        spool = Spool(folder / harm, "n1", "launcher")
        spool.record(step(1))
        here = folder / harm / spool.stream
        if harm == "move":
            here.rename(folder / "elsewhere")
        else:
            path = next(here.glob("*.seg"))
            (folder / "copy").write_bytes(path.read_bytes())
            (folder / "copy").rename(path)
        with pytest.raises(NotRecorded) as refused:
            spool.record(step(2))
        assert refused.value.code == "not_recorded.unlinked"
        spool.close()


def test_refuses_when_an_event_has_a_float_or_is_too_large(spool: Spool) -> None:
    with pytest.raises(Malformed):
        spool.record(step(1, odd=1.5))
    with pytest.raises(Malformed) as refused:
        spool.record(step(1, big="x" * 70_000))
    assert refused.value.code == "malformed.too_large"
    assert spool.record(step(1, big="x" * 60_000)).seq == 1


def test_refuses_when_a_second_writer_has_the_same_name(spool: Spool, folder: Path) -> None:
    with pytest.raises(Conflict) as refused:
        Spool(folder / "s", "n1", "launcher")
    assert refused.value.code == "conflict.second_start"
    Spool(folder / "s", "n1", "broker").close()


def test_refuses_when_closed(folder: Path) -> None:
    spool = Spool(folder, "n1", "launcher")
    spool.close()
    spool.close()
    with pytest.raises(NotRecorded) as refused:
        spool.record(step(1))
    assert refused.value.code == "not_recorded.closed"


def test_refuses_when_a_forked_child_writes(spool: Spool) -> None:
    def child(out: "multiprocessing.connection.Connection") -> None:
        try:
            spool.record(step(1))
        except NotRecorded as error:
            out.send(error.code)
        os._exit(0)

    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert mine.poll(10)
    assert mine.recv() == "not_recorded.forked"
    process.join()
    assert spool.record(step(2)).seq == 1


def test_refuses_when_the_folder_cannot_be_used(folder: Path) -> None:
    (folder / "file").write_text("x")
    with pytest.raises(NotRecorded):
        Spool(folder / "file", "n1", "launcher")
    with pytest.raises(Malformed):
        Spool(folder / "ok", "control", "launcher")
    with pytest.raises(Malformed):
        Spool(folder / "ok", "../n1", "launcher")


def test_group_commit_of_many_threads(spool: Spool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, syncs = os.fsync, []

    def counted(fd: int) -> None:
        syncs.append(fd)
        time.sleep(0.002)
        real(fd)

    monkeypatch.setattr(os, "fsync", counted)
    seqs: list[int] = []

    def work(number: int) -> None:
        for i in range(10):
            seqs.append(spool.record(step(number * 100 + i)).seq)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(seqs) == list(range(1, 241))
    assert len(syncs) < 120, "records did not share an fsync"
    _check_chain(_bodies(folder / "s"))


def test_a_failing_batch_takes_those_behind_it_down(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, entered, codes = threading.Event(), threading.Event(), []

    def broken(fd: int) -> None:
        entered.set()
        gate.wait(20)
        raise OSError(errno.EIO, "Input/output error")

    def work() -> None:
        try:
            spool.record(step(1))
            codes.append("recorded")
        except NotRecorded as error:
            codes.append(error.code)

    monkeypatch.setattr(os, "fsync", broken)
    threads = [threading.Thread(target=work) for _ in range(6)]
    threads[0].start()
    assert entered.wait(5)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.2)
    gate.set()
    for thread in threads:
        thread.join(10)
    assert codes == ["not_recorded.failed"] * 6


WRITER = textwrap.dedent("""
    import os, sys, threading
    from pathlib import Path
    from audit.spool import Spool
    from interlock.event import Event, EventType
    spool = Spool(Path(sys.argv[1]), "n1", "launcher")
    def work(n):
        i = 0
        while True:
            i += 1
            w = spool.record(Event(EventType.RUN_STEP, "person/ada", facts={"n": i, "pad": "x" * (i % 900)}))
            os.write(1, f"{w.stream} {w.seq}\\n".encode())
    for n in range(3):
        threading.Thread(target=work, args=(n,), daemon=True).start()
    work(9)
""")


def test_kill_dash_nine_loses_nothing_that_was_acknowledged(folder: Path) -> None:
    acked: dict[str, int] = {}
    for turn in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder / "s")], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(20 + turn * 7)]
        os.kill(writer.pid, signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.stdout.close()
        writer.wait()
        for line in lines:
            stream, _, seq = line.strip().partition(" ")
            if seq and line.endswith("\n"):
                acked[stream] = max(acked.get(stream, -1), int(seq))
    Spool(folder / "s", "n1", "launcher").close()
    found = {s: n for s, n, _ in marks(folder / "s")}
    assert len(acked) == 6
    for stream, seq in acked.items():
        assert found[stream] >= seq, "an acknowledged record is gone"
    for each in segment.streams(folder / "s"):
        with segment.opened(folder / "s", each.stream) as fd:
            _check_chain([b for first in segment.segments(fd) for b in segment.read(fd, first).bodies])


@pytest.mark.parametrize("cut", [1, 7, 9, 40])
def test_a_torn_tail_is_cut_and_the_loss_reported(folder: Path, cut: int) -> None:
    code = "import os,sys;" + textwrap.dedent("""
        from pathlib import Path
        from audit.spool import Spool
        from interlock.event import Event, EventType
        s = Spool(Path(sys.argv[1]), "n1", "launcher")
        for n in range(5): s.record(Event(EventType.RUN_STEP, "person/ada", facts={"n": n}))
        os._exit(9)
    """)
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False, cwd=Path.cwd())
    [(stream, seq, _)] = marks(folder)
    path = next((folder / stream).glob("*.seg"))
    data = path.read_bytes()
    whole = len(data.rstrip(b"\0"))
    path.write_bytes(data[: whole - cut] + bytes(64))
    spool = Spool(folder, "n1", "launcher")
    spool.close()
    shipped = {s.stream: s for s in unshipped(folder)}
    assert len(shipped[stream].bodies) == seq  # the torn one is gone, the others are there
    before = decode(shipped[spool.stream].bodies[0]).facts["predecessor"]
    assert before["next_seq"] == seq
    assert before["torn_bytes"] > 0
    assert path.stat().st_size == segment.parse(path.read_bytes(), 0).end
    _check_chain(list(shipped[stream].bodies))


def test_refuses_when_a_segment_has_no_header(folder: Path) -> None:
    spool = Spool(folder, "n1", "launcher")
    spool.record(step(1))
    spool.close()
    assert len(_bodies(folder)) == 3
    path = next((folder / spool.stream).glob("*.seg"))
    path.write_bytes(b"\0" * 200)
    with pytest.raises(NotRecorded) as refused:
        Spool(folder, "n1", "launcher")
    assert refused.value.code == "not_recorded.spool_corrupt"
    with pytest.raises(NotRecorded):
        unshipped(folder)


def test_segments_rotate_and_go_when_acknowledged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 20_000)
    spool = Spool(folder, "n1", "launcher")
    for n in range(60):
        spool.record(step(n, pad="x" * 1000))
    spool.close()
    here = folder / spool.stream
    assert len(list(here.glob("*.seg"))) > 2
    _check_chain(_bodies(folder))
    ack(folder, spool.stream, 40)
    [shipment] = unshipped(folder)
    assert shipment.first == 40
    ack(folder, spool.stream, 10)  # an old answer changes nothing
    assert unshipped(folder)[0].first == 40
    ack(folder, spool.stream, 62)
    assert unshipped(folder) == []
    assert len(list(here.glob("*.seg"))) == 1
    Spool(folder, "n1", "launcher").close()
    ack(folder, spool.stream, 62)
    assert not here.exists()
    assert len(unshipped(folder)) == 1


def test_refuses_when_the_ledger_acknowledges_more_than_there_is(spool: Spool, folder: Path) -> None:
    spool.record(step(1))
    ack(folder / "s", spool.stream, 2)
    with pytest.raises(Conflict) as refused:
        ack(folder / "s", spool.stream, 3)
    assert refused.value.code == "conflict.ack"


def test_refuses_when_a_stream_folder_is_a_link(spool: Spool, folder: Path) -> None:
    spool.record(step(1))
    assert len(unshipped(folder / "s")) == 1
    (folder / "s" / "broker-00000000-00000000").symlink_to(folder)
    with pytest.raises(NotRecorded):
        unshipped(folder / "s")
    with pytest.raises(NotRecorded):
        ack(folder / "s", "broker-00000000-00000000", 0)


def test_refuses_when_the_clock_runs_backwards_is_no_reason(folder: Path) -> None:
    """Records with times in the past are taken; order is seq, and streams are numbered, not timed."""
    first = Spool(folder, "n1", "launcher")
    now = time.time_ns() // 1000
    for back in (0, 10 * 60_000_000, 20 * 60_000_000):
        first.record(Event(EventType.RUN_STEP, "person/ada", occurred_us=now - back))
    first.close()
    second = Spool(folder, "n1", "launcher")
    second.close()
    assert [s.stream for s in unshipped(folder)] == [first.stream, second.stream]
    _check_chain(list(unshipped(folder)[0].bodies))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_refuses_when_the_disk_is_full_and_goes_on_after(folder: Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2560k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this host lets root mount no tmpfs")
    try:
        (disk / "hog").write_bytes(bytes(400_000))
        spool = Spool(disk / "s", "n1", "launcher")
        kept, error = _fill(spool)
        assert error.code == "not_recorded.full"
        assert error.next_step
        _hog(disk / "more")
        for n in range(20):
            with pytest.raises(NotRecorded) as refused:
                spool.record(step(n, pad="x" * 2000))
            assert refused.value.code == "not_recorded.full"
        assert spool.mark()[1] == kept
        ack(disk / "s", spool.stream, 5)  # shipping goes on: an answer needs no space
        assert unshipped(disk / "s")[0].first == 5
        with pytest.raises(NotRecorded):
            Spool(disk / "other", "n1", "broker")
        (disk / "hog").unlink()
        assert spool.record(step(1)).seq == kept + 1
        more, _ = _fill(spool)
        kept += more
        spool.close()  # its last record fits, thanks to the reserve
        bodies = [b"shipped"] * 5
        while found := unshipped(disk / "s"):
            bodies += found[0].bodies
            ack(disk / "s", spool.stream, len(bodies))
        assert len(bodies) == kept + 3
        assert [decode(b).seq for b in bodies[5:]] == list(range(5, kept + 3))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_refusals_carry_codes(folder: Path) -> None:
    """Every refusal of this room is typed; nothing foreign leaks out of a broken folder."""
    target = folder / "gone" / "deep"
    Spool(target, "n1", "x").close()
    (folder / "blocked").symlink_to("/proc/1/root")
    with pytest.raises(Refusal):
        ack(folder / "nowhere", "launcher-00000000-00000000", 1)
    assert EventType.STREAM_OPENED.value == decode(_bodies(target)[0]).event["type"]
