"""What a run printed and the files it left, on the control plane's disk (0700 folder, 0600 files).

Output is appended at an offset: the same piece twice changes nothing, a gap is refused with the offset that is
expected. File names come from a node and are checked again here; a file is kept only when its digest is right.
"""

import os
import re
import threading
from pathlib import Path

from interlock.canon import digest_bytes
from interlock.errors import Conflict, Malformed, NotFound, Unavailable, Untrusted
from interlock.order import Plan

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ +-]{0,99}")
_RUN = re.compile(r"[a-z0-9_]{1,64}")
MAX_FILES = 1000
CHUNK = 256 * 1024


def _stem(run: str, attempt: int) -> str:
    if not _RUN.fullmatch(run):
        raise Malformed("not the id of a run", code="run")
    return f"{run}.{int(attempt)}"


class OutputStore:
    """Two folders. `_lock` makes an append and its check one step."""

    def __init__(self, control: Path) -> None:
        self._logs, self._files = control / "output", control / "files"
        self._lock = threading.Lock()
        for folder in (self._logs, self._files):
            folder.mkdir(mode=0o700, exist_ok=True)

    def append(self, run: str, attempt: int, offset: int, data: bytes, plan: Plan) -> int:
        """Append `data` at `offset`; return the next offset. Raises Conflict (gap), Malformed (over the plan's
        limit) or Unavailable (disk)."""
        path = self._logs / f"{_stem(run, attempt)}.log"
        with self._lock:
            size = path.stat().st_size if path.exists() else 0
            if offset > size:
                raise Conflict("a piece of the output is missing", code="offset", details={"next": size})
            fresh = data[size - offset:]
            if size + len(fresh) > plan.output_mb << 20:
                raise Malformed("the output is larger than the plan allows", code="output_limit")
            if fresh:
                _append(path, fresh)
            return size + len(fresh)

    def read(self, run: str, attempt: int, after: int) -> tuple[bytes, int]:
        """Return (up to 256 KiB from `after` on, the next offset)."""
        path = self._logs / f"{_stem(run, attempt)}.log"
        if not path.exists():
            return b"", 0
        with path.open("rb") as source:
            source.seek(max(0, after))
            data = source.read(CHUNK)
        return data, max(0, after) + len(data)

    def tail(self, run: str, attempt: int, size: int) -> bytes:
        """Return the last `size` bytes of an attempt's output."""
        path = self._logs / f"{_stem(run, attempt)}.log"
        if not path.exists():
            return b""
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - size))
            return source.read(size)

    def keep_file(self, run: str, attempt: int, name: str, data: bytes, digest: str, plan: Plan) -> None:
        """Keep one result file. Raises Malformed (name, limit), Untrusted (digest) or Unavailable (disk)."""
        folder = self._files / _stem(run, attempt)
        if not _NAME.fullmatch(name):
            raise Malformed("not a plain file name", code="name")
        if digest_bytes(data) != digest:
            raise Untrusted("a file does not have the digest that came with it", code="digest")
        with self._lock:
            folder.mkdir(mode=0o700, exist_ok=True)
            held = {p.name: p.stat().st_size for p in folder.iterdir()}
            held[name] = len(data)
            if sum(held.values()) > plan.output_mb << 20 or len(held) > MAX_FILES:
                raise Malformed("the files are larger than the plan allows", code="output_limit")
            fresh = folder / f".{name}"
            fresh.unlink(missing_ok=True)
            _append(fresh, data)
            fresh.replace(folder / name)

    def files(self, run: str, attempt: int) -> list[dict[str, object]]:
        """Return ``[{name, size, digest}]``."""
        folder = self._files / _stem(run, attempt)
        found = sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.exists() else []
        return [{"name": p.name, "size": p.stat().st_size, "digest": digest_bytes(p.read_bytes())} for p in found]

    def file(self, run: str, attempt: int, name: str) -> bytes:
        """Return one result file; raises NotFound."""
        path = self._files / _stem(run, attempt) / name
        if not _NAME.fullmatch(name) or not path.is_file():
            raise NotFound("no such file", code="file")
        return path.read_bytes()


def _append(path: Path, data: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(data)
    except OSError as error:
        raise Unavailable(f"the output cannot be kept: {error.strerror}", code="disk",
                          next_step="free space in STATE/control") from None
