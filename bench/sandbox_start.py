"""How long a start takes, against a bare fork and exec of the same command.

    .venv/bin/python bench/sandbox_start.py [ROUNDS]      (as root)

Writes bench/out/sandbox_start.json: medians in milliseconds and the ratios. Compare ratios, not
milliseconds: they depend on the host and on what else it does (the load is in the file).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from interlock.order import Plan
from interlock.tier import Tier
from sandbox import cgroup, layers, uids
from sandbox.profile import Profile, for_plan
from sandbox.trial import trial

OUT = Path(__file__).resolve().parent / "out"


def median_ms(rounds: int, act: Callable[[], object]) -> float:
    """Return the median of `rounds` calls in milliseconds, after one that does not count."""
    act()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        act()
        times.append((time.perf_counter() - begin) * 1000)
    return round(statistics.median(times), 2)


def measure(rounds: int, profile: Profile, tree: cgroup.Tree, runtime: Path) -> dict[str, object]:
    """Return all medians and ratios."""
    blocked: list[float] = []

    def sandboxed(*argv: str) -> None:
        begin = time.perf_counter()
        with trial(profile, argv, tree, runtime) as one:
            blocked.append((time.perf_counter() - begin) * 1000)
            one.go()
            one.started.report.outcome(10)

    bare = median_ms(rounds, lambda: subprocess.run(["/usr/bin/true"], check=True))
    python = median_ms(rounds, lambda: subprocess.run([profile.python, "-I", "-S", "-c", "0"], check=True))
    whole = median_ms(rounds, lambda: sandboxed("/usr/bin/true"))
    until_go = round(statistics.median(blocked), 2)
    inside = median_ms(rounds, lambda: sandboxed(profile.python, "-I", "-S", "-c", "0"))
    return {
        "rounds": rounds, "load": list(os.getloadavg()), "cores": os.cpu_count(), "bare_true_ms": bare,
        "bare_python_ms": python, "until_go_ms": until_go, "sandboxed_true_ms": whole,
        "sandboxed_python_ms": inside, "ratio_true": round(whole / bare, 2), "ratio_python": round(inside / python, 2),
        "note": "sandboxed times include control group, disk, self-check, kill and the proof by rmdir",
    }


def main() -> None:
    """Measure and write the file."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    tree = cgroup.own_tree(f"interlock-bench-{os.getpid()}")
    profile = for_plan(Plan(("true",), Tier.CRITICAL, "bench"), uids.Pool().take(), layers.this_host())
    try:
        with tempfile.TemporaryDirectory(prefix="ilk-") as folder:
            found = measure(rounds, profile, tree, Path(folder))
    finally:
        tree.remove()
    OUT.mkdir(exist_ok=True)
    (OUT / "sandbox_start.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
