"""Runs the functions `case_…` of one file and prints one JSON object a line: {"case", "error"}. Needs torch.

`python running.py FILE`: the stand-in broker is told by INTERLOCK_SOCKET. Each case starts with an empty store of
steps of its own: it takes its steps from `step()`.

`python running.py` without a file reads lines {"file", "cwd", "environment"}, runs each in a child of its own and
prints the child's status: torch is imported once for all of them. The child writes to out.txt and err.txt in `cwd`.
"""

import importlib.util
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # cases fork

from interlock import wire  # noqa: E402

_steps = itertools.count(1)


def step() -> int:
    """Return a step that no case has used."""
    return next(_steps)


def orders(**told: Any) -> dict[str, Any]:
    """Arrange something at the stand-in broker; returns what it has: steps, staged saves, operations asked."""
    return wire.ask("orders", **told)


def same(one: Any, two: Any) -> bool:
    """Return whether two tensors are bit-equal and of one kind."""
    from interlock.tensors import memory, on_host

    if (one.dtype, one.size()) != (two.dtype, two.size()):
        return False
    a, b = on_host(one), on_host(two)
    return bytes(memory(a)) == bytes(memory(b))


def refusal_of(call: Callable[[], object]) -> str:
    """Return the code of the refusal that `call` raises, or an empty text."""
    from interlock.errors import Refusal, Stopped

    try:
        call()
    except (Refusal, Stopped) as refusal:
        return refusal.code
    return ""


def fork(work: Callable[[], object], **environment: str) -> int:
    """Run `work` in a child; returns its pid. Its status is 0 when `work` returned."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(environment)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ranks(count: int, work: Callable[[], object], folder: Path) -> list[int]:
    """Run `work` on `count` ranks that know each other over gloo; returns their statuses."""
    import torch.distributed as dist

    meeting = folder / f"meet{os.urandom(4).hex()}"

    def one() -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=count)
        try:
            work()
        finally:
            dist.destroy_process_group()

    pids = [fork(one, RANK=str(n), WORLD_SIZE=str(count), GLOO_SOCKET_IFNAME="lo") for n in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def serve() -> None:
    """Run the files that standard input names, one after the other."""
    import torch.distributed.checkpoint  # noqa: F401 - for the children

    for line in sys.stdin:
        told = json.loads(line)

        def work(told: dict[str, Any] = told) -> None:
            os.chdir(told["cwd"])
            tempfile.tempdir = None  # found anew, by the child's own TMPDIR
            for number, name in ((1, "out.txt"), (2, "err.txt")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
            main(told["file"])

        child = fork(work, **told["environment"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main(file: str) -> None:
    """Run each case of `file`."""
    spec = importlib.util.spec_from_file_location("cases", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, case in list(vars(module).items()):
        if not name.startswith("case_"):
            continue
        error = ""
        try:
            case()
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps({"case": name, "error": error}), flush=True)


if __name__ == "__main__":
    sys.modules["running"] = sys.modules["__main__"]
    main(sys.argv[1]) if sys.argv[1:] else serve()
