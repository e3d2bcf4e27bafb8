"""Run one of OUR commands in a profile, without a supervisor: for the probes, the benchmark and the tests.

A trial has a control group, a deadline page and a disk of its own and gives its own GO, so it is never a
way to run a workload: the launcher (runners/) has no use for it.
"""

import os
import select
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import work
from sandbox.cgroup import Group, Tree
from sandbox.profile import Profile
from sandbox.start import Started, StartSpec, start

PAGE_MAGIC = b"ILKDEAD1"
_DEAD_S = 5.0


def write_page(path: Path, life_s: float) -> None:
    """Write a deadline page that ends `life_s` seconds from now (CLOCK_BOOTTIME)."""
    boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    deadline = max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(life_s * 1e9))
    content = struct.pack("<8sQ16s", PAGE_MAGIC, deadline, boot).ljust(4096, b"\0")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o444)
    try:
        os.pwrite(fd, content, 0)
    finally:
        os.close(fd)


def read_output(fd: int, timeout_s: float, until: bytes | None = None, before: bytes = b"") -> bytes:
    """Return what comes out of `fd`: to its end, to `until` (also in `before` plus it), or for `timeout_s`
    seconds; at most 1 MiB."""
    end, new = time.monotonic() + timeout_s, b""
    while len(new) < 1 << 20 and (until is None or until not in before + new):
        left = end - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            break
        data = os.read(fd, 65_536)
        if not data:
            break
        new += data
    return new


@dataclass
class Trial:
    """A blocked or running trial. `group` and `disk` are its own."""

    started: Started
    group: Group
    disk: work.Disk
    page: Path
    seen: bytes = b""

    def go(self) -> None:
        """Let the command run."""
        os.write(self.started.pipe_write_fd, b"G")

    def read(self, timeout_s: float, until: bytes | None = None) -> bytes:
        """Return the output so far: to its end, to `until`, or for at most `timeout_s` seconds."""
        self.seen += read_output(self.started.output_fd, timeout_s, until, self.seen)
        return self.seen

    def run(self, timeout_s: float) -> tuple[bytes, dict[str, Any] | None]:
        """GO, then return output and outcome; kills what is left after `timeout_s` seconds."""
        self.go()
        output = self.read(timeout_s)
        return output, self.started.report.outcome(0.5)


def put_down(group: Group) -> None:
    """Kill until the group is gone by rmdir; raises OSError when that does not happen within 5 s."""
    end = time.monotonic() + _DEAD_S
    while True:
        try:
            group.thaw()
            group.kill()
            group.remove()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


@contextmanager
def trial(
    profile: Profile, argv: tuple[str, ...], tree: Tree, runtime: Path, *, life_s: float = 30.0
) -> Iterator[Trial]:
    """Start `argv` in `profile` and clean everything up after; raises LayerMissing as `start` does."""
    id_ = f"trial_{uuid.uuid4().hex[:12]}.1"
    runtime.mkdir(parents=True, exist_ok=True)
    page = runtime / f"page-{id_}"
    write_page(page, life_s)
    group: Group | None = None
    disk: work.Disk | None = None
    started: Started | None = None
    try:
        group = tree.create(id_, profile.bounds.group)
        disk = work.mount(runtime, id_, profile)
        started = start(StartSpec(profile, argv, group, page, disk))
        yield Trial(started, group, disk, page)
    finally:
        if group is not None:
            put_down(group)
        if started is not None:
            started.process.wait()
            started.close()
        if disk is not None:
            disk.remove()
            with suppress(OSError):
                os.rmdir(runtime / "runs")
        page.unlink(missing_ok=True)
