"""One lab for all stories: it is expensive, and a product that lives through all of them is the better proof."""

import os
from collections.abc import Iterator

import pytest

from tests.stories.lab import Lab, make


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("stories need root: an own uid a run, control groups")
    found = make()
    try:
        found.rise()
        yield found
    finally:
        found.down()
