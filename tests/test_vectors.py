"""Every format of interlock/signed.py against its vectors: one good value, one with exactly one fault."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import Refusal
from interlock.order import LaunchOrder, Lease, ResumeApproval, ResumeOrder, StopOrder
from interlock.permit import unseal
from interlock.signed import FORMATS, Signed, public_from_text, verify
from policy import bundle, snapshot
from tests.vectors import make

HERE = Path(make.__file__).parent
PARSERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "stop": StopOrder.from_json, "resume": ResumeOrder.from_json, "resume-approval": ResumeApproval.from_json,
    "break-glass": StopOrder.from_json, "grant": LaunchOrder.from_json, "lease": Lease.from_json,
}


def _vectors(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / f"{name}.json").read_text())
    return found


SIGNED = [(name, case) for name in make.signed_vectors() for case in _vectors(name)]


def _outcome(work: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "ok", work()
    except Refusal as refusal:
        return refusal.code, None


@pytest.mark.parametrize(("name", "case"), SIGNED, ids=[f"{n}: {c['name']}" for n, c in SIGNED])
def test_signed_value(name: str, case: dict[str, Any]) -> None:
    keys = {kid: public_from_text(text) for kid, text in case["keys"].items()}
    signed = Signed.from_json(case["signed"])
    code, body = _outcome(lambda: verify(signed, f"interlock/{name}/v1", keys, threshold=case["threshold"]))
    assert code == case["expect"]
    if code == "ok":
        assert body == case["body"]
        if name in PARSERS:
            assert PARSERS[name](body).as_json() == body


@pytest.mark.parametrize("case", _vectors("bundle"), ids=lambda c: c["name"])
def test_bundle(case: dict[str, Any]) -> None:
    keys = {kid: public_from_text(text) for kid, text in case["keys"].items()}
    data = base64.b64decode(case["archive"])
    code, found = _outcome(lambda: bundle.read(data, keys, None, now_us=case["now_us"]))
    assert code == case["expect"]
    if code == "ok":
        assert (found.version, found.digest) == (case["version"], case["digest"])


@pytest.mark.parametrize("case", _vectors("permit"), ids=lambda c: c["name"])
def test_permit_seal(case: dict[str, Any]) -> None:
    code, permit = _outcome(lambda: unseal(case["seal"], bytes.fromhex(case["key"])))
    assert code == case["expect"]
    if code == "ok":
        assert {k: getattr(permit, k) for k in case["permit"]} == case["permit"]


def test_snapshot_vector_is_a_snapshot() -> None:
    good = _vectors("snapshot")[0]
    keys = {kid: public_from_text(text) for kid, text in good["keys"].items()}
    found = snapshot.verify(Signed.from_json(good["signed"]), keys, good["body"]["nonce"])
    assert found.roles_of("per_1", "demo") == {"researcher"}


def test_files_are_what_the_code_makes() -> None:
    for name, text in make.build().items():
        assert (HERE / name).read_text() == text, f"{name}: run python -m tests.vectors.make and look at the difference"


def test_every_format_that_travels_has_a_good_and_a_bad_vector() -> None:
    by_certificate = {"interlock/marks/v1"}  # signed by a node's ECDSA key, tested where it is verified
    assert {f"interlock/{n}/v1" for n in [*make.signed_vectors(), "bundle"]} == FORMATS - by_certificate
    for name in [*make.signed_vectors(), "bundle", "permit"]:
        expects = [c["expect"] for c in _vectors(name)]
        assert expects[0] == "ok"
        assert "ok" not in expects[1:]
        assert len(expects) > 1
