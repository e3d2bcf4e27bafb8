"""Story 4: an auditor who trusts nobody verifies an export offline, with one file and a pinned key."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.stories.lab import ROOT, Lab

pytestmark = pytest.mark.root
VERIFY = ROOT / "audit" / "verify.py"


def verify(*words: str) -> int:
    """Run the single file as an auditor has it, alone in a folder."""
    return subprocess.run([sys.executable, "-I", *words], capture_output=True, check=False, cwd="/").returncode


def test_an_export_verifies_and_one_flipped_byte_does_not(lab: Lab, tmp_path: Path) -> None:
    lab.must("run", "--", "true", who="remy")
    pinned = tmp_path / "ledger.vkey"
    shutil.copy(lab.state / "trust" / "ledger.vkey", pinned)
    alone = shutil.copy(VERIFY, tmp_path / "verify.py")
    out = tmp_path / "evidence.zip"
    lab.must("audit", "export", str(out), who="olga", wait=120)
    assert verify(str(alone), str(out), "--key", str(pinned)) == 0
    assert verify(str(alone), str(out)) not in (0, 1), "without a pinned key: integrity only"
    largest = max(zipfile.ZipFile(out).infolist(), key=lambda i: i.file_size)
    assert largest.file_size > 2_000
    data = bytearray(out.read_bytes())
    for place in (len(data) // 3, len(data) // 2, len(data) - 200):
        bent = bytearray(data)
        bent[place] ^= 1
        (tmp_path / "bent.zip").write_bytes(bent)
        assert verify(str(alone), str(tmp_path / "bent.zip"), "--key", str(pinned)) == 1
    lab.refused("denied", "audit", "export", str(tmp_path / "no.zip"), who="remy")
    assert not (tmp_path / "no.zip").exists()
