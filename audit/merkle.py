"""RFC 6962 Merkle tree: hashes, proofs and their verification. Pure; reads nodes through a callable.

Rules
  1. leaf = SHA-256(0x00 | bytes), inner node = SHA-256(0x01 | left | right); every hash has 32 bytes.
  2. The two sizes fix the number of proof elements: too many or too few is refused, never ignored.
  3. An index at or above the size, a size of 0 and a shrinking tree are refused before any work.
  4. Equal sizes need equal roots and an empty proof.
Nothing here loops over a range of leaves; sizes go up to 2**64 - 1. Source: RFC 6962 section 2.1.
"""

import hashlib
from collections.abc import Callable, Sequence

from interlock.errors import Malformed, Untrusted

EMPTY_ROOT = hashlib.sha256(b"").digest()
MAX_SIZE = 2**64 - 1
# (level, position) -> hash of the complete subtree over leaves [position << level, (position + 1) << level).
Nodes = Callable[[int, int], bytes]


def leaf_hash(body: bytes) -> bytes:
    """Return the leaf hash of the stored bytes of one record."""
    return hashlib.sha256(b"\x00" + body).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root(hashes: Sequence[bytes]) -> bytes:
    """Return the root over all leaf hashes in O(n): for verifiers and tests."""
    peaks: list[tuple[int, bytes]] = []
    for item in hashes:
        level, found = 0, item
        while peaks and peaks[-1][0] == level:
            found = node_hash(peaks.pop()[1], found)
            level += 1
        peaks.append((level, found))
    return fold([p for _, p in peaks])


def fold(peaks: Sequence[bytes]) -> bytes:
    """Return the root over complete subtrees given from left (largest) to right."""
    if not peaks:
        return EMPTY_ROOT
    found = peaks[-1]
    for left in reversed(peaks[:-1]):
        found = node_hash(left, found)
    return found


def grow(size: int, hashes: Sequence[bytes], nodes: Nodes) -> dict[tuple[int, int], bytes]:
    """Return the complete subtrees (levels above 0) that appending `hashes` to a tree of `size` finishes.

    `nodes` gives the left siblings that are stored already: the peaks of the old tree, what span(0, size) reads.
    """
    made: dict[tuple[int, int], bytes] = {}
    level, start, row = 0, size, list(hashes)
    while row:
        if start & 1:
            start -= 1
            row.insert(0, nodes(level, start))
        above = [node_hash(row[i], row[i + 1]) for i in range(0, len(row) - 1, 2)]
        start, level = start >> 1, level + 1
        made.update(((level, start + i), item) for i, item in enumerate(above))
        row = above
    return made


def span(low: int, high: int, nodes: Nodes) -> bytes:
    """Return the hash of leaves [low, high), where low is where a subtree of that width may begin."""
    peaks = []
    while low < high:
        level = (high - low).bit_length() - 1
        peaks.append(nodes(level, low >> level))
        low += 1 << level
    return fold(peaks)


def _split(size: int) -> int:
    return 1 << ((size - 1).bit_length() - 1)


def _size(size: int) -> None:
    if not 0 <= size <= MAX_SIZE:
        raise Malformed("a tree size is outside 64 bits", code="proof")


def inclusion(index: int, size: int, nodes: Nodes) -> list[bytes]:
    """Return the inclusion proof of leaf `index` in the tree of `size`; raises Malformed."""
    _size(size)
    if not 0 <= index < size:
        raise Malformed("the index is not in a tree of that size", code="proof")
    path, low, high = [], 0, size
    while high - low > 1:
        middle = low + _split(high - low)
        if index < middle:
            path.append(span(middle, high, nodes))
            high = middle
        else:
            path.append(span(low, middle, nodes))
            low = middle
    return path[::-1]


def consistency(old: int, new: int, nodes: Nodes) -> list[bytes]:
    """Return the proof that the tree of `old` leaves is a prefix of that of `new`; raises Malformed.

    `old` is at least 1: an empty tree proves nothing (RFC 6962 2.1.2 starts at 1).
    """
    _size(new)
    if not 0 < old <= new:
        raise Malformed("consistency runs from a size of at least 1 up to a size that is not smaller", code="proof")
    path, low, high, whole = [], 0, new, True
    while old != high:
        middle = low + _split(high - low)
        if old <= middle:
            path.append(span(middle, high, nodes))
            high = middle
        else:
            path.append(span(low, middle, nodes))
            low, whole = middle, False
    if not whole:
        path.append(span(low, high, nodes))
    return path[::-1]


def _refuse(why: str) -> Untrusted:
    return Untrusted(f"the proof does not hold: {why}", code="proof")


def _check_hashes(*hashes: bytes) -> None:
    if any(len(h) != 32 for h in hashes):
        raise _refuse("a hash is not 32 bytes")


def _inner(seed: bytes, path: Sequence[bytes], index: int) -> bytes:
    for i, item in enumerate(path):
        seed = node_hash(item, seed) if index >> i & 1 else node_hash(seed, item)
    return seed


def _inner_right(seed: bytes, path: Sequence[bytes], index: int) -> bytes:
    for i, item in enumerate(path):
        if index >> i & 1:
            seed = node_hash(item, seed)
    return seed


def _border(seed: bytes, path: Sequence[bytes]) -> bytes:
    for item in path:
        seed = node_hash(item, seed)
    return seed


def verify_inclusion(index: int, size: int, leaf: bytes, proof: Sequence[bytes], expected: bytes) -> None:
    """Return when leaf hash `leaf` is at `index` of the tree of `size` with root `expected`.

    Raises Untrusted (``untrusted.proof``).
    """
    if not 0 <= index < size <= MAX_SIZE:
        raise _refuse("the index is not in a tree of that size")
    _check_hashes(leaf, expected, *proof)
    inner = (index ^ (size - 1)).bit_length()
    if len(proof) != inner + (index >> inner).bit_count():
        raise _refuse("its length does not fit the two numbers")
    if _border(_inner(leaf, proof[:inner], index), proof[inner:]) != expected:
        raise _refuse("it ends in another root")


def verify_consistency(old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Return when the tree (`old`, `old_root`) is a prefix of the tree (`new`, `new_root`).

    Raises Untrusted (``untrusted.proof``), also from size 0, which proves nothing.
    """
    if not 0 < old <= new <= MAX_SIZE:
        raise _refuse("the sizes do not grow from at least 1")
    _check_hashes(old_root, new_root, *proof)
    if old == new:
        if proof or old_root != new_root:
            raise _refuse("equal sizes need equal roots and no element")
        return
    shift = (old & -old).bit_length() - 1
    inner = ((old - 1) ^ (new - 1)).bit_length()
    border = ((old - 1) >> inner).bit_count()
    inner -= shift
    start = 0 if old == 1 << shift else 1
    if len(proof) != start + inner + border:
        raise _refuse("its length does not fit the two sizes")
    seed, path = (proof[0] if start else old_root), proof[start:]
    mask = (old - 1) >> shift
    if _border(_inner_right(seed, path[:inner], mask), path[inner:]) != old_root:
        raise _refuse("it ends in another old root")
    if _border(_inner(seed, path[:inner], mask), path[inner:]) != new_root:
        raise _refuse("it ends in another new root")
