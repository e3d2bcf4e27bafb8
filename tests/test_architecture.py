"""Architecture as tests: what import-linter cannot see."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = CONFIG["tool"]["importlinter"]["root_packages"]
NOT_PRODUCT = {"tests", "docs", "deploy", "bench", "examples"}
BANNED = {
    "utils",
    "util",
    "helpers",
    "helper",
    "manager",
    "managers",
    "service",
    "services",
    "base",
    "common",
    "misc",
    "core",
    "shared",
}
STDLIB = sys.stdlib_module_names


def sources() -> list[Path]:
    """Return every Python file of the product (tracked or about to be)."""
    return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    """Return every such file, parsed once for all tests here."""
    return tuple((path, ast.parse(path.read_text())) for path in sources())


def test_every_top_level_package_is_in_the_contracts() -> None:
    found = {p.parent.name for p in ROOT.glob("*/__init__.py")} - NOT_PRODUCT
    assert found == set(PACKAGES)


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


# Into which file, which import, and the contract that must break by it.
PLANTED = (
    ("killswitch/state.py", "sqlalchemy", "the kill switch works with everything else dead"),
    ("runners/inference/calls.py", "runners.inference.engine", "the engine is started as a process, never imported"),
    ("runners/inference/pool.py", "runners.inference.weights", "what runs in an engine runs nowhere else"),
    ("runners/inference/dialing.py", "policy.gate", "the engine knows the file format and its sockets"),
    ("runners/inference/pieces.py", "runners.inference.dialing", "no cycles anywhere"),
    ("runners/broker.py", "kms.local", "a node holds no database, no key provider"),
    ("runners/saving.py", "torch", "torch never enters a process that decides"),
    ("kms/ring.py", "pkcs11", "one file speaks to a token"),
)


def test_planted_bad_imports_are_caught(tmp_path: Path) -> None:
    """The contracts can fail: a kill switch that imports the database breaks them, and so on."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name, module, _ in PLANTED:
        file = tmp_path / name
        file.write_text(file.read_text() + f"\nimport {module}  # noqa\n")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode != 0
    broken = {line for line in done.stdout.splitlines() if "BROKEN" in line}
    assert not [rule for _, _, rule in PLANTED if not any(line.startswith(rule) for line in broken)], broken


def test_no_file_or_class_has_an_empty_name() -> None:
    bad = []
    for path, tree in trees():
        if path.stem in BANNED or any(part in BANNED for part in path.relative_to(ROOT).parts[:-1]):
            bad.append(str(path.relative_to(ROOT)))
        if path.stem in STDLIB and path.stem not in {"__init__", "__main__"} and path.parent.name == "":
            bad.append(str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and re.search(
                r"(Utils?|Helpers?|Manager|Service|Base|Misc|Common)$", node.name
            ):
                bad.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert not bad


def test_files_stay_readable() -> None:
    long = {}
    for path in sources():
        lines = path.read_text().count("\n")
        head = path.read_text()[:600].lower()
        if lines > 500 or (lines > 400 and "lines" not in head and "length" not in head):
            long[str(path.relative_to(ROOT))] = lines
    assert not long, "over 400 lines without a reason in the first lines, or over 500"


def test_functions_stay_readable() -> None:
    long = []
    for path, tree in trees():
        if path.is_relative_to(ROOT / "migrations" / "versions"):
            continue  # a migration is a list of tables
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 80:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {length}")
    assert not long


def test_public_names_have_docstrings_and_types() -> None:
    bad = []
    for path, tree in trees():
        if path.is_relative_to(ROOT / "migrations" / "versions"):
            continue
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            bad.append(f"{path.relative_to(ROOT)}: module")
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and not ast.get_docstring(node):
                bad.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert not bad


def test_init_files_are_empty() -> None:
    allowed = {"interlock/__init__.py", "control_plane/cli/__init__.py"}
    full = {str(p.relative_to(ROOT)) for p in sources() if p.name == "__init__.py" and p.read_text().strip()}
    assert full <= allowed


def test_only_the_gate_makes_a_permit() -> None:
    """No other construction, replace, copy or pickle of a permit, by name or by string."""
    makers = []
    for path, tree in trees():
        relative = str(path.relative_to(ROOT))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in {"Permit", "permit.Permit"} and relative != "interlock/permit.py":
                    makers.append(f"{relative}:{node.lineno} {called}")
                if (
                    called.split(".")[-1] == "issue"
                    and "permit" in (called + path.read_text()[:3000])
                    and relative not in {"policy/gate.py", "interlock/permit.py"}
                    and re.search(r"from interlock\.permit import .*\bissue\b", path.read_text())
                ):
                    makers.append(f"{relative}:{node.lineno} {called}")
            if (
                isinstance(node, ast.Name | ast.Attribute)
                and ast.unparse(node).endswith("_ISSUER")
                and relative != "interlock/permit.py"
            ):
                makers.append(f"{relative}:{node.lineno} _ISSUER")
            if isinstance(node, ast.ImportFrom) and node.module == "interlock.permit" and relative != "policy/gate.py":
                makers += [f"{relative}: imports {a.name}" for a in node.names if a.name in {"issue", "_ISSUER"}]
    assert not makers


NEVER_TRUE = {"shell", "trust_remote_code"}


def test_nothing_unpickles_or_evaluates() -> None:
    # A run's spec goes from the root launcher DOWN to its own child through a sealed memory file, before any code
    # of the workload exists; run init compiles its own neighbour because -I -S leaves nothing to import.
    known = {"sandbox/enter.py": {"marshal"}, "sandbox/start.py": {"marshal"}, "sandbox/init.py": {"marshal", "exec"}}
    bad = []
    for path, tree in trees():
        fine = known.get(str(path.relative_to(ROOT)), set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name.split(".")[0] for a in node.names} | {(getattr(node, "module", "") or "").split(".")[0]}
                if names & ({"pickle", "cloudpickle", "joblib", "marshal", "shelve", "dill"} - fine):
                    bad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in {"eval", "exec", "os.system", "os.popen", "torch.load", "torch.save"} - fine:
                    bad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.keyword) and node.arg in NEVER_TRUE and ast.unparse(node.value) != "False":
                bad.append(f"{path.relative_to(ROOT)}:{node.value.lineno} {node.arg}")
    assert not bad


