"""Offline auditor: given an export and a pinned key, is anything missing or changed? One file, no network.

    python verify.py EXPORT --key ledger.vkey [--json] [--selection]

Exit 0 ok, 1 tampered, 2 incomplete (also: no pinned key), 3 usage. Needs Python and `cryptography` alone and
shares no code with the program it judges, so that it can be read and kept apart. What is checked, in order:
  1. the container is byte for byte what its members give (nothing hidden between or behind them);
  2. the manifest's note is signed by the pinned key, and every member has the digest the manifest names;
  3. the tree head is signed by the pinned key and is of the log that the key is named after;
  4. the root is rebuilt from the leaf bytes (a selection: each leaf is proven to be under the root);
  5. per stream: seq runs from 0 without a gap, each record carries the digest of the one before, nothing
     follows a closing record, no stream ends below what its node claimed or its successor says.
A signature proves who and what, not that the signer was honest: two heads of one key that contradict each
other must be compared by those who hold them. Formats: docs/formats/{export,tree-head,record}.md.
"""

import argparse
import base64
import binascii
import hashlib
import json
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

EXIT = {"ok": 0, "tampered": 1, "incomplete": 2, "usage": 3}
FORMAT = "interlock/export/v1"
GENESIS = "sha256:" + "0" * 64
CONTROL = ("control", "control")
MAX_BYTES = (1 << 31) - 1
MAX_GAP = 1 << 24  # a made-up record may name any number; memory for what is missing has an end
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")


