"""The leash of a training loop: `step()` raises Stopped when the run's lease is gone.

A courtesy, not a control: the run dies by its lease whether or not it calls this. Calling it gives the loop
a moment to end by itself with a clear reason, and the record a step to show.

Outside a run that has a guest socket (a laptop, a unit test, a plan with guest=false) `step()` does
nothing and says so once, by a RuntimeWarning: the same script works in both places, and nobody mistakes
silence for a lease. A socket that is there and does not answer is an Unavailable error, never a shrug.
"""

import os
import warnings

from interlock import wire
from interlock.errors import Halted, Malformed, Stopped

RUN_ENV = "INTERLOCK_RUN"

_state = {"n": -1, "warned": False}


def connected() -> bool:
    """Return whether this process is in a run that has a broker's socket."""
    return os.path.exists(wire.socket_path())


def warn(what: str = "step()") -> None:
    """Say once that this process is in no run, so that nobody takes silence for a lease."""
    if not _state["warned"]:
        _state["warned"] = True
        warnings.warn(
            f"interlock.{what} does nothing here: this process holds no lease (no guest socket at "
            f"{wire.socket_path()}); start it by `interlock run --guest`",
            RuntimeWarning, stacklevel=3,
        )


def run_id() -> str:
    """Return the id of this run, or an empty text outside one."""
    return os.environ.get(RUN_ENV, "")


def step(n: int | None = None, *, deadline_s: float = wire.DEADLINE_S, **metrics: int) -> int:
    """Report one step of the loop; returns its number.

    Args: `n` the step's number (default: one more than the last); `metrics` integers to record beside it
    (scale a loss: ``loss_micro=round(loss * 1e6)``). Raises Stopped when the lease is gone or a stop order
    covers this run, Malformed on a float, Unavailable when the broker does not answer within `deadline_s`.
    """
    number = int(_state["n"]) + 1 if n is None else n
    for name, value in metrics.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise Malformed(f"metric {name!r} is not an integer", code="wire", next_step="scale it to an integer")
    _state["n"] = number
    if not connected():
        warn()
        return number
    try:
        wire.ask("step", deadline_s=deadline_s, n=number, metrics=metrics)
    except Halted as refusal:
        raise Stopped(refusal.message) from None
    return number
