"""Make the vectors of docs/formats/sealed.md from fixed test keys and a fixed source of "random" bytes.

Run: .venv/bin/python -m tests.vectors.make_sealed. tests/test_sealed.py and tests/test_manifest.py make them again
and compare. Each bad vector has exactly one fault.
"""

import base64
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from interlock import manifest, sealed
from interlock.canon import canonical
from interlock.chunks import FIXED, FOOTER, Chunks
from interlock.manifest import FileRow, Manifest

HERE = Path(__file__).parent / "sealed"
RUN, STEP, NAME = "run_1", 300, "r0-0.sealed"
RUN_KEY, KEY, OTHER_KEY = (hashlib.sha256(f"interlock test {n} key".encode()).digest() for n in ("run", "file", "x"))
ITEMS: list[tuple[str, tuple[int, ...], bytes]] = [
    ("layer.weight", (0, 0), b"first half"), ("layer.weight", (8, 0), b"other half"), ("empty", (), b""),
]


@contextmanager
def fixed_random() -> Iterator[None]:
    """Replace the random bytes by a fixed sequence: for vectors only, the library has no way to ask for it."""
    count = itertools.count()
    with patch("os.urandom", lambda n: hashlib.shake_256(b"interlock test %d" % next(count)).digest(n)):
        yield


def wrapped(name: str = NAME) -> bytes:
    """Return the fixed file key, wrapped under the fixed run key."""
    with fixed_random():
        return sealed.wrap_file_key(RUN_KEY, KEY, RUN, STEP, name)


def file_bytes(
    items: list[tuple[str, tuple[int, ...], bytes]] = ITEMS, *, edit: Callable[[sealed.Writer], None] | None = None,
) -> bytes:
    """Return a sealed file; `edit` spoils the writer before its index is sealed, as no honest program does."""
    fd = os.memfd_create("vector")
    try:
        with fixed_random():
            writer = sealed.Writer(fd, KEY, wrapped(), RUN, STEP, 65_536)
        for item in items:
            writer.add(*item)
        if edit is not None:
            edit(writer)
        writer.finish()
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


def _flip(data: bytes, at: int) -> bytes:
    raw = bytearray(data)
    raw[at] ^= 1
    return bytes(raw)


def _swap(data: bytes) -> bytes:
    """Exchange the two items of equal size."""
    head, size = FIXED.size + len(wrapped()), len(ITEMS[0][2]) + sealed.TAG
    one, two = data[head : head + size], data[head + size : head + 2 * size]
    return data[:head] + two + one + data[head + 2 * size :]


def _row(n: int, **changed: object) -> Callable[[sealed.Writer], None]:
    def edit(writer: sealed.Writer) -> None:
        writer._rows[n].update(changed)
    return edit


def _repeat(writer: sealed.Writer) -> None:
    writer._rows[1]["offset"] = [0, 0]


def _unflagged() -> bytes:
    with patch.object(Chunks, "_nonce", lambda self, n: self._prefix + n.to_bytes(4, "big") + b"\0"):
        return file_bytes()


