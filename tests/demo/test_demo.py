"""The demo as a user runs it, with its own state folder; it must end with 0, a full table and nothing left."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.root
@pytest.mark.demo
@pytest.mark.timeout(420)
@pytest.mark.skipif(os.geteuid() != 0, reason="the node needs root")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_demo_holds_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="ilk-", dir="/tmp") as folder:
        state = Path(folder) / "demo"
        environ = {"PATH": os.environ["PATH"], "DEMO_EXIT": "1", "DEMO_STATE": str(state)}
        done = subprocess.run([sys.executable, "-I", str(ROOT / "examples" / "demo" / "demo.py")], text=True,
                              timeout=400, env=environ, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        assert "9 of 9 steps ok" in done.stdout
        assert "everything is stopped" in done.stdout
        took = re.search(r"order to CONFIRMED in (\d+) ms", done.stdout)
        assert took is not None
        assert int(took[1]) <= 5_000
        lease = re.search(r"dead (\d+) ms after the control plane", done.stdout)
        assert lease is not None
        assert int(lease[1]) <= 12_000
        assert str(folder) not in Path("/proc/self/mountinfo").read_text()
        assert not list((state / "state").glob("run/*"))
