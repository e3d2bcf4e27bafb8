"""Interlock guest library: what a workload may import. It decides nothing; whoever patches it gains
only his own inconvenience."""

from typing import Any

__all__ = ["Stopped", "asset", "latest", "load", "run_id", "save", "step"]


def __getattr__(name: str) -> Any:
    if name == "Stopped":
        from interlock.errors import Stopped

        return Stopped
    if name in ("step", "run_id"):
        from interlock import leash

        return getattr(leash, name)
    if name in ("save", "load", "latest", "asset"):
        from interlock import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module 'interlock' has no attribute {name!r}")
