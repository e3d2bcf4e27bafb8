"""Every reason to refuse a bundle, each with the old one still deciding."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from interlock.call import Action
from interlock.canon import canonical, digest_bytes
from interlock.errors import Conflict, Malformed, Refusal, Unavailable, Untrusted
from interlock.keyfile import read_ed25519
from interlock.signed import BUNDLE, STOP, Signed, key_id, public_text, sign
from interlock.tier import Tier
from policy import archive, bundle
from policy.bundle import DAY_US, SIGNED, Bundle
from policy.facts import Facts
from policy.rbac import Engine
from tests.policy.conftest import FEW, MODEL, NOW, Signers, call, packed, repacked

RESEARCHER = Facts(frozenset({"researcher"}))
MORE = FEW + "p, auditor, *, site/*, look, none, -, allow\n"
CRITICAL = FEW + "p, researcher, same, pool/*, launch, critical, mfa_bound+two_persons, allow\n"


@pytest.fixture
def active(load: Callable[..., Bundle]) -> Bundle:
    return load(FEW, version=5)


@pytest.fixture
def refused(signers: Signers, active: Bundle) -> Callable[..., Refusal]:
    """Return a check that `data` is refused and that the active bundle decides on as before."""
    deciding = Engine(active, lambda: NOW)

    def check(data: bytes, error: type[Refusal], code: str, now_us: int = NOW) -> Refusal:
        with pytest.raises(error) as caught:
            bundle.read(data, signers.pinned, active, now_us=now_us)
        assert caught.value.code == code
        assert deciding.decide(call(), RESEARCHER).allowed
        assert not deciding.decide(call(), Facts()).allowed
        return caught.value

    return check


def test_accepts_what_two_pinned_signers_signed(make: Callable[..., bytes], signers: Signers) -> None:
    data = make(FEW, version=7)
    found = bundle.read(data, signers.pinned, None, now_us=NOW)
    assert (found.version, found.archive, set(found.files)) == (7, data, {"model.conf", "policy.csv"})
    assert found.signers == frozenset(signers.pinned)
    assert found.digest.startswith("sha256:")


def test_reads_a_file_once(make: Callable[..., bytes], signers: Signers, tmp_path: Path) -> None:
    path = tmp_path / "b.bundle"
    path.write_bytes(make())
    assert bundle.read(path, signers.pinned, None, now_us=NOW).version == 1
    with pytest.raises(Unavailable):
        bundle.read(tmp_path / "absent", signers.pinned, None)


def test_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    assert packed(FEW, tmp_path / "a") == packed(FEW, tmp_path / "b")


def test_refuses_when_signature_is_missing(
    make: Callable[..., bytes], refused: Callable[..., Refusal], signers: Signers, tmp_path: Path
) -> None:
    unsigned = packed(MORE, tmp_path / "u", version=6)
    assert "interlock policy sign" in refused(unsigned, Untrusted, "untrusted.unsigned").next_step
    stripped = repacked(make(MORE, version=6), manifest__signed__json=None)
    refused(stripped, Untrusted, "untrusted.unsigned")
    assert bundle.read(make(MORE, version=6), signers.pinned, None, now_us=NOW).version == 6


def test_refuses_when_signer_is_not_pinned(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    refused(make(MORE, version=6, by="mallory"), Untrusted, "untrusted.signature")


def test_refuses_when_signature_is_forged(make: Callable[..., bytes], refused: Callable[..., Refusal],
                                          signers: Signers) -> None:
    data = make(MORE, version=6)
    value = json.loads(archive.unpack(data)[SIGNED])
    other = Signed.from_json(value)
    forged = Signed(BUNDLE, other.payload, tuple((kid, b"\1" * 64) for kid, _ in other.signatures))
    refused(repacked(data, manifest__signed__json=canonical(forged.as_json())), Untrusted, "untrusted.signature")


def test_refuses_when_manifest_was_edited(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    data = make(MORE, version=6)
    signed = Signed.from_json(json.loads(archive.unpack(data)[SIGNED]))
    edited = Signed(BUNDLE, signed.payload.replace(b'"version":6', b'"version":9'), signed.signatures)
    refused(repacked(data, manifest__signed__json=canonical(edited.as_json())), Untrusted, "untrusted.signature")


def test_refuses_when_file_is_extra(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    refused(repacked(make(MORE, version=6), extra__csv=b"p"), Untrusted, "untrusted.extra_file")


def test_refuses_when_file_is_missing(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    refused(repacked(make(MORE, version=6), policy__csv=None), Untrusted, "untrusted.missing_file")


def test_refuses_when_file_differs(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    refused(repacked(make(MORE, version=6), policy__csv=FEW.encode()), Untrusted, "untrusted.digest")


def _with_member(data: bytes, member: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """Return the archive with one more member, by the tar library and not by our packer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, body in archive.unpack(data).items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("name", ["../policy.csv", "/etc/policy.csv", "a/../../b", ".hidden", "A.csv", "a//b", "a\\b"])
def test_refuses_when_path_escapes(name: str, make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    refused(_with_member(make(MORE, version=6), tarfile.TarInfo(name), b"x"), Untrusted, "untrusted.member")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_refuses_when_member_is_no_regular_file(
    kind: bytes, make: Callable[..., bytes], refused: Callable[..., Refusal]
) -> None:
    member = tarfile.TarInfo("link")
    member.type, member.linkname = kind, "policy.csv"
    refused(_with_member(make(MORE, version=6), member), Untrusted, "untrusted.member")


def test_refuses_when_member_occurs_twice(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    twice = _with_member(make(MORE, version=6), tarfile.TarInfo("policy.csv"), FEW.encode())
    refused(twice, Untrusted, "untrusted.member")


def test_refuses_when_archive_is_not_canonical(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    data = make(MORE, version=6)
    for other in (data + b"\0" * 512, data[:-512], b"", b"PK\3\4", data[:700], b"\0" * (archive.MAX_ARCHIVE + 1)):
        refused(other, Malformed, "malformed.archive")


def test_refuses_when_algorithm_is_unknown(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    data = make(MORE, version=6)
    value = json.loads(archive.unpack(data)[SIGNED])
    value["signatures"].append({"key": "none", "sig": ""})
    refused(repacked(data, manifest__signed__json=json.dumps(value).encode()), Untrusted, "untrusted.algorithm")


def test_refuses_when_format_is_another(make: Callable[..., bytes], refused: Callable[..., Refusal],
                                        signers: Signers) -> None:
    data = make(MORE, version=6)
    body = Signed.from_json(json.loads(archive.unpack(data)[SIGNED])).body()
    other = sign(STOP, body, signers.ada, signers.ben)
    refused(repacked(data, manifest__signed__json=canonical(other.as_json())), Untrusted, "untrusted.format")
    refused(repacked(data, manifest__signed__json=b"[]"), Malformed, "malformed")
    refused(repacked(data, manifest__signed__json=b"{"), Malformed, "malformed.manifest")


def _resigned(data: bytes, signers: Signers, **changes: object) -> bytes:
    body = {**Signed.from_json(json.loads(archive.unpack(data)[SIGNED])).body(), **changes}
    signed = sign(BUNDLE, body, signers.ada, signers.ben)
    return repacked(data, manifest__signed__json=canonical(signed.as_json()))


def test_refuses_when_schema_or_engine_is_unknown(make: Callable[..., bytes], refused: Callable[..., Refusal],
                                                  signers: Signers) -> None:
    data = make(MORE, version=6)
    refused(_resigned(data, signers, schema="interlock/bundle/v9"), Malformed, "malformed.manifest")
    refused(_resigned(data, signers, unknown=1), Malformed, "malformed.manifest")
    refused(_resigned(data, signers, files=[]), Malformed, "malformed.manifest")
    refused(_resigned(data, signers, min_engine=2), Malformed, "malformed.min_engine")
    assert bundle.read(_resigned(data, signers), signers.pinned, None, now_us=NOW).version == 6


def test_refuses_when_expired(make: Callable[..., bytes], refused: Callable[..., Refusal]) -> None:
    data = make(MORE, version=6)
    refused(data, Untrusted, "untrusted.expired", now_us=NOW + 90 * DAY_US)


@pytest.mark.parametrize("version", [4, 5])
def test_refuses_when_version_does_not_rise(version: int, make: Callable[..., bytes],
                                            refused: Callable[..., Refusal]) -> None:
    refused(make(MORE, version=version), Conflict, "conflict.version")


def test_refuses_when_rules_do_not_parse(make: Callable[..., bytes], refused: Callable[..., Refusal],
                                         signers: Signers) -> None:
    data = make(MORE, version=6)
    bad = {"model.conf": MODEL, "policy.csv": b"P, researcher, same, */*, launch, none, -, deny\n"}
    digests = {n: digest_bytes(b) for n, b in bad.items()}
    resigned = repacked(_resigned(data, signers, files=digests), policy__csv=bad["policy.csv"])
    refused(resigned, Malformed, "malformed.rule_type")


# ---- one signer or two -----------------------------------------------------------------------------

def test_one_signer_changes_everyday_rules(make: Callable[..., bytes], signers: Signers, active: Bundle) -> None:
    found = bundle.read(make(MORE, version=6, by="ada"), signers.pinned, active, now_us=NOW)
    assert found.version == 6


@pytest.mark.parametrize("line", [
    "p, researcher, same, pool/*, launch, critical, mfa_bound+two_persons, allow",
    "p, safety_officer, *, */*, resume, none, -, allow",
    "p, auditor, *, */*, export_weights, none, -, allow",
    "p, auditor, *, */*, change_tier, none, -, allow",
    "p, auditor, *, */*, destroy_key, none, -, allow",
    "p, auditor, *, */*, change_trust, none, -, allow",
    "p, auditor, *, */*, publish_bundle, none, -, allow",
    "p, auditor, *, */*, *, none, -, deny",
    "p, auditor, *, */*, look, *, -, allow",
    "g, auditor, on_call",
])
def test_refuses_when_one_signer_changes_critical_rules(
    line: str, make: Callable[..., bytes], refused: Callable[..., Refusal], signers: Signers, active: Bundle
) -> None:
    policy = f"{FEW}{line}\n"
    refused(make(policy, version=6, by="ada"), Untrusted, "untrusted.threshold")
    assert bundle.read(make(policy, version=6), signers.pinned, active, now_us=NOW).version == 6


def test_refuses_when_one_signer_drops_a_critical_deny(make: Callable[..., bytes], signers: Signers,
                                                       load: Callable[..., Bundle]) -> None:
    before = load(FEW + "p, researcher, same, */*, launch, critical, -, deny\n", version=5)
    with pytest.raises(Untrusted, match="1 of 2"):
        bundle.read(make(FEW, version=6, by="ada"), signers.pinned, before, now_us=NOW)


def test_refuses_when_one_signer_changes_the_matcher(
    make: Callable[..., bytes], refused: Callable[..., Refusal]
) -> None:
    model = MODEL.replace(b"&& when(", b'&& r.obj != "pool/secret" && when(')
    refused(make(FEW, version=6, by="ada", model=model), Untrusted, "untrusted.threshold")


def test_refuses_when_first_bundle_has_one_signer(make: Callable[..., bytes], signers: Signers) -> None:
    with pytest.raises(Untrusted) as caught:
        bundle.read(make(FEW, by="ada"), signers.pinned, None, now_us=NOW)
    assert caught.value.code == "untrusted.threshold"
    assert caught.value.details == {"needed": 2, "given": 1}
    assert bundle.read(make(FEW), signers.pinned, None, now_us=NOW).version == 1
    assert bundle.read(make(FEW, by="ada"), signers.pinned, None, now_us=NOW, stored=True).version == 1


def test_refuses_when_one_person_signs_twice(make: Callable[..., bytes], signers: Signers) -> None:
    data = make(FEW, by="ada")
    with pytest.raises(Conflict):
        bundle.sign_archive(data, signers.ada)
    signed = Signed.from_json(json.loads(archive.unpack(data)[SIGNED]))
    doubled = Signed(BUNDLE, signed.payload, signed.signatures * 2)
    twice = repacked(data, manifest__signed__json=canonical(doubled.as_json()))
    with pytest.raises(Untrusted, match="1 of 2"):
        bundle.read(twice, signers.pinned, None, now_us=NOW)


def test_refuses_when_a_stranger_is_the_second_signer(make: Callable[..., bytes], signers: Signers) -> None:
    with pytest.raises(Untrusted, match="1 of 2"):
        bundle.read(make(FEW, by="ada mallory"), signers.pinned, None, now_us=NOW)


# ---- what authors do -------------------------------------------------------------------------------

def test_keygen_writes_a_private_and_a_public_half(tmp_path: Path) -> None:
    public = bundle.keygen(tmp_path / "ada.key", "ada")
    key = read_ed25519(tmp_path / "ada.key")
    assert public == {"name": "ada", "key": public_text(key.public_key())}
    assert json.loads((tmp_path / "ada.key.pub.json").read_bytes()) == public
    assert list(bundle.pinned([public])) == [key_id(key.public_key())]
    with pytest.raises(Conflict):
        bundle.keygen(tmp_path / "ada.key", "ada")
    with pytest.raises(Malformed):
        bundle.keygen(tmp_path / "x", "Not A Name")


def test_describe_says_what_an_archive_claims(make: Callable[..., bytes], signers: Signers, tmp_path: Path) -> None:
    assert bundle.describe(packed(FEW, tmp_path / "u"))["keys"] == []
    found = bundle.describe(make(FEW, version=3))
    assert found["manifest"]["version"] == 3
    assert set(found["keys"]) == set(signers.pinned)
    with pytest.raises(Malformed):
        bundle.describe(archive.pack({"a": b""}))


def test_refuses_when_source_is_unusable(tmp_path: Path, signers: Signers) -> None:
    with pytest.raises(Unavailable):
        bundle.pack(tmp_path)
    packed(FEW, tmp_path / "p")
    (tmp_path / "p" / "policy.csv").unlink()
    (tmp_path / "p" / "policy.csv").symlink_to("/etc/hostname")
    with pytest.raises(Unavailable):
        bundle.pack(tmp_path / "p")
    with pytest.raises(Malformed):
        bundle.pack(tmp_path / "p", life_days=0)
    with pytest.raises(Malformed):
        bundle.sign_archive(archive.pack({"a": b""}), signers.ada)


def test_expired_bundle_counts_as_absent(load: Callable[..., Bundle]) -> None:
    found = load(FEW)
    late = Engine(found, lambda: NOW + 90 * DAY_US)
    assert Engine(found, lambda: NOW).decide(call(), RESEARCHER).allowed
    assert late.decide(call(), RESEARCHER).code == "no_bundle"
    assert not late.decide(call(Action.LAUNCH, Tier.NONE), RESEARCHER).allowed
