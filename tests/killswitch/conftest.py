"""Fixtures of this room."""

import os
import shutil
from collections.abc import Iterator

import pytest

from killswitch.exchange import answer, beats
from killswitch.supervisor import Supervisor
from tests.killswitch.host import Host
from tests.killswitch.site import Site, short_folder


@pytest.fixture
def site() -> Site:
    return Site()


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: a supervisor, control groups and uids")


@pytest.fixture
def sup(site: Site) -> Iterator[Supervisor]:
    """A supervisor inside the test's process: real disk, real control groups, ticks by hand."""
    need_root()
    folder = short_folder()
    site.join(folder / "s")
    found = Supervisor(folder / "s", folder / "r", [])
    found.start()
    answer(found, site.answer(beats(found)))
    try:
        yield found
    finally:
        found.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def host() -> Iterator[Host]:
    """A supervisor as a process of its own."""
    need_root()
    found = Host()
    found.watch()
    try:
        yield found
    finally:
        found.clean()
