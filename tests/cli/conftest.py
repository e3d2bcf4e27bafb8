"""A server, a signed-in profile and the command in this process."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.command import execute
from control_plane.cli.profile import Profile
from tests.cli.server import PeopleServer

Ran = tuple[int, dict[str, Any], str]


@pytest.fixture
def server() -> Iterator[PeopleServer]:
    made = PeopleServer()
    yield made
    made.close()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ilk-", dir="/tmp") as folder:
        for name in [n for n in os.environ if n.startswith("INTERLOCK_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("INTERLOCK_HOME", folder)
        yield Path(folder)


@pytest.fixture
def remy(home: Path, server: PeopleServer) -> Profile:
    """Signed in at the server, with a person key."""
    profile = Profile(home / "profiles" / "default")
    profile.save({"url": server.url, "name": "remy", "person": "per_remy", "session": "session-secret"})
    profile.own_key()
    server.routes["GET /api/whoami"] = (200, {"id": "per_remy", "person": "per_remy", "name": "remy", "tenant": "lab",
                                              "roles": ["researcher"]})
    return profile


@pytest.fixture
def interlock(capfd: pytest.CaptureFixture[str], home: Path) -> Callable[..., Ran]:
    """Run a command line with --json: (exit status, its one object, stderr)."""

    def run(*words: str) -> Ran:
        capfd.readouterr()
        status = execute(["--json", *words])
        out, err = capfd.readouterr()
        lines = [line for line in out.splitlines() if line.strip()]
        assert len(lines) == 1, out
        value = json.loads(lines[0])
        assert isinstance(value, dict)
        return status, value, err

    return run
