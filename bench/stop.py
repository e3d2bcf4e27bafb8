"""How long a stop takes from the order to the signed proof, against cgroup.kill alone on the same kind of group.

    make bench NAME=stop      (as root; ROUNDS as an argument: default 10)

Both kill a live fork bomb: own uid, signals ignored, every process its own session, at its pid limit. Writes
bench/out/stop.json: `order_to_confirmed_ms` and `cgroup_kill_ms` (median, max), `ratio` of the medians.
Compare ratios; the promise (5 s) is asserted in tests, not here.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from interlock.permit import boottime_ms  # noqa: E402 - the tree of this file comes first
from sandbox.cgroup import Limits, own_tree  # noqa: E402
from tests.killswitch.host import HOSTILE, Host, wait_for  # noqa: E402
from tests.killswitch.site import Site  # noqa: E402

OUT = ROOT / "bench" / "out"
PIDS = 64  # of tests/killswitch/site.py, for both


def order_to_confirmed(rounds: int) -> list[float]:
    """Return milliseconds from the local stop order to its CONFIRMED receipt, one a round."""
    host, times = Host(Site()), []
    try:
        host.watch()
        for number in range(rounds):
            run = f"run_{number}"
            started = host.live(run, HOSTILE, uid=60_950)
            wait_for(lambda started=started: len(started.alive()) >= 20, 10)
            begin = boottime_ms()
            order = host.ask("stop", scope=f"run:{run}", reason="bench")["id"]
            wait_for(lambda order=order: host.ask("receipts", order=order)["result"] == "confirmed", 10)
            times.append(float(boottime_ms() - begin))
    finally:
        host.clean()
    return times


def cgroup_kill(rounds: int) -> list[float]:
    """Return milliseconds from cgroup.kill to an empty group, one a round."""
    tree, times = own_tree(f"interlock-bench-{os.getpid()}"), []
    try:
        for number in range(rounds):
            group = tree.create(f"bench_{number}.1", Limits(PIDS, 512, None))
            _bomb(group.procs_files())
            wait_for(lambda group=group: len(group.pids()) >= 20, 10)
            begin = time.monotonic()
            group.kill()
            while group.populated():
                time.sleep(0.001)
            times.append((time.monotonic() - begin) * 1000)
            wait_for(lambda group=group: _removed(group), 10)
    finally:
        tree.remove()
    return times


def _bomb(procs_files: list[str]) -> None:
    child = os.fork()
    if child == 0:
        try:
            for path in procs_files:
                Path(path).write_text(str(os.getpid()))
            os.setgroups([])
            os.setresgid(60_951, 60_951, 60_951)
            os.setresuid(60_951, 60_951, 60_951)
            exec(HOSTILE, {"__name__": "__main__"})
        finally:
            os._exit(0)
    _CHILDREN.append(child)


_CHILDREN: list[int] = []


def _removed(group: object) -> bool:
    while _CHILDREN:
        os.waitpid(_CHILDREN.pop(), 0)
    try:
        group.remove()  # type: ignore[attr-defined]
    except OSError:
        return False
    return True


def main() -> None:
    """Measure both in one run and write the file."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    if os.geteuid() != 0:
        sys.exit("this needs root: control groups and an own uid a run")
    peer, ours = cgroup_kill(rounds), order_to_confirmed(rounds)
    found = {
        "rounds": rounds, "load": os.getloadavg()[0], "pids": PIDS,
        "order_to_confirmed_ms": {"median": statistics.median(ours), "max": max(ours)},
        "cgroup_kill_ms": {"median": round(statistics.median(peer), 1), "max": round(max(peer), 1)},
        "ratio": round(statistics.median(ours) / max(0.1, statistics.median(peer)), 2),
    }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "stop.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"{'what':<24}{'median ms':>12}{'max ms':>10}")
    for name in ("order_to_confirmed_ms", "cgroup_kill_ms"):
        print(f"{name:<24}{found[name]['median']:>12}{found[name]['max']:>10}")  # type: ignore[index]
    print(f"ratio {found['ratio']}")


if __name__ == "__main__":
    main()