def test_imports_by_string_are_known() -> None:
    """`importlib` hides an edge from import-linter; each use is listed here with its reason."""
    allowed = {"interlock/origin.py"}  # checks where packages come from
    found = {
        str(path.relative_to(ROOT))
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"importlib.import_module", "__import__", "import_module"}
    }
    assert found <= allowed


def test_stand_alone_files_import_the_standard_library_only() -> None:
    """Run init, the launcher's child and the offline verifier run where nothing of ours is installed."""
    for name, extra in {
        "sandbox/init.py": set(),
        "sandbox/enter.py": set(),
        "sandbox/drop.py": set(),
        "audit/verify.py": {"cryptography"},
    }.items():
        tree = ast.parse((ROOT / name).read_text())
        roots = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                roots |= {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add((node.module or "").split(".")[0])
        assert roots - STDLIB <= extra, (name, roots - STDLIB)


WALL = {
    "time.time",
    "time.time_ns",
    "time.localtime",
    "time.gmtime",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
}


def test_stops_runs_and_leases_never_ask_the_wall_clock() -> None:
    """Somebody may set it a day forward or back: every deadline is CLOCK_BOOTTIME or CLOCK_MONOTONIC."""
    allowed = {"runners/identity.py"}  # a certificate's own dates are wall time; a wrong clock only ends the link
    found, looked = set(), 0
    for path, tree in trees():
        relative = str(path.relative_to(ROOT))
        if relative.split("/")[0] not in {"killswitch", "sandbox", "runners", "kms"}:
            continue
        looked += 1
        for node in ast.walk(tree):
            name = ".".join(ast.unparse(node).split(".")[-2:]) if isinstance(node, ast.Attribute) else ""
            bare = isinstance(node, ast.ImportFrom) and node.module == "time"
            if name in WALL or name.endswith("CLOCK_REALTIME") or bare:
                found.add(relative)
    assert looked > 40
    assert found == allowed


def test_every_event_is_documented() -> None:
    from interlock.event import EventType

    page = (ROOT / "docs" / "formats" / "record.md").read_text()
    assert not [e.value for e in EventType if e.value not in page]


def test_every_error_code_is_on_the_page() -> None:
    from interlock import errors

    drawn = errors.__doc__ or ""
    assert not [code for code in errors.CLASSES if f" {code} " not in drawn]


def test_one_casbin_distribution() -> None:
    from importlib.metadata import PackageNotFoundError, version

    assert version("pycasbin")
    with pytest.raises(PackageNotFoundError):
        version("casbin")


def test_locked_with_hashes_and_no_index_named() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    pins = re.findall(r"^[A-Za-z0-9_.-]+==", lock, re.M)
    assert len(pins) > 20
    assert lock.count("--hash=sha256:") > len(pins)
    assert "http" not in re.sub(r"#.*|\bhttp(?:core2?|tools|x2?)\b", "", lock)
