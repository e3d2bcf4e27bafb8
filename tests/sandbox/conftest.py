import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import LayerMissing
from interlock.order import Plan
from interlock.tier import Tier
from sandbox import cgroup, layers, uids
from sandbox.cgroup import Tree
from sandbox.profile import Host, Profile, for_plan
from sandbox.trial import put_down


def why_no_root() -> str:
    if os.geteuid() != 0:
        return "needs root: a uid of its own for each run"
    try:
        layers.find_bwrap()
        cgroup.own_tree("ilk-look")
    except LayerMissing as error:
        return f"this host lacks a layer: {error.message}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = why_no_root()
    for item in items:
        if why and item.get_closest_marker("root") and "sandbox" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def runtime() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ilk-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tree() -> Iterator[Tree]:
    found = cgroup.own_tree(f"ilk-test-{os.getpid()}")
    yield found
    for group in found.groups():
        put_down(group)
    found.remove()


@pytest.fixture(scope="session")
def host() -> Host:
    return layers.this_host()


@pytest.fixture(scope="session")
def pool() -> uids.Pool:
    return uids.Pool(60_600, 60_899)


MakeProfile = Callable[..., Profile]


@pytest.fixture
def make_profile(host: Host, pool: uids.Pool) -> MakeProfile:
    def make(tier: Tier = Tier.CRITICAL, *, env: dict[str, str] | None = None, **plan: Any) -> Profile:
        fields: dict[str, Any] = {"pids": 32, "memory_mb": 256, "work_mb": 8, "cpu_seconds": 20, **plan}
        profile = for_plan(Plan(("x",), tier, "t", **fields), pool.take(), host, env=tuple((env or {}).items()))
        return replace(profile)

    return make
