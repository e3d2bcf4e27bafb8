"""Started without root, supervisor and node say so in one line with the next step, and make nothing."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from control_plane.cli import owners
from control_plane.cli.owners import Owner

NOBODY = Owner(61_004, 61_004)


@pytest.mark.parametrize("words", [
    ("killswitch", "watch"), ("killswitch", "stop", "--all", "--reason", "x"), ("runners", "serve")])
def test_refuses_when_a_program_of_the_node_is_started_without_root(words: tuple[str, ...]) -> None:
    """The positive control: as root each of these runs in tests/killswitch, tests/runners and tests/stories."""
    folder = Path(tempfile.mkdtemp(prefix="ilf-", dir="/tmp"))
    try:
        where = ["--state", str(folder / "s"), "--runtime", str(folder / "r")]
        argv = [sys.executable, "-I", "-m", *words, *where]
        if os.geteuid() == 0:
            os.chown(folder, NOBODY.uid, NOBODY.gid)
            argv = owners.dropped(argv, NOBODY, [folder])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False,
                              env={"PATH": os.environ["PATH"], "HOME": str(folder)})
        assert done.returncode == 1, done.stdout
        error = json.loads(done.stderr.splitlines()[-1] if done.stderr else done.stdout.splitlines()[-1])["error"]
        assert error["code"] == "unavailable.root"
        assert "root" in error["next_step"] or "sudo" in error["next_step"]
        assert not list(folder.iterdir()), "nothing half-made"
    finally:
        shutil.rmtree(folder)
