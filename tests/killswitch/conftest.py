"""Fixtures of this room."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.killswitch.host import Host
from tests.killswitch.site import Site


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def host() -> Iterator[Host]:
    if os.geteuid() != 0:
        pytest.skip("needs root: a supervisor, control groups and uids")
    if shutil.which("unshare") is None:
        pytest.skip("needs namespaces")
    found = Host()
    found.watch()
    try:
        yield found
    finally:
        found.clean()
