"""The gateway's process: `python -I -m runners gateway`, started by the launcher through runners/gateway_line.py."""

from interlock.errors import Unavailable


def serve(state: str | None, runtime: str | None, node: str, control_fd: int, key_fd: int, port: int) -> None:
    """Serve until the launcher goes. Raises Untrusted (root, no key), NotRecorded (no spool), Unavailable."""
    raise Unavailable("this gateway does not serve yet", code="gateway")
