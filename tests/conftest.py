"""What goes to one worker when tests run side by side (`--dist loadgroup`): a file, or a folder that shares a lab."""

from pathlib import Path

import pytest

TOGETHER = {"stories", "runners", "console"}
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parts = item.path.relative_to(HERE).parts
        name = parts[0] if parts[0] in TOGETHER else "/".join(parts)
        item.add_marker(pytest.mark.xdist_group(name))
