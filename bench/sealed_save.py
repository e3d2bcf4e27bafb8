"""A sealed checkpoint beside a plain one: interlock.save and interlock.load against torch's own DCP on the same state.

Run: make bench NAME=sealed_save. Writes bench/out/sealed_save.json. The state is 256 MiB of tensors, saved and loaded
in pairs, plain and sealed in turn, on tmpfs and on disk. The sealed side goes through a real broker (its own gate that
allows, real store, real spool): it makes the files, proves every chunk again at the commit and hashes every file; a
load is timed once with the file digests unknown to the broker (after it was started anew) and once with them known
(a run that goes on from its own checkpoint). Plain DCP does none of that: FileSystemWriter and FileSystemReader as
they come, one file, fsync. Read the ratios, not the seconds: cores are shared.
"""

import base64
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GUEST = ROOT / ".venv-guest" / "bin" / "python"
PAIRS, TENSORS, SIDE = 5, 16, 2048  # 16 tensors of 2048 x 2048 float32: 256 MiB
TRAINING_PAIRS = 9
TRAININGS = {"training": (128, 2), "training_large": (512, 3)}  # width and layers: the demo's, and 100 MiB of state
RUN, KEY = "run_bench", b"k" * 32


# ---- the guest's side: needs torch -----------------------------------------------------------------

