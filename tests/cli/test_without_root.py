"""Without root: the control plane alone, what is missing has a code, Ctrl-C drains, a second `up` starts nothing."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cli import owners
from control_plane.cli.owners import Owner

NOBODY = Owner(61_003, 61_003)
COMMAND = str(Path(sys.executable).parent / "interlock")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ilk-", dir="/tmp"))
    if os.geteuid() == 0:
        os.chown(made, NOBODY.uid, NOBODY.gid)
    yield made
    shutil.rmtree(made)


def _argv(folder: Path, *words: str) -> list[str]:
    """As an ordinary user: this one, or (under root) a number that owns nothing else."""
    argv = [sys.executable, "-I", COMMAND, *words, "--state", str(folder / "state")]
    return argv if os.geteuid() else owners.dropped(argv, NOBODY, [folder])


def _free() -> list[str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return ["--people-port", str(one.getsockname()[1]), "--nodes-port", str(two.getsockname()[1])]


def _ask(folder: Path, *words: str) -> dict[str, object]:
    done = subprocess.run(_argv(folder, "--json", *words), capture_output=True, text=True, check=False, timeout=60,
                          env={"PATH": os.environ["PATH"], "HOME": str(folder)})
    value = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(value, dict), done.stderr
    return value


def test_refuses_when_not_root_to_start_a_node_and_the_rest_works(folder: Path) -> None:
    ports = _free()
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    with subprocess.Popen(_argv(folder, "up", "--site", "demo", *ports), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env=environ) as process:
        assert process.stderr is not None
        said = ""
        while "Ctrl-C drains" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        second = _ask(folder, "up", "--detach")
        assert second["started"] == []
        assert [m["code"] for m in second["missing"]] == ["unavailable.root"]  # type: ignore[attr-defined]
        assert "/enrol#" in str(_ask(folder, "bootstrap")["link"])
        process.send_signal(signal.SIGINT)
        before = time.monotonic()
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - before < 15
        assert process.returncode == 0, err
    assert "[unavailable.root]" in out
    assert "next step: sudo interlock up" in out
    assert not (folder / "state" / "run").exists()
    down = _ask(folder, "down")
    assert {p["how"] for p in down["programs"]} == {"was not running"}  # type: ignore[attr-defined]
