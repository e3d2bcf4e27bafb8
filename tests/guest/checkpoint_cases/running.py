"""Runs the functions `case_…` of one file and prints one JSON object a line: {"case", "error"}. Needs torch.

`python running.py FILE`: the stand-in broker is told by INTERLOCK_SOCKET. Each case starts with an empty store of
steps of its own: it takes its steps from `step()`.
"""

import importlib.util
import itertools
import json
import os
import sys
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


def main() -> None:
    """Run each case of the file named on the command line."""
    spec = importlib.util.spec_from_file_location("cases", sys.argv[1])
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
    main()
