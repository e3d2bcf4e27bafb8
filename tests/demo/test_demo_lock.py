"""Two demos in one folder: the second leaves the first alone, whatever step that one is at."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo"
CLEAR = ("import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from stage import Stage; "
         "Stage(Path('/'), Path(sys.argv[2])).replace_previous()")


def test_refuses_when_another_demo_walks_in_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "policy.bundle").write_text("of the first")
    held = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX)
    environ = {"PATH": os.environ["PATH"], "DEMO_STATE": str(tmp_path), "DEMO_EXIT": "1"}
    done = subprocess.run([sys.executable, "-I", str(FOLDER / "demo.py")], env=environ, capture_output=True,
                          text=True, timeout=60, check=False)
    os.close(held)
    assert done.returncode == 1, done.stderr
    assert "another demo walks" in done.stdout
    assert "DEMO_STATE=" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["policy.bundle"]
    subprocess.run([sys.executable, "-I", "-c", CLEAR, str(FOLDER), str(tmp_path)], check=True, timeout=60)
    assert [p.name for p in tmp_path.iterdir()] == ["home"], "the positive control: with nobody there it is replaced"
