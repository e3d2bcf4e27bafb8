"""A copy of the product with one guard removed, in which a named test must fail.

The copy has an environment of its own: same packages, our two distributions pointing to the copy, so that
programs started with `-I` run the mutated code too.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = [
    "interlock",
    "policy",
    "kms",
    "audit",
    "sandbox",
    "killswitch",
    "runners",
    "control_plane",
    "migrations",
    "tests",
    "examples",
    "pyproject.toml",
    "README.md",
    "docs",
    "Makefile",
    "requirements.lock",
    "deploy",
]


# Plugins that no test of a guard needs; each costs a run in the copy some time.
WITHOUT = [word for name in ("xdist", "playwright", "anyio") for word in ("-p", f"no:{name}")]


@dataclass(frozen=True)
class Mutation:
    """One guard: `old` occurs exactly once in `file`; with `new` in its place `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str
    root: bool = False


def make(target: Path) -> Path:
    """Copy the tree to `target` and give it an environment; return that environment's Python."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "out"))
        elif source.exists():
            shutil.copy2(source, target / name)
    environment = target / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    inside = environment / "lib" / version / "site-packages"
    outside = Path(sys.prefix) / "lib" / version / "site-packages"
    for entry in outside.iterdir():
        if not entry.name.startswith(("__editable__", "interlock_", "__pycache__")):
            (inside / entry.name).symlink_to(entry)
    (inside / "interlock_tree.pth").write_text(f"{target}\n")
    for name, folder in (("interlock_server", target), ("interlock_guest", target / "interlock")):
        info = next(outside.glob(f"{name}-*.dist-info"))
        shutil.copytree(info, inside / info.name)
        (inside / info.name / "direct_url.json").write_text(
            json.dumps({"dir_info": {"editable": True}, "url": folder.as_uri()})
        )
    for script in ("lint-imports",):
        (environment / "bin" / script).symlink_to(Path(sys.prefix) / "bin" / script)
    if (ROOT / ".venv-guest").exists():
        (target / ".venv-guest").symlink_to(ROOT / ".venv-guest")
    # Compiled once: a run in the copy writes no bytecode (-B), so it would compile the whole product each time. A
    # mutated file is newer than its bytecode and is read anew.
    product = [str(target / name) for name in COPIED[:9]]
    subprocess.run([str(environment / "bin" / "python"), "-m", "compileall", "-q", *product], check=True)
    return environment / "bin" / "python"


def apply(target: Path, mutation: Mutation) -> str:
    """Edit the copy and return the file's text from before; a guard that is not found exactly once is an error of
    the list."""
    path = target / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.name}: {text.count(mutation.old)} places in {mutation.file}"
    path.write_text(text.replace(mutation.old, mutation.new))
    compile(path.read_text(), str(path), "exec")
    return text


def undo(target: Path, mutation: Mutation, text: str) -> None:
    """Put back the text from before: the copy stays that of one moment, also while somebody edits the tree."""
    (target / mutation.file).write_text(text)


def outcome(target: Path, python: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run one test in the copy."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))}
    return subprocess.run(
        [str(python), "-B", "-m", "pytest", "-x", "-q", "--no-header", *WITHOUT, test],
        cwd=target,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=150,
        env=clean,
    )
