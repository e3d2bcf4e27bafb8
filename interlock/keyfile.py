"""Private keys on disk: raw Ed25519 in a 0600 file, refused when anybody else can read it."""

import os
import stat
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.durable import write_new
from interlock.errors import Conflict, Malformed, Unavailable, Untrusted
from interlock.signed import private_bytes


def write_private(path: Path, data: bytes) -> None:
    """Make `path` with mode 0600, durably; a name that is taken is a Conflict. Raises OSError."""
    try:
        write_new(path, data)
    except FileExistsError:
        raise Conflict(f"{path} exists already", code="key_exists") from None


def read_private(path: Path, *, limit: int = 65536) -> bytes:
    """Return the bytes of a private file.

    Raises Untrusted when group or others can read or write it or it is no regular file of ours,
    Unavailable when it cannot be opened.
    """
    try:
        # without O_NONBLOCK a pipe in place of the file would hold us for ever
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unavailable(
            f"cannot read the key file {path}: {error.strerror}", code="key_file",
            next_step="check that it exists and that you own it",
        ) from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()):
        os.close(fd)
        raise Untrusted(f"{path} is not a regular file of yours", code="key_file",
                        next_step=f"look at it: ls -l {path}")
    with os.fdopen(fd, "rb") as source:
        if info.st_mode & 0o077:
            raise Untrusted(
                f"others can read {path}", code="key_file_mode", next_step=f"chmod 600 {path}"
            )
        return source.read(limit)


def write_ed25519(path: Path, key: Ed25519PrivateKey) -> None:
    """Store an Ed25519 private key; raises Conflict when the file exists."""
    write_private(path, private_bytes(key))


def read_ed25519(path: Path) -> Ed25519PrivateKey:
    """Load an Ed25519 private key; raises Untrusted, Unavailable or Malformed."""
    raw = read_private(path)
    if len(raw) != 32:
        raise Malformed(f"{path} is not a raw Ed25519 key of 32 bytes", code="key_file",
                        next_step="restore it from the backup of the keys")
    return Ed25519PrivateKey.from_private_bytes(raw)
