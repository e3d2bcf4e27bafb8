"""A gateway for each test, in a short folder."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference.gateway_room import Room


@pytest.fixture
def room() -> Iterator[Room]:
    folder = Path(tempfile.mkdtemp(prefix="ilg", dir="/tmp"))
    found = Room(folder)
    try:
        yield found
    finally:
        found.close()
        shutil.rmtree(folder)
