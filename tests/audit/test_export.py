"""Exports and the verifier, run as an auditor would: one file, another folder, a pinned key."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Engine, update

import audit.verify
from audit.export import build, export
from audit.leaf import GENESIS, chain, encode
from audit.ledger import Ledger
from audit.spool import Spool, unshipped
from audit.treehead import TreeHead, note_key, sign_note
from audit.verify import pack, sha256, unpack, verify
from interlock.canon import canonical
from interlock.errors import Conflict, NotFound
from interlock.event import Event, EventType
from tests.audit.conftest import KEY, ORIGIN, TABLES, step
from tests.audit.test_ledger import NODE_KEY, S, drain, shipment

VKEY = note_key(ORIGIN, KEY.public_key()).vkey()


@pytest.fixture
def full(ledger: Ledger, folder: Path) -> Ledger:
    """A ledger with records of its own and of a node with two streams."""
    for n in range(9):
        ledger.record(step(n))
    for _ in range(2):
        spool = Spool(folder / "spool", "n1", "launcher")
        for n in range(4):
            spool.record(step(n))
        spool.close()
    for sent in unshipped(folder / "spool"):
        ledger.intake("n1", sent.stream, sent.records)
    drain(ledger)
    return ledger


def _write(folder: Path, data: bytes) -> Path:
    path = folder / "x.zip"
    path.write_bytes(data)
    return path


def _codes(path: Path, vkey: str = VKEY, **more: Any) -> tuple[str, list[str]]:
    report = verify(path, vkey, **more)
    return report.status, [p["code"] for p in report.problems]


def test_a_whole_export_verifies(full: Ledger, folder: Path) -> None:
    report = verify(export(full, folder / "out.zip"), VKEY)
    assert (report.status, report.problems, report.integrity_only) == ("ok", [], False)
    assert (report.size, report.records, report.scope, report.origin) == (21, 21, "whole", ORIGIN)
    assert report.streams == {"closed": 2, "superseded": 0, "open": 1}
    assert bytes.fromhex(report.root) == full.head().root
    assert (folder / "out.zip").stat().st_mode & 0o777 == 0o600
    with pytest.raises(Conflict):
        export(full, folder / "out.zip")


def test_an_export_is_deterministic_and_an_ordinary_zip(full: Ledger, folder: Path) -> None:
    data = build(full)
    assert data == build(full)
    with zipfile.ZipFile(_write(folder, data)) as found:
        assert found.testzip() is None
        assert found.namelist() == sorted(found.namelist())
        leaves = found.read("leaves.jsonl").splitlines()
    assert leaves == [r.body for r in full.rows(limit=100)]


def test_any_one_flipped_byte_is_noticed(full: Ledger, folder: Path) -> None:
    """Every byte of small members, of the container and of the rest in steps; the positive is above."""
    data = build(full)
    fine = {**unpack(data), "leaves.jsonl": b"", "streams.json": b"", "readme.txt": b""}
    places = set(range(0, len(data), 97)) | set(range(len(data) - 700, len(data), 5))
    for body in fine.values():
        if body:
            at = data.index(body)
            places |= set(range(at, at + len(body), 11))
    for at in places:
        spoilt = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert verify(_write(folder, spoilt), VKEY).status == "tampered", at
    assert verify(_write(folder, data), VKEY).status == "ok"


def _resealed(data: bytes, key: Ed25519PrivateKey | None = None, **members: bytes) -> bytes:
    """Return the export with members exchanged and the manifest made to fit; signed again only with `key`."""
    found = {**unpack(data), **{n.replace("_", "."): b for n, b in members.items()}}
    manifest = json.loads(found["manifest.json"])
    manifest["members"] = {
        n: {"sha256": sha256(b), "bytes": len(b)} for n, b in found.items() if not n.startswith("manifest")
    }
    manifest["records"] = found["leaves.jsonl"].count(b"\n")
    found["manifest.json"] = canonical(manifest)
    if key is not None:
        text = f"interlock/export/v1\n{ORIGIN}\n{sha256(found['manifest.json'])}\n"
        found["manifest.note"] = sign_note(text, ORIGIN, key).encode()
    return pack(found)


def test_refuses_when_each_kind_of_artefact_is_changed_and_the_container_remade(full: Ledger, folder: Path) -> None:
    data = build(full)
    for name, body in unpack(data).items():
        spoilt = {**unpack(data), name: body[:-2] + bytes([body[-2] ^ 1]) + body[-1:]}
        status, codes = _codes(_write(folder, pack(spoilt)))
        assert status == "tampered", name
        assert codes[0] in (name, "manifest"), (name, codes)
    assert _codes(_write(folder, pack(unpack(data)))) == ("ok", [])


def test_refuses_when_a_member_is_added_or_missing(full: Ledger, folder: Path) -> None:
    members = unpack(build(full))
    assert _codes(_write(folder, pack({**members, "note.txt": b"x"}))) == ("tampered", ["manifest"])
    del members["readme.txt"]
    assert _codes(_write(folder, pack(members))) == ("tampered", ["manifest"])


@pytest.mark.parametrize("harm", ["tail", "middle", "swap", "body", "head"])
def test_refuses_when_even_the_holder_of_the_key_changes_the_leaves(full: Ledger, folder: Path, harm: str) -> None:
    """The manifest is signed anew with the real key: the tree itself must notice."""
    data = build(full)
    lines = unpack(data)["leaves.jsonl"].splitlines(keepends=True)
    members: dict[str, bytes] = {
        "tail": {"leaves_jsonl": b"".join(lines[:-1])},
        "middle": {"leaves_jsonl": b"".join(lines[:5] + lines[6:])},
        "swap": {"leaves_jsonl": b"".join([lines[1], lines[0], *lines[2:]])},
        "body": {"leaves_jsonl": b"".join(lines).replace(b"person/ada", b"person/eve", 1)},
        "head": {"head_note": sign_note(TreeHead(ORIGIN, 21, bytes(32)).text(), ORIGIN, KEY).encode()},
    }[harm]
    assert _codes(_write(folder, _resealed(data, KEY, **members))) == ("tampered", ["leaves"])
    assert _codes(_write(folder, _resealed(data, KEY))) == ("ok", [])


def test_refuses_when_the_note_is_signed_by_another_key(full: Ledger, folder: Path) -> None:
    other = Ed25519PrivateKey.generate()
    data = build(full)
    assert _codes(_write(folder, data), note_key(ORIGIN, other.public_key()).vkey()) == ("tampered", ["manifest"])
    forged = _resealed(
        data, other, head_note=sign_note(TreeHead(ORIGIN, 21, full.head().root).text(), ORIGIN, other).encode(),
        ledger_vkey=note_key(ORIGIN, other.public_key()).vkey().encode() + b"\n",
    )
    assert _codes(_write(folder, forged)) == ("tampered", ["manifest"])
    status, codes = _codes(_write(folder, forged), "")
    assert (status, codes) == ("incomplete", ["integrity_only"]), "consistent in itself, made by anyone"


def test_refuses_when_the_signature_of_the_pinned_key_is_altered(full: Ledger, folder: Path) -> None:
    data = build(full)
    members = unpack(data)
    for name in ("head.note", "manifest.note"):
        text, _, tail = members[name].decode().rpartition(" ")
        spoilt = f"{text} {tail[:20]}{'A' if tail[20] != 'A' else 'B'}{tail[21:]}".encode()
        # the head's digest in the manifest is made to fit by the key's holder
        remade = _resealed(data, KEY, head_note=spoilt) if name == "head.note" else pack({**members, name: spoilt})
        status, codes = _codes(_write(folder, remade))
        assert (status, codes) == ("tampered", [name.partition(".")[0]])


def test_without_a_pinned_key_it_says_integrity_only(full: Ledger, folder: Path) -> None:
    path = export(full, folder / "out.zip")
    report = verify(path, "")
    assert (report.status, report.integrity_only) == ("incomplete", True)
    assert "integrity only" in report.problems[0]["message"]
    assert verify(path, VKEY).status == "ok"


def test_a_selection_proves_each_record_and_says_what_it_is(full: Ledger, folder: Path) -> None:
    data = build(full, {"run": "run_1"})
    path = _write(folder, data)
    assert _codes(path) == ("incomplete", ["selection"])
    report = verify(path, VKEY, selection=True)
    assert (report.status, report.records, report.size) == ("ok", len(full.rows(run="run_1")), 21)
    lines = unpack(data)["proofs.jsonl"].splitlines(keepends=True)
    swapped = b"".join([lines[1], lines[0], *lines[2:]])
    assert _codes(_write(folder, _resealed(data, KEY, proofs_jsonl=swapped)), selection=True)[0] == "tampered"
    assert _codes(_write(folder, _resealed(data, KEY)), selection=True)[0] == "ok"


def test_lost_records_make_an_export_incomplete(full: Ledger, folder: Path) -> None:
    from audit import marks

    rows = shipment([step(1), step(2)])
    full.intake("n1", S, rows[:2])
    body = marks.body([(S, 4, GENESIS)], "boot", 1)
    full.mark("n1", NODE_KEY.public_key(), body, marks.sign(NODE_KEY, body))
    drain(full)
    report = verify(_write(folder, build(full)), VKEY)
    assert (report.status, report.pending) == ("ok", 3)
    full.watch_streams(grace_us=-1)
    drain(full)
    report = verify(_write(folder, build(full)), VKEY)
    assert (report.status, report.lost, [p["code"] for p in report.problems]) == ("incomplete", 3, ["lost"])


def test_a_predecessor_cut_short_makes_an_export_incomplete(ledger: Ledger, folder: Path) -> None:
    rows = shipment([step(1), step(2)])
    ledger.intake("n1", S, rows[:2])
    before = {"predecessor": {"stream": S, "next_seq": 3, "hash": chain(rows[2][1]), "torn_bytes": 0}}
    second = "s-00000001-00000000"
    opened = encode("n1", second, 0, GENESIS, Event(EventType.STREAM_OPENED, "node/n1", facts=before).canonical())
    ledger.intake("n1", second, [(0, opened)])
    drain(ledger)
    report = verify(_write(folder, build(ledger)), VKEY)
    assert (report.status, report.lost) == ("incomplete", 1)
    ledger.intake("n1", S, rows[2:])
    drain(ledger)
    report = verify(_write(folder, build(ledger)), VKEY)
    assert (report.status, report.streams["superseded"]) == ("ok", 1)


@pytest.mark.parametrize("harm", ["gap", "chain", "order", "opened"])
def test_refuses_when_the_log_itself_holds_a_broken_stream(
    full: Ledger, folder: Path, engine: Engine, harm: str
) -> None:
    """Put past intake straight into the outbox: the verifier must not rely on the ledger's checks."""
    rows = dict(shipment([step(1), step(2), step(3)]))
    bodies = {
        "gap": [rows[0], rows[1], rows[3]], "order": [rows[0], rows[2], rows[1]], "opened": [
            encode("n1", S, 0, GENESIS, step(5).canonical())],
        "chain": [rows[0], encode("n1", S, 1, GENESIS, step(5).canonical())],
    }[harm]
    with engine.begin() as connection:
        connection.execute(TABLES.outbox.insert(), [
            {"event_id": json.loads(b)["event"]["id"], "body": b, "received_us": 1, "node": "n1"} for b in bodies
        ])
    drain(full)
    status, codes = _codes(_write(folder, build(full)))
    assert (status, codes) == (("incomplete", ["lost"]) if harm == "gap" else ("tampered", ["stream"]))


