"""Short folders below /tmp, a site with its simulator, a joined node."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.folders import Folders
from runners.join import join
from tests.runners.programs import Lab
from tests.runners.simulator import Simulator, Site

PROBES = Path(tempfile.gettempdir()) / f"ilprobes{os.getpid()}.json"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a node runs as root")


@pytest.fixture
def short() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ilr", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def site(short: Path) -> Site:
    return Site(short / "site")


@pytest.fixture
def simulator(site: Site) -> Iterator[Simulator]:
    found = Simulator(site)
    yield found
    found.away()


@pytest.fixture
def host(short: Path) -> Folders:
    return Folders(short / "s", short / "r")


@pytest.fixture
def joined(simulator: Simulator, host: Folders, short: Path) -> Folders:
    join(simulator.join_file(short / "join.json"), host)
    return host


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One host for all tests that only launch; real supervisor, real node."""
    path = Path(tempfile.mkdtemp(prefix="ill", dir="/tmp"))
    path.chmod(0o755)
    found = None
    try:
        found = Lab(path, PROBES)
        yield found
    finally:
        if found is not None:
            found.end()
        shutil.rmtree(path)


@pytest.fixture
def own_lab(short: Path) -> Iterator[Lab]:
    """A host of its own, for tests that stop everything or kill a program."""
    found = Lab(short, PROBES)
    yield found
    found.end()


@pytest.fixture(scope="session", autouse=True)
def _forget_probes() -> Iterator[None]:
    yield
    PROBES.unlink(missing_ok=True)
