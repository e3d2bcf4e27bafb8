"""Interlock guest library: what a workload may import. It decides nothing; whoever patches it gains
only his own inconvenience."""

from typing import Any

__all__ = ["Stopped", "run_id", "step"]


def __getattr__(name: str) -> Any:
    if name == "Stopped":
        from interlock.errors import Stopped

        return Stopped
    if name in ("step", "run_id"):
        from interlock import leash

        return getattr(leash, name)
    raise AttributeError(f"module 'interlock' has no attribute {name!r}")