def test_a_changed_row_in_the_database_does_not_verify(full: Ledger, folder: Path, engine: Engine) -> None:
    with engine.begin() as connection:
        body = full.rows(limit=1)[0].body.replace(b"person/ada", b"person/eve")
        connection.execute(update(TABLES.leaves).where(TABLES.leaves.c.log_index == 0).values(body=body))
    assert _codes(_write(folder, build(full))) == ("tampered", ["leaves"])


def test_refuses_when_there_is_no_head_yet(ledger: Ledger) -> None:
    with pytest.raises(NotFound):
        build(ledger)


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"PK\5\6" + bytes(18), b"x" * 500, bytes(100)])
def test_refuses_when_the_file_is_no_export(folder: Path, data: bytes) -> None:
    assert _codes(_write(folder, data)) == ("tampered", ["container"])


def test_the_verifier_runs_alone_as_one_file(full: Ledger, folder: Path) -> None:
    alone = folder / "auditor"
    alone.mkdir()
    shutil.copy(audit.verify.__file__, alone / "verify.py")
    export(full, alone / "whole.zip")
    data = (alone / "whole.zip").read_bytes()
    (alone / "bad.zip").write_bytes(data.replace(b"person/ada", b"person/eve", 1))
    (alone / "part.zip").write_bytes(build(full, {"run": "run_1"}))
    (alone / "key").write_text(f"# pinned by hand\n{VKEY}\n")

    def run(*argv: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-I", "verify.py", *argv], cwd=alone, capture_output=True, text=True, timeout=30
        )
        return done.returncode, done.stdout

    assert run("whole.zip", "--key", "key")[0] == 0
    code, out = run("whole.zip", "--key", "key", "--json")
    assert (code, json.loads(out)["records"]) == (0, 21)
    assert run("bad.zip", "--key", "key")[0] == 1
    assert run("part.zip", "--key", "key")[0] == 2
    assert run("part.zip", "--key", "key", "--selection")[0] == 0
    code, out = run("whole.zip")
    assert code == 2
    assert "integrity only" in out
    assert run("missing.zip", "--key", "key")[0] == 3
    assert run("whole.zip", "--key", "missing")[0] == 3
    assert run("--what")[0] == 3
    (alone / "key").write_text("nonsense")
    assert run("whole.zip", "--key", "key")[0] == 3


def test_the_verifier_shares_no_code_with_us() -> None:
    source = Path(audit.verify.__file__).read_text()
    assert "import interlock" not in source
    assert "from interlock" not in source
    assert "from audit" not in source


@pytest.mark.parametrize("seq", [1 << 25, 10**12, 10**40])
def test_refuses_when_a_forged_record_asks_for_memory(seq: int) -> None:
    leaf = {"node": "n1", "stream": "s", "seq": seq, "prev": GENESIS, "event": {"type": "run.step"}}
    with pytest.raises(audit.verify.Tampered):
        audit.verify.check_streams(audit.verify.Report(), [json.dumps(leaf).encode()], [])


def test_a_forged_name_moves_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = audit.verify.Report()
    report.add("tampered", "stream", "n1\x1b[2J\r\ud800: record 1")
    audit.verify._print(report)
    shown = capsys.readouterr().out
    assert "record 1" in shown
    assert not set(shown) & {"\x1b", "\r", "\ud800"}