def timed(work: Callable[[], object]) -> dict[str, float]:
    """Return seconds, seconds of CPU here and at the broker, and MiB by which the peak of resident memory rose."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    cpu, start = _cpu(), time.perf_counter()
    work()
    return {"s": time.perf_counter() - start, "cpu_s": _cpu() - cpu, "mib": (_status("VmHWM") - before) / 1024}


def _cpu() -> float:
    """Return the CPU seconds of this process and of the one that holds the broker."""
    ticks = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[11:13]
    return time.process_time() + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise KeyError(name)


def guest(folder: Path) -> None:
    """Save and load in turn; print one JSON line a pair. On stdin a line comes back when the broker is cold again."""
    import warnings

    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

    import interlock

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    state = {f"layer{i}.weight": torch.randn(SIDE, SIDE) for i in range(TENSORS)}
    target = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    plain = folder / "plain"

    def same() -> None:
        for name, tensor in target.items():
            assert torch.equal(tensor, state[name]), name
            tensor.fill_(1)

    def save_plain() -> None:
        dcp.save(dict(state), storage_writer=FileSystemWriter(plain, thread_count=1), no_dist=True)

    def load_plain() -> None:
        dcp.load(dict(target), storage_reader=FileSystemReader(plain), no_dist=True)

    for step in range(PAIRS + 1):
        found: dict[str, float] = {}
        works = [("plain_save", save_plain), ("save", lambda step=step: interlock.save(state, step))]
        loads = [("plain_load", load_plain), ("load", lambda: interlock.load(target)),
                 ("load_known", lambda: interlock.load(target))]
        for name, work in [*(works if step % 2 else works[::-1]), *(loads if step % 2 else [*loads[1:], loads[0]])]:
            if name == "load":
                print(json.dumps({"cold": True}), flush=True)
                sys.stdin.readline()
            found.update({f"{name}_{unit}": value for unit, value in timed(work).items()})
            if "load" in name:
                same()
        shutil.rmtree(plain)
        print(json.dumps(found if step else {"warm": True}), flush=True)
        sys.stdin.readline()


# ---- the node's side -------------------------------------------------------------------------------

class Node:
    """A broker in a thread whose gate allows; everything else of it is as on a node."""

    def __init__(self, folder: Path) -> None:
        from audit.spool import Spool
        from interlock.call import Decision, Effect
        from interlock.event import Event, Written
        from policy.facts import Facts
        from runners.broker import Broker, event_of
        from runners.broker_gate import BrokerGate
        from runners.checkpoints import Checkpoints
        from runners.guest import leash
        from runners.room import Room
        from runners.store import Store
        from runners.vault import Vault

        class Allows:
            """The view of a site whose policy lets this run save and load."""

            def decide(self, *_: object) -> Decision:
                return Decision(Effect.ALLOW, "allowed", "allowed")

            def facts_of(self, *_: object, **__: object) -> Facts:
                return Facts(frozenset({"researcher"}), bundle_age_ms=0)

            def snapshot(self) -> None:
                return None

        self.folder = folder
        self.store = Store(folder / "broker")
        (folder / "spool").mkdir()
        self._spool = Spool(folder / "spool", "bench", "broker")
        record: Callable[[Event], Written] = self._spool.record
        gate = BrokerGate(Allows(), lambda _: None, record, lambda: 0)
        room = Room(self.store, Vault(), gate, leash(lambda _: None, lambda *_: False),
                    lambda kind, guest, facts: record(event_of(kind, guest, facts)))
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._broker = Broker(theirs, KEY, lambda _: None, lambda: 0, lambda *_: False, record, Checkpoints(room))
        self._thread = threading.Thread(target=self._broker.serve)
        self._thread.start()

    def open(self) -> Path:
        """Open the run and hand over its key, as the launcher does; return the guest's socket."""
        from interlock.call import Action
        from interlock.order import Labels
        from interlock.permit import boottime_ms, issue
        from interlock.tier import Tier

        path = self.folder / "guest.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen(16)
            permit = issue(call="c", action=Action.LAUNCH, resource="pool/default", run=RUN, epoch=0, record="r",
                           expires_ms=boottime_ms() + 5000)
            plan = {"checkpoints": True, "weights": [], "model": "", "serve": False, "digest": "sha256:p"}
            labels = Labels("lab", "ada", "ada", RUN, "bench", Tier.NONE)
            self._say({"op": "open", "run": RUN, "attempt": 1, "uid": os.geteuid() or 60_100, "plan": plan,
                       "labels": labels.as_json(), "resource": "pool/default", "permit": permit.seal(KEY), "told": {}},
                      listener.fileno())
        self._broker._guests[RUN, 1][0].uid = os.geteuid()  # a run is never root; whoever measures may be
        self._say({"op": "keys", "run": RUN, "attempt": 1, "files": {},
                   "run_key": base64.b64encode(os.urandom(32)).decode()})
        return path

    def _say(self, request: dict[str, Any], *fds: int) -> None:
        socket.send_fds(self._ours, [json.dumps(request).encode()], list(fds))
        answer = json.loads(self._ours.recv(65_536))
        assert answer["ok"] is True, answer

    def forget_digests(self) -> None:
        """Make the broker as if it had been started anew."""
        self.store._digests.clear()

    def drop_steps(self) -> None:
        """Remove what is committed, so that neither memory nor disk fills up."""
        for step in (self.store.committed / RUN).iterdir():
            shutil.rmtree(step)

    def end(self) -> None:
        """Stop the broker."""
        self._ours.close()
        self._thread.join()
        self._broker.close()
        self._spool.close()


