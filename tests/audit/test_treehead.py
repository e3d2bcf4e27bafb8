"""Signed notes and tree heads against published vectors."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit import treehead
from interlock.errors import Malformed, Refusal, Untrusted
from tests.audit.test_merkle import VECTORS

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def test_published_notes_verify() -> None:
    good = 0
    for row in VECTORS["signed_notes"]:
        text, names = treehead.open_note(row["note"], [treehead.parse_vkey(row["vkey"])])
        assert text == row["text"]
        assert names == {row["vkey"].split("+")[0]}
        good += 1
    both = [treehead.parse_vkey(r["vkey"]) for r in VECTORS["signed_notes"]]
    assert treehead.open_note(VECTORS["signed_notes"][1]["note"], both)[1] == {"PeterNeumann", "EnochRoot"}
    assert good == 2


def test_published_seed_gives_the_published_vkey_and_signature() -> None:
    row = VECTORS["signed_notes"][1]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(row["seed_hex"]))
    assert treehead.note_key(row["name"], key.public_key()).vkey() == row["vkey"]
    assert treehead.sign_note(row["text"], row["name"], key).endswith("\n\n" + row["extra_signature"])


def test_sample_log_heads() -> None:
    sample = VECTORS["sample_log"]
    key = treehead.parse_vkey(sample["vkey"])
    for size in range(11):
        head = treehead.open_head(sample["files"][f"checkpoint.{size}"], "example.com/log/testdata", [key])
        assert head.size == size
        assert head.text() == sample["files"][f"checkpoint.{size}"].split("\n\n")[0] + "\n"


def test_refuses_when_a_vkey_is_broken() -> None:
    for bad in VECTORS["bad_vkeys"]:
        with pytest.raises(Malformed):
            treehead.parse_vkey(bad)
    good = VECTORS["signed_notes"][0]["vkey"]
    treehead.parse_vkey(good)
    for bad in (good.replace("c74f20a3", "c74f20a4"), good[:-1], "", "a+b", good.replace("+AR", "+BR")):
        with pytest.raises(Malformed):
            treehead.parse_vkey(bad)


def test_refuses_when_a_note_is_malformed() -> None:
    key = treehead.parse_vkey(VECTORS["signed_notes"][0]["vkey"])
    bad: list[str | bytes] = [r["note"] for r in VECTORS["malformed_notes"]]
    bad += [bytes.fromhex(r["hex"]) for r in VECTORS["malformed_notes_bytes_hex"]]
    assert len(bad) == 6
    for note in bad:
        with pytest.raises(Malformed):
            treehead.open_note(note, [key])


def test_refuses_when_a_known_key_signed_badly() -> None:
    first, second = (treehead.parse_vkey(r["vkey"]) for r in VECTORS["signed_notes"])
    for row in VECTORS["invalid_signature_notes"]:
        with pytest.raises(Untrusted):
            treehead.open_note(row["note"], [first])
        with pytest.raises(Untrusted, match="no pinned key"):
            treehead.open_note(row["note"], [second])
    # one bad signature of a known key spoils the note although the other is good
    row = VECTORS["signed_notes"][1]
    spoilt = row["note"].replace("x08go/ZJkuBS9UG", "x08go/ZJkuBS9UH")
    assert spoilt != row["note"]
    with pytest.raises(Untrusted):
        treehead.open_note(spoilt, [first, second])
    assert treehead.open_note(spoilt, [second])[1] == {"EnochRoot"}


def test_refuses_when_one_byte_of_a_head_is_flipped() -> None:
    pinned = treehead.note_key("interlock/test", KEY.public_key())
    note = treehead.sign_note(treehead.TreeHead("interlock/test", 7, bytes(32)).text(), "interlock/test", KEY).encode()
    assert treehead.open_head(note, "interlock/test", [pinned]).size == 7
    for at in range(len(note)):
        spoilt = note[:at] + bytes([note[at] ^ 1]) + note[at + 1 :]
        with pytest.raises(Refusal):
            treehead.open_head(spoilt, "interlock/test", [pinned])


@pytest.mark.parametrize(
    "text", ["a\n01\n{r}\n", "a\n-1\n{r}\n", "a\n18446744073709551616\n{r}\n", "\n1\n{r}\n", "a\n1\n"]
)
def test_refuses_when_a_head_is_odd(text: str) -> None:
    root = base64.b64encode(bytes(32)).decode()
    treehead.parse_head(f"a\n1\n{root}\n")
    with pytest.raises(Malformed):
        treehead.parse_head(text.replace("{r}", root))


def test_refuses_when_the_head_is_of_another_log() -> None:
    key = treehead.note_key("one", KEY.public_key())
    note = treehead.sign_note(treehead.TreeHead("one", 1, bytes(32)).text(), "one", KEY)
    treehead.open_head(note, "one", [key])
    with pytest.raises(Untrusted):
        treehead.open_head(note, "two", [key])


def test_the_published_example_of_a_body_reads_back() -> None:
    body = VECTORS["checkpoint_example"]["body"]
    head = treehead.parse_head(body)
    assert (head.origin, head.size) == ("example.com/behind-the-sofa", 20852163)
    assert head.text() == body