@dataclass
class Report:
    """What was found. `status`: ok, tampered, incomplete or usage; `problems` say why, each with a code.

    `records` leaves in the export, `size` and `root` (hex) of the signed head, `streams` counted by state,
    `pending` records that nodes claim and that were still under way, `lost` records known to be missing,
    `integrity_only` True when no key was pinned: then nothing says who made it.
    """

    status: str = "ok"
    scope: str = ""
    origin: str = ""
    size: int = 0
    root: str = ""
    records: int = 0
    streams: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    lost: int = 0
    integrity_only: bool = False
    problems: list[dict[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-safe object."""
        return asdict(self)

    def add(self, status: str, code: str, message: str) -> None:
        """Note a problem; tampered outweighs incomplete."""
        self.problems.append({"status": status, "code": code, "message": message})
        if self.status == "ok" or status == "tampered":
            self.status = status


class Tampered(Exception):
    """Something does not fit; `code` names the artefact."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def sha256(data: bytes) -> str:
    """Return ``sha256:<hex>``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


# --- the container: a zip without compression, sorted names, 1980-01-01 -----------------------------------
def pack(members: Mapping[str, bytes]) -> bytes:
    """Return the only zip that holds exactly `members`; the same members always give the same bytes."""
    local, central, count = bytearray(), bytearray(), 0
    for name, body in sorted(members.items()):
        raw, start = name.encode("ascii"), len(local)
        same = (0, 0, 0, 33, zlib.crc32(body), len(body), len(body), len(raw), 0)
        local += _LOCAL.pack(b"PK\3\4", 20, *same) + raw + body
        central += _CENTRAL.pack(b"PK\1\2", 0x314, 20, *same, 0, 0, 0, 0o100644 << 16, start) + raw
        count += 1
    return bytes(local + central + _END.pack(b"PK\5\6", 0, 0, count, count, len(central), len(local), 0))


def unpack(data: bytes) -> dict[str, bytes]:
    """Return the members of a container; raises Tampered unless packing them gives `data` again."""
    members: dict[str, bytes] = {}
    at = 0
    while data[at : at + 4] == b"PK\3\4" and at + _LOCAL.size <= len(data):
        size, length = _LOCAL.unpack_from(data, at)[8:10]
        at += _LOCAL.size + length + size
        members[data[at - length - size : at - size].decode("ascii", "replace")] = data[at - size : at]
    if not members or any(not name.isascii() for name in members) or pack(members) != data:
        raise Tampered("container", "the file is not the container that its members give; it was changed or cut")
    return members


# --- signed notes -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Key:
    """A pinned verification key: ``name+id+base64(type | key)``, Ed25519 only."""

    name: str
    id: bytes
    public: Ed25519PublicKey


def parse_vkey(text: str) -> Key:
    """Parse a vkey; lines that start with # are skipped. Raises ValueError."""
    lines = [x.strip() for x in text.splitlines() if x.strip() and not x.startswith("#")]
    if len(lines) != 1:
        raise ValueError("a key file holds one vkey line")
    name, hexed, encoded = lines[0].split("+", 2)
    raw = base64.b64decode(encoded, validate=True)
    if not name or len(raw) != 33 or raw[0] != 1:
        raise ValueError("the vkey is not an Ed25519 one (type 1)")
    if hashlib.sha256(name.encode() + b"\n" + raw).digest()[:4].hex() != hexed:
        raise ValueError("the id of the vkey does not fit its key")
    return Key(name, bytes.fromhex(hexed), Ed25519PublicKey.from_public_bytes(raw[1:]))


def open_note(note: bytes, key: Key, what: str) -> str:
    """Return the text of a note that `key` signed; raises Tampered."""
    try:
        text, _, tail = note.decode("utf-8").rpartition("\n\n")
    except UnicodeDecodeError:
        raise Tampered(what, "a note is not UTF-8") from None
    text += "\n"
    if not tail.endswith("\n") or any(ord(c) < 32 and c != "\n" for c in text + tail):
        raise Tampered(what, "a note is malformed")
    good = False
    for line in tail.split("\n")[:-1]:
        dash, name, blob = [*line.split(" "), "", ""][:3]
        try:
            raw = base64.b64decode(blob, validate=True)
        except binascii.Error:
            raise Tampered(what, "a signature line is malformed") from None
        if dash != "—" or len(raw) < 5 or line.count(" ") != 2 or base64.b64encode(raw).decode() != blob:
            raise Tampered(what, "a signature line is malformed")
        if name == key.name and raw[:4] == key.id:
            _check(key, raw[4:], text, what)
            good = True
    if not good:
        raise Tampered(what, "it is not signed by the pinned key")
    return text


def _check(key: Key, signature: bytes, text: str, what: str) -> None:
    try:
        key.public.verify(signature, text.encode())
    except InvalidSignature:
        raise Tampered(what, "the signature does not verify") from None


# --- the tree (RFC 6962) ------------------------------------------------------------------------------------
def _leaf(body: bytes) -> bytes:
    return hashlib.sha256(b"\0" + body).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def tree_root(leaves: list[bytes]) -> bytes:
    """Return the root over all leaf bodies."""
    peaks: list[tuple[int, bytes]] = []
    for body in leaves:
        level, found = 0, _leaf(body)
        while peaks and peaks[-1][0] == level:
            found, level = _node(peaks.pop()[1], found), level + 1
        peaks.append((level, found))
    if not peaks:
        return hashlib.sha256(b"").digest()
    found = peaks.pop()[1]
    while peaks:
        found = _node(peaks.pop()[1], found)
    return found


def proven(index: int, size: int, body: bytes, proof: list[bytes], root: bytes) -> bool:
    """Return whether `body` is leaf `index` of the tree (`size`, `root`)."""
    if not 0 <= index < size or any(len(p) != 32 for p in proof):
        return False
    inner = (index ^ (size - 1)).bit_length()
    if len(proof) != inner + (index >> inner).bit_count():
        return False
    found = _leaf(body)
    for i, item in enumerate(proof):
        found = _node(item, found) if i >= inner or index >> i & 1 else _node(found, item)
    return found == root


# --- streams --------------------------------------------------------------------------------------------------
@dataclass
class Stream:
    """One stream while its records pass by: digests in order ("" for one that is missing), and the end."""

    digests: list[str] = field(default_factory=list)
    closed: bool = False


def _follow(streams: dict[tuple[str, str], Stream], body: bytes) -> tuple[str, dict[str, Any]] | None:
    """Check that a leaf continues its stream; return (node, predecessor) when it names one."""
    leaf = json.loads(body)
    name = (leaf["node"], leaf["stream"])
    stream, seq = streams.setdefault(name, Stream()), leaf["seq"]
    if seq < len(stream.digests) or stream.closed:
        raise Tampered("stream", f"{name[0]}/{name[1]}: record {seq} is out of order or after the end")
    if seq - len(stream.digests) > MAX_GAP:
        raise Tampered("stream", f"{name[0]}/{name[1]}: record {seq} is out of all proportion")
    if seq > len(stream.digests):
        stream.digests += [""] * (seq - len(stream.digests))
    elif leaf["prev"] != (stream.digests[-1] if stream.digests else GENESIS):
        raise Tampered("stream", f"{name[0]}/{name[1]}: record {seq} does not follow the one before")
    stream.digests.append(sha256(body))
    stream.closed = leaf["event"]["type"] == "stream.closed"
    before = leaf["event"].get("facts", {}).get("predecessor")
    if seq or name == CONTROL:
        return None
    if leaf["event"]["type"] != "stream.opened":
        raise Tampered("stream", f"{name[0]}/{name[1]}: its first record does not open it")
    return (name[0], before) if before else None


def check_streams(report: Report, leaves: list[bytes], rows: list[dict[str, Any]]) -> None:
    """Check every stream of a whole export against its own records and what was claimed."""
    streams: dict[tuple[str, str], Stream] = {}
    claims = [found for body in leaves if (found := _follow(streams, body))]
    superseded = set()
    missing: dict[tuple[str, str], int] = {}
    for node, before in claims:
        name, count = (node, before["stream"]), before["next_seq"]
        superseded.add(name)
        digests = streams.get(name, Stream()).digests
        if len(digests) < count:
            missing[name] = count - len(digests)
        elif digests[count - 1] not in ("", before["hash"]):
            raise Tampered("stream", f"{name[0]}/{name[1]} is not the stream that its successor names")
    for row in rows:
        name, claimed = (row["node"], row["stream"]), row["mark_seq"] + 1
        behind = claimed - len(streams.get(name, Stream()).digests)
        if row["state"] == "lost" and claimed > row["next_seq"]:
            missing[name] = max(claimed - row["next_seq"], missing.get(name, 0))
        elif behind > 0 and name not in missing:
            report.pending += behind
    for name, stream in streams.items():
        missing[name] = missing.get(name, 0) + stream.digests.count("")
    _count(report, streams, superseded, missing)


def _count(
    report: Report, streams: dict[tuple[str, str], Stream], superseded: set[tuple[str, str]],
    missing: dict[tuple[str, str], int],
) -> None:
    closed = sum(s.closed for s in streams.values())
    ended = sum(not s.closed and n in superseded for n, s in streams.items())
    report.streams = {"closed": closed, "superseded": ended, "open": len(streams) - closed - ended}
    for name, count in sorted(missing.items()):
        if count:
            report.lost += count
            report.add("incomplete", "lost", f"{name[0]}/{name[1]}: {count} records never arrived")


# --- the whole --------------------------------------------------------------------------------------------------
def _lines(data: bytes) -> list[bytes]:
    if data and not data.endswith(b"\n"):
        raise Tampered("leaves", "the last line is cut")
    return data.split(b"\n")[:-1]


def _manifest(members: dict[str, bytes], key: Key) -> dict[str, Any]:
    text = open_note(members["manifest.note"], key, "manifest")
    manifest = members["manifest.json"]
    if text != f"{FORMAT}\n{key.name}\n{sha256(manifest)}\n":
        raise Tampered("manifest", "the manifest is not the one that was signed")
    value: dict[str, Any] = json.loads(manifest)
    if value["format"] != FORMAT or set(value["members"]) != set(members) - {"manifest.json", "manifest.note"}:
        raise Tampered("manifest", "the members are not those that the manifest lists")
    for name, row in value["members"].items():
        if sha256(members[name]) != row["sha256"] or len(members[name]) != row["bytes"]:
            raise Tampered(name, f"{name} is not what the manifest lists")
    return value


def _check_leaves(report: Report, manifest: dict[str, Any], members: dict[str, bytes], root: bytes) -> None:
    leaves = _lines(members["leaves.jsonl"])
    report.records = len(leaves)
    if len(leaves) != manifest["records"]:
        raise Tampered("leaves", f"{len(leaves)} leaves, the manifest counts {manifest['records']}")
    if manifest["scope"] == "whole":
        if len(leaves) != report.size or tree_root(leaves) != root:
            raise Tampered("leaves", "the leaves do not give the signed root")
        check_streams(report, leaves, json.loads(members["streams.json"]))
        return
    proofs = [json.loads(x) for x in _lines(members["proofs.jsonl"])]
    if len(proofs) != len(leaves):
        raise Tampered("proofs", "not one proof for each leaf")
    for body, row in zip(leaves, proofs, strict=True):
        if not proven(row["index"], report.size, body, [base64.b64decode(p) for p in row["proof"]], root):
            raise Tampered("proofs", f"record {row['index']} is not proven to be in the log")


def _check_export(report: Report, data: bytes, key: Key | None) -> None:
    members = unpack(data)
    signer = key or parse_vkey(members["ledger.vkey"].decode())
    manifest = _manifest(members, signer)
    lines = open_note(members["head.note"], signer, "head").split("\n")
    root = base64.b64decode(lines[2], validate=True)
    if lines[0] != signer.name or len(root) != 32:
        raise Tampered("head", "the tree head is of another log or odd")
    report.origin, report.size, report.root = lines[0], int(lines[1]), root.hex()
    report.scope = manifest["scope"]
    if manifest["size"] != report.size or report.scope not in ("whole", "selection"):
        raise Tampered("manifest", "the manifest is of another tree head")
    _check_leaves(report, manifest, members, root)


def verify(path: Path, vkey_text: str, *, selection: bool = False) -> Report:
    """Verify the export at `path` with the pinned `vkey_text` ("" for none: integrity only).

    A selection proves each of its records, not that none is missing: it is incomplete unless `selection`
    says that one was asked for. Never raises for what the file holds.
    """
    report = Report()
    try:
        key = parse_vkey(vkey_text) if vkey_text.strip() else None
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("the export is larger than 2 GiB")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        report.add("usage", "usage", f"cannot start: {error}")
        return report
    try:
        _check_export(report, data, key)
    except Tampered as error:
        report.add("tampered", error.code, str(error))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, OverflowError,
            struct.error) as error:
        report.add("tampered", "unreadable", f"the export cannot be read: {type(error).__name__}")
    if key is None:
        report.integrity_only = True
        report.add("incomplete", "integrity_only", "integrity only: no pinned key, anyone may have made this")
    if report.scope == "selection" and not selection:
        report.add("incomplete", "selection", "a selection: each record is proven, not that none is missing")
    return report


def _print(report: Report) -> None:
    shown = {k: v for k, v in report.as_json().items() if k != "problems"}
    lines = [f"{name:15} {value}" for name, value in shown.items()]
    lines += [f"{p['status']}: [{p['code']}] {p['message']}" for p in report.problems]
    # Names in a forged export are anybody's: no control character reaches the terminal.
    sys.stdout.write("".join(f"{ascii(x)[1:-1] if not x.isprintable() else x}\n" for x in lines))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"usage: {message}\n")
        sys.exit(EXIT["usage"])


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _Parser(description="Verify an export of the ledger offline.")
    parser.add_argument("export", type=Path)
    parser.add_argument("--key", type=Path, help="the pinned ledger.vkey, got apart from the export")
    parser.add_argument("--selection", action="store_true", help="accept a selection of records")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        vkey = args.key.read_text() if args.key else ""
    except (OSError, ValueError) as error:
        parser.error(f"cannot read the key: {error}")
    report = verify(args.export, vkey, selection=args.selection)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        _print(report)
    return EXIT[report.status]


if __name__ == "__main__":
    sys.exit(main())
