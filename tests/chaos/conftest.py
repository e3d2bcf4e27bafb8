"""Fixtures: a host with the supervisor alone, and one with supervisor, node and a small control plane."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.killswitch.host import Host
from tests.runners.programs import Lab

PROBES = Path(tempfile.gettempdir()) / f"ilchaos{os.getpid()}.json"


@pytest.fixture(autouse=True)
def _need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: a supervisor, control groups and uids")


@pytest.fixture
def host() -> Iterator[Host]:
    """A supervisor as a process, and hostile processes in real control groups."""
    found = Host()
    found.watch()
    try:
        yield found
    finally:
        found.clean()


@pytest.fixture(scope="session")
def _probes() -> Iterator[Path]:
    yield PROBES
    PROBES.unlink(missing_ok=True)


@pytest.fixture
def lab(_probes: Path) -> Iterator[Lab]:
    """Supervisor and node as processes, runs in the real sandbox; for a test that kills or hangs one of them."""
    yield from _lab(_probes)


@pytest.fixture(scope="module")
def calm(_probes: Path) -> Iterator[Lab]:
    """The same for all tests of a file in which only runs misbehave."""
    yield from _lab(_probes)


def _lab(_probes: Path) -> Iterator[Lab]:
    path = Path(tempfile.mkdtemp(prefix="ilc", dir="/tmp"))
    path.chmod(0o755)
    found = None
    try:
        found = Lab(path, _probes)
        yield found
    finally:
        if found is not None:
            found.end()
        shutil.rmtree(path)
