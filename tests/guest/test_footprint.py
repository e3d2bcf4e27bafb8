"""The guest brings nothing of ours but `interlock` into somebody else's program."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.order import Plan
from interlock.tier import Tier
from sandbox import layers, uids
from sandbox.cgroup import own_tree
from sandbox.profile import for_plan
from sandbox.trial import trial

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = ("policy", "audit", "kms", "sandbox", "killswitch", "runners", "control_plane", "migrations")
WITH_TORCH = {"dcp_load", "dcp_save", "tensors"}  # loaded when a tensor moves, and not before
MODULES = sorted(p.stem for p in (ROOT / "interlock").glob("*.py") if p.stem not in {"__init__", *WITH_TORCH})


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder in which every name of ours is a trap."""
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(f"import os\nprint('loaded {name}', flush=True)\nos._exit(99)\n")
    return tmp_path


def _run(folder: Path, code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    (folder / "program.py").write_text(code)
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


def _guest_root(tmp_path: Path) -> Path:
    """What the sandbox binds at /opt/interlock-guest: the package and nothing else."""
    found = tmp_path / "guest"
    found.mkdir()
    (found / "interlock").symlink_to(ROOT / "interlock")
    return found


def test_the_traps_are_armed(trap: Path):
    assert _run(trap, "import policy").returncode == 99


def test_importing_all_of_interlock_loads_none_of_the_traps(trap: Path, tmp_path: Path):
    code = (
        "import importlib, json, sys\n"
        f"for name in {MODULES!r}: importlib.import_module('interlock.' + name)\n"
        "import interlock\n"
        "for name in interlock.__all__: getattr(interlock, name)\n"
        "print(json.dumps(sorted(m for m in sys.modules if m.split('.')[0] in "
        f"{(*HOSTILE, 'sqlalchemy', 'fastapi', 'casbin', 'httpx', 'torch')!r})))"
    )
    done = _run(trap, code, PYTHONPATH=str(_guest_root(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == []


def test_the_leash_needs_the_standard_library_alone(tmp_path: Path):
    code = (
        "import sys\nimport interlock.leash\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('cryptography', 'cffi', '_cffi_backend')])"
    )
    done = _run(tmp_path, code, PYTHONPATH=str(_guest_root(tmp_path)))
    assert done.stdout.strip() == "[]", done.stderr


def test_a_program_in_the_environment_of_the_sandbox_loads_its_own_policy(tmp_path: Path):
    (tmp_path / "policy.py").write_text("NAME = 'my own'\n")
    done = _run(tmp_path, "import policy, interlock\nprint(policy.NAME)\n", PYTHONPATH=str(_guest_root(tmp_path)))
    assert done.stdout == "my own\n", done.stderr


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: starts a real sandbox")
def test_a_program_in_the_real_sandbox_loads_its_own_policy(place: Path):
    code = place / "code"
    code.mkdir()
    (code / "policy.py").write_text("NAME = 'my own'\n")
    (code / "train.py").write_text("import policy, interlock\nprint(policy.NAME)\nprint(interlock.__name__)\n")
    for path in (code, *code.iterdir()):
        path.chmod(0o755)
    first = 60_100 + os.getpid() % 9 * 100
    uid = uids.Pool(first, first + 99).take()
    profile = for_plan(Plan(("x",), Tier.NONE, "lab"), uid, layers.this_host(), code=str(code))
    tree = own_tree(f"h3g{os.getpid()}")
    try:
        with trial(profile, ("python3", "/code/train.py"), tree, place) as one:
            output, outcome = one.run(20)
    finally:
        tree.remove()
    assert outcome == {"exit": 0}, output
    assert output.decode().splitlines() == ["my own", "interlock"]


@pytest.fixture
def place() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="ilg", dir="/tmp"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


@pytest.mark.guest
def test_the_control_plane_has_no_torch_and_the_guest_has_it_once() -> None:
    """Two environments: what decides, keeps keys or has root never loads a library that large."""
    for name in ("torch", "transformers", "safetensors", "numpy"):
        assert importlib.util.find_spec(name) is None, name
    guest = ROOT / ".venv-guest"
    found = list(guest.glob("lib/python3*/site-packages/torch/__init__.py"))
    assert len(found) == 1
    assert len(list(guest.rglob("libtorch_cpu.so"))) == 1