def measure(parent: str) -> dict[str, float]:
    """Return medians of one place; every pair is one plain and one sealed save and load."""
    folder = Path(tempfile.mkdtemp(prefix="ilb", dir=parent))
    node = Node(folder)
    rows: list[dict[str, float]] = []
    try:
        environment = {**os.environ, "INTERLOCK_SOCKET": str(node.open()), "INTERLOCK_RUN": RUN, "OMP_NUM_THREADS": "1",
                       "PYTHONPATH": str(ROOT)}
        with subprocess.Popen([str(GUEST), __file__, "--guest", str(folder)], env=environment, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                found = json.loads(line)
                if "cold" in found:
                    node.forget_digests()
                else:
                    node.drop_steps()
                    if "warm" not in found:
                        rows.append(found)
                process.stdin.write("\n")
                process.stdin.flush()
        if process.returncode or len(rows) != PAIRS:
            raise SystemExit(f"the guest ended with {process.returncode} after {len(rows)} pairs")
    finally:
        node.end()
        shutil.rmtree(folder)
    return summary(rows)


def measure_training(width: int, layers: int) -> dict[str, float]:
    """Return medians of what two ranks of the example's training need to save, plain and sealed, on disk."""
    folder = Path(tempfile.mkdtemp(prefix="ilb", dir="/var/tmp"))
    node = Node(folder)
    try:
        environment = {**os.environ, "INTERLOCK_SOCKET": str(node.open()), "INTERLOCK_RUN": RUN, "OMP_NUM_THREADS": "1",
                       "PYTHONPATH": str(ROOT), "BROKER_PID": str(os.getpid())}
        words = [str(GUEST), "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2",
                 str(ROOT / "bench" / "training_save.py"), str(folder), str(width), str(layers), str(TRAINING_PAIRS)]
        told = subprocess.run(words, env=environment, text=True, stdout=subprocess.PIPE, check=True).stdout
        state = max(sum(f.stat().st_size for f in step.iterdir()) for step in (node.store.committed / RUN).iterdir())
    finally:
        node.end()
        shutil.rmtree(folder)
    rows = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    if len(rows) != TRAINING_PAIRS:
        raise SystemExit(f"the training saved {len(rows)} pairs")
    found = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
    for name, unit in (("ratio", "s"), ("cpu_ratio", "cpu_s")):
        found[name] = round(statistics.median(r[f"sealed_{unit}"] / r[f"plain_{unit}"] for r in rows), 2)
    return {**found, "state_mib": round(state / 2**20, 1)}


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return medians of seconds, medians of the ratio of each pair, and the highest extra memory."""
    def median(name: str) -> float:
        return round(statistics.median(r[name] for r in rows), 3)

    def ratio(name: str, plain: str) -> float:
        return round(statistics.median(r[name] / r[plain] for r in rows), 2)

    return {
        **{name: median(name) for name in ("save_s", "plain_save_s", "load_s", "load_known_s", "plain_load_s")},
        "save_ratio": ratio("save_s", "plain_save_s"), "load_ratio": ratio("load_s", "plain_load_s"),
        "load_known_ratio": ratio("load_known_s", "plain_load_s"),
        **{f"{name}_cpu_ratio": ratio(f"{name}_cpu_s", f"plain_{plain}_cpu_s")
           for name, plain in (("save", "save"), ("load", "load"), ("load_known", "load"))},
        **{f"{name}_extra_mib": round(max(r[f"{name}_mib"] for r in rows), 1)
           for name in ("save", "load", "plain_save", "plain_load")},
        "extra_mib": round(max(max(r["save_mib"], r["load_mib"]) for r in rows), 1),
    }


def main() -> None:
    """Measure both places, print a table, write the file."""
    if not GUEST.exists():
        raise SystemExit("there is no .venv-guest: make setup")
    places = {"tmpfs": "/dev/shm", "disk": "/var/tmp"}
    found = {name: measure(parent) for name, parent in places.items()}
    trained: dict[str, float] = {}
    print(f"{'':18}" + "".join(f"{name:>10}" for name in found))
    for key in next(iter(found.values())):
        print(f"{key:18}" + "".join(f"{row[key]:>10}" for row in found.values()))
    for name, (width, layers) in TRAININGS.items():
        row = measure_training(width, layers)
        print(f"{name:18}", row)
        trained.update({f"{name}_save_{key}": value for key, value in row.items()})
    broker_mib = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    told = {**found["tmpfs"], **{f"disk_{key}": value for key, value in found["disk"].items()},
            **trained,
            "state_mib": TENSORS * SIDE * SIDE * 4 >> 20, "pairs": PAIRS, "broker_peak_mib": broker_mib,
            "load_average": round(os.getloadavg()[0], 2)}
    out = ROOT / "bench" / "out" / "sealed_save.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--guest"]:
        guest(Path(sys.argv[2]))
    else:
        main()
