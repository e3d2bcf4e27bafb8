"""The archive of a bundle: a deterministic ustar file, read once and in memory.

The same files give the same bytes (sorted names, mode 0644, no times, no owners), and reading ends with the
check that packing again gives exactly what was read: nothing rides along in padding, headers or a tail.
"""

import io
import re
import tarfile
from collections.abc import Mapping

from interlock.errors import Malformed, Untrusted

MAX_ARCHIVE, MAX_MEMBERS = 4 << 20, 64
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*(/[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*)*")


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return the archive of `files` (path → bytes); raises Malformed on an odd path."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            check_name(name)
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(files[name]), 0o644
            tar.addfile(member, io.BytesIO(files[name]))
    return out.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Return path → bytes; nothing is written to a disk.

    Raises Malformed (too large, no archive, not canonical) or Untrusted (``untrusted.member``: a link, a
    device, an absolute path, ``..``, a name that occurs twice).
    """
    if len(data) > MAX_ARCHIVE:
        raise Malformed(f"a bundle is at most {MAX_ARCHIVE} bytes", code="archive")
    try:
        files = _members(data)
    except (tarfile.TarError, EOFError, ValueError, OSError, OverflowError):
        raise Malformed("the bundle is no archive", code="archive") from None
    if pack(files) != data:
        raise Malformed("the archive is not in its canonical form", code="archive",
                        next_step="make it with interlock policy sign")
    return files


def _members(data: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            check_name(member.name)
            if not member.isreg():
                raise Untrusted(f"{member.name} is a link or no regular file", code="member")
            if member.name in files:
                raise Untrusted(f"{member.name} occurs twice", code="member")
            source = tar.extractfile(member)
            if source is None or len(files) >= MAX_MEMBERS:
                raise Malformed(f"more than {MAX_MEMBERS} members", code="archive")
            files[member.name] = source.read()
    return files


def check_name(name: str) -> None:
    """Refuse a path that is absolute, climbs, hides or holds anything but lower-case letters, digits and _.-/."""
    if len(name) > 100 or not _NAME.fullmatch(name):
        raise Untrusted(f"{name[:100]!r} is no plain relative path", code="member",
                        next_step="bundle paths are lower-case, relative and free of ..")