def file_vectors() -> list[dict[str, Any]]:
    """Return a good sealed file, then files with one fault."""
    good = file_bytes()
    head, end = FIXED.size + len(wrapped()), len(good) - FOOTER.size
    start, size, magic = FOOTER.unpack(good[end:])

    def case(name: str, expect: str, data: bytes, **told: Any) -> dict[str, Any]:
        return {"name": name, "expect": expect, "key": KEY.hex(), "run": RUN, "step": STEP, "file": data.hex(), **told}

    bad, broken = "malformed.sealed", "untrusted.sealed"
    return [
        case("good", "ok", good, wrapped=wrapped().hex(),
             items=[{"name": n, "offset": list(o), "data": d.hex()} for n, o, d in ITEMS]),
        case("empty file", bad, b""),
        case("plain text", bad, b"loss 0.31\n" * 40),
        case("a pickle", bad, b"\x80\x04\x95" + bytes(400)),
        case("only a header", bad, good[:head]),
        case("unknown version", "malformed.sealed_version", good[:8] + b"\0\2" + good[10:]),
        case("a chunk size that no writer uses", bad, good[:10] + (12_345).to_bytes(4, "big") + good[14:]),
        case("one byte short", bad, good[:-1]),
        case("one byte longer", bad, good + b"\0"),
        case("an item cut out", bad, good[:head] + good[head + 26 :]),
        case("the index is said to be larger than the file", bad, good[:end] + FOOTER.pack(start, 2**63, magic)),
        case("the index is said to begin past the file", bad, good[:end] + FOOTER.pack(2**63, size, magic)),
        case("nonce prefix changed", broken, _flip(good, 14)),
        case("salt changed", broken, _flip(good, 21)),
        case("the wrapped key of another file", broken, good[: FIXED.size] + wrapped("b.sealed") + good[head:]),
        case("a bit of an item flipped", broken, _flip(good, head)),
        case("a bit of a tag flipped", broken, _flip(good, head + 10)),
        case("a bit of the index flipped", broken, _flip(good, start)),
        case("two items exchanged", broken, _swap(good)),
        case("the last chunk without its flag", broken, _unflagged()),
        case("another key", broken, good, key=OTHER_KEY.hex()),
        case("another run", broken, good, run="run_2"),
        case("another step", broken, good, step=301),
        case("an item larger than the file", bad, file_bytes(edit=_row(0, size=2**40))),
        case("an item with more chunks than numbers", bad, file_bytes(edit=_row(0, size=2**53 - 1))),
        case("an item that begins inside another", bad, file_bytes(edit=_row(1, start=head + 1))),
        case("an item listed twice", bad, file_bytes(edit=_repeat)),
        case("an index row with one more field", bad, file_bytes(edit=_row(0, dtype="f32"))),
        case("bytes that no item covers", bad, file_bytes(edit=lambda w: w._rows.pop())),
    ]


def key_vectors() -> list[dict[str, Any]]:
    """Return a wrapped file key, then ones that do not open."""
    good = {"run_key": RUN_KEY.hex(), "run": RUN, "step": STEP, "file": NAME, "wrapped": wrapped().hex()}
    bad = "untrusted.file_key"
    return [
        {"name": "good", "expect": "ok", **good, "file_key": KEY.hex()},
        {"name": "another run key", "expect": bad, **good, "run_key": OTHER_KEY.hex()},
        {"name": "another run", "expect": bad, **good, "run": "run_2"},
        {"name": "another step", "expect": bad, **good, "step": 301},
        {"name": "another file", "expect": bad, **good, "file": "r1-0.sealed"},
        {"name": "one bit", "expect": bad, **good, "wrapped": _flip(wrapped(), 20).hex()},
        {"name": "cut", "expect": bad, **good, "wrapped": wrapped()[:11].hex()},
        {"name": "empty", "expect": bad, **good, "wrapped": ""},
    ]


def good_manifest() -> Manifest:
    """Return a manifest of weights with two files and an asset."""
    rows = tuple(FileRow(n, 300 + i, "sha256:" + f"{i}" * 64, wrapped(n)) for i, n in enumerate(
        ("a-0.sealed", "metadata.sealed")))
    return Manifest(RUN, STEP, 2, manifest.WEIGHTS, "sha256:" + "c" * 64, 3, {"config.json": "a-0.sealed"}, rows)


def _sealed_body(body: Any) -> bytes:
    """Seal any body under the right key, as no honest broker does."""
    return canonical({"body": body, "mac": base64.b64encode(manifest._mac(RUN_KEY, body)).decode()})


