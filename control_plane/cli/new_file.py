"""A file that a command makes: it did not exist before, and is whole or not there."""

from pathlib import Path

from interlock import durable
from interlock.errors import Conflict, Unavailable


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Make `path` with `data`; what is there is never replaced.

    Raises Conflict (``conflict.file``) when the name is taken, Unavailable (``unavailable.file``).
    """
    try:
        durable.write_new(path, data, mode)
    except FileExistsError:
        raise Conflict(f"{path} exists already", code="file", next_step="choose another name") from None
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}", code="file") from None
