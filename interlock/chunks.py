"""The chunks of a sealed file: header, contexts, nonces, tags. Format: docs/formats/sealed.md.

Nonces are made here and nowhere else: no caller can name one. A chunk whose tag failed leaves zeros behind.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from interlock.canon import canonical
from interlock.errors import Malformed, Untrusted

CHUNKS: Final = (65_536, 1 << 20, 4 << 20)
TAG: Final = 16
VERSION: Final = 1
KEY_BYTES: Final = 32
MAX_WRAPPED: Final = 512
MAX_NAME: Final = 512
MAX_DIMENSIONS: Final = 16

_MAGIC, END = b"ILSEALED", b"ILSEALIX"
FIXED = struct.Struct(">8sHI7s32sH")
FOOTER = struct.Struct(">QQ8s")
_LAST_COUNTER = 2**32 - 1
_MAX_INT = 2**53 - 1


def not_sealed(why: str, code: str = "sealed") -> Malformed:
    """Return the refusal of a file that does not have the form."""
    return Malformed(f"this is not a sealed file: {why}", code=code, next_step="read a file that interlock.save wrote")


def _broken() -> Untrusted:
    return Untrusted(
        "a chunk is not what was sealed, or this is not its key, run and step", code="sealed",
        next_step="load an older checkpoint and report the file",
    )


@dataclass(frozen=True)
class Header:
    """The head of a file: chunk size in bytes, nonce prefix, salt, wrapped file key."""

    chunk: int
    prefix: bytes
    salt: bytes
    wrapped: bytes

    def raw(self) -> bytes:
        """Return the bytes as they stand in the file."""
        fixed = FIXED.pack(_MAGIC, VERSION, self.chunk, self.prefix, self.salt, len(self.wrapped))
        return fixed + self.wrapped


def chunk_count(size: int, chunk: int) -> int:
    """Return how many chunks hold `size` bytes (one for none); raises Malformed past the 32-bit counter."""
    count = max(1, -(-size // chunk))
    if size < 0 or count > _LAST_COUNTER + 1:
        raise Malformed("an item has more chunks than the counter can number", code="sealed")
    return count


def read_exactly(fd: int, size: int, offset: int) -> bytes:
    """Return `size` bytes from `offset`; raises Malformed when the file ends before, OSError."""
    parts = []
    while size:
        part = os.pread(fd, size, offset)
        if not part:
            raise not_sealed("it is too short")
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def read_header(fd: int) -> Header:
    """Return the header; nothing in it is trusted before the index has been authenticated with it."""
    magic, version, chunk, prefix, salt, length = FIXED.unpack(read_exactly(fd, FIXED.size, 0))
    if magic != _MAGIC:
        raise not_sealed("it does not begin like one")
    if version != VERSION:
        raise not_sealed(f"its version {version} is unknown here", "sealed_version")
    if chunk not in CHUNKS or not 1 <= length <= MAX_WRAPPED:
        raise not_sealed("its header names sizes that no writer uses")
    return Header(chunk, prefix, salt, read_exactly(fd, length, FIXED.size))


def check_names(name: object, offset: object) -> None:
    """Refuse what cannot be an item's name and offset: the context must have one canonical form."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise Malformed(f"an item's name is text of 1 to {MAX_NAME} characters", code="item")
    if not isinstance(offset, tuple) or len(offset) > MAX_DIMENSIONS:
        raise Malformed(f"an item's offset is a tuple of at most {MAX_DIMENSIONS} numbers", code="item")
    if any(type(n) is not int or not 0 <= n <= _MAX_INT for n in offset):
        raise Malformed("an item's offset holds something other than whole numbers from 0", code="item")


def check_owner(key: bytes, run: str, step: int) -> None:
    """Refuse a key of another length, an empty run, a step below 0; raises Malformed."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise Malformed("a key is 32 bytes", code="key")
    if not isinstance(run, str) or not run or type(step) is not int or not 0 <= step <= _MAX_INT:
        raise Malformed("a sealed file belongs to a run and to a step from 0", code="sealed")


def item_context(run: str, step: int, name: str, offset: tuple[int, ...]) -> bytes:
    """Return what an item's key is derived from and what its chunks are bound to."""
    return canonical({"what": "item", "run": run, "step": step, "name": name, "offset": list(offset)})


def index_context(run: str, step: int) -> bytes:
    """Return the same for the index; no item can have this context."""
    return canonical({"what": "index", "run": run, "step": step})


class Chunks:
    """The chunks of one item: its key, its nonces, its AAD."""

    def __init__(self, key: bytes, header: Header, context: bytes, size: int, footer: bytes = b"") -> None:
        self.count = chunk_count(size, header.chunk)
        self._size, self._chunk, self._prefix = size, header.chunk, header.prefix
        self._aad = header.raw() + context + footer
        self._cipher = AESGCM(HKDF(SHA256(), KEY_BYTES, header.salt, context).derive(key))

    def _nonce(self, number: int) -> bytes:
        last = number == self.count - 1
        return self._prefix + number.to_bytes(4, "big") + (b"\x01" if last else b"\x00")

    def begin(self, number: int) -> int:
        """Return where chunk `number` begins in the clear."""
        return number * self._chunk

    def length(self, number: int) -> int:
        """Return the bytes of chunk `number` in the clear."""
        return min(self._chunk, self._size - number * self._chunk)

    def seal(self, number: int, plain: memoryview, out: memoryview) -> None:
        """Encrypt chunk `number` into `out`, which is 16 bytes longer."""
        self._cipher.encrypt_into(self._nonce(number), plain, self._aad, out)

    def open(self, number: int, sealed: memoryview, out: memoryview) -> None:
        """Decrypt chunk `number` into `out`; raises Untrusted and leaves `out` zeroed."""
        try:
            self._cipher.decrypt_into(self._nonce(number), sealed, self._aad, out)
        except InvalidTag:
            zero(out)
            raise _broken() from None


def zero(view: memoryview) -> None:
    """Overwrite `view` without an allocation of its size."""
    blank = bytes(min(len(view), CHUNKS[0]))
    for begin in range(0, len(view), CHUNKS[0]):
        view[begin : begin + CHUNKS[0]] = blank[: len(view) - begin]


@contextmanager
def bytes_of(data: Any, *, writable: bool = False) -> Iterator[memoryview]:
    """Give the bytes of any contiguous buffer, without a copy; raises Malformed."""
    try:
        view = memoryview(data)
    except TypeError:
        raise Malformed("an item's data has no bytes in memory", code="item") from None
    with view:
        if not view.c_contiguous or (writable and view.readonly):
            raise Malformed("a buffer is contiguous, and writable where it is a target", code="item")
        if view.nbytes == 0:  # a shape with a zero in it cannot be cast
            yield memoryview(bytearray())
            return
        with view.cast("B") as flat:
            yield flat