def _bodies() -> list[tuple[str, str, Any]]:
    """Return faults of a body whose MAC is right."""
    def changed(**fields: Any) -> dict[str, Any]:
        return {**good_manifest().body(), **fields}

    def row(**fields: Any) -> dict[str, Any]:
        one, *rest = good_manifest().body()["files"]
        return changed(files=[{**one, **fields}, *rest], assets={})

    files = good_manifest().body()["files"]
    bad, name = "malformed.manifest", "malformed.file_name"
    return [
        ("a name with ..", name, row(name="../a-0.sealed")),
        ("an absolute name", name, row(name="/a-0.sealed")),
        ("a name with a slash", name, row(name="a/0.sealed")),
        ("a name in capitals", name, row(name="A-0.sealed")),
        ("a name with a line end", name, row(name="a-0.sealed\n")),
        ("a name that is too long", name, row(name="a" * 65 + ".sealed")),
        ("another kind of file", name, row(name="a-0.pt")),
        ("one name twice", bad, row(name="metadata.sealed")),
        ("no file", bad, changed(assets={}, files=[])),
        ("a file of weights over 100 MB", bad, row(size=100_000_001)),
        ("a size that is a truth value", bad, row(size=True)),
        ("a digest in capitals", bad, row(digest="sha256:" + "A" * 64)),
        ("a wrapped key that is no base64", bad, row(wrapped="!")),
        ("a wrapped key with loose bits", bad, row(wrapped="AB==")),
        ("a file with one more field", bad, row(mode=420)),
        ("files in another order", bad, changed(files=files[::-1])),
        ("one more field", bad, changed(note="")),
        ("a field missing", bad, {k: v for k, v in good_manifest().body().items() if k != "parent"}),
        ("an unknown format", bad, changed(format="interlock/manifest/v2")),
        ("an unknown kind", bad, changed(kind="optimizer")),
        ("assets of a training state", bad, changed(kind="state")),
        ("an asset in a file that is not listed", bad, changed(assets={"config.json": "b.sealed"})),
        ("an asset with a slash", "malformed.asset_name", changed(assets={"a/config.json": "a-0.sealed"})),
        ("a parent that is no digest", bad, changed(parent="step-299")),
        ("a step below zero", bad, changed(step=-1)),
        ("attempt zero", bad, changed(attempt=0)),
        ("no object", bad, []),
    ]


def manifest_vectors() -> list[dict[str, Any]]:
    """Return a good manifest, then ones with one fault."""
    found = good_manifest()
    good = found.seal(RUN_KEY)

    def case(name: str, expect: str, data: bytes, key: bytes = RUN_KEY) -> dict[str, Any]:
        return {"name": name, "expect": expect, "run_key": key.hex(), "stored": data.decode()}

    bad, broken = "malformed.manifest", "untrusted.manifest"
    return [
        {**case("good", "ok", good), "digest": found.digest()},
        case("another run key", broken, good, OTHER_KEY),
        case("a size edited", broken, good.replace(b'"size":300', b'"size":301')),
        case("a byte of the mac changed", broken, good.replace(b'"mac":"', b'"mac":"AAAA')),
        case("no mac", bad, canonical({"body": found.body()})),
        case("a space in it", bad, good.replace(b'"step":', b'"step": ')),
        case("a number with a point", bad, good.replace(b'"step":300', b'"step":300.0')),
        case("a key twice", bad, good.replace(b'"step":300', b'"step":300,"step":300')),
        case("no JSON", bad, b"\x80pickle".decode("latin-1").encode()),
        case("empty", bad, b""),
        *(case(name, expect, _sealed_body(body)) for name, expect, body in _bodies()),
    ]


def build() -> dict[str, str]:
    """Return file name → text of every vector file."""
    found = {"file.json": file_vectors(), "file-key.json": key_vectors(), "manifest.json": manifest_vectors()}
    return {n: json.dumps(v, indent=1, ensure_ascii=False, sort_keys=True) + "\n" for n, v in found.items()}


if __name__ == "__main__":
    for name, text in build().items():
        (HERE / name).write_text(text)
