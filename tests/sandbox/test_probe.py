"""The built-in probes: all blocked in every shape, each proven able to succeed, and a hole refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from interlock.errors import LayerMissing
from interlock.tier import Tier
from sandbox import probe, seccomp
from sandbox.cgroup import Tree
from sandbox.probe import ProbeReport, ProbeResult
from sandbox.probes import PROBES
from sandbox.syscalls import SETS

from .conftest import MakeProfile


@pytest.mark.parametrize(("output", "verdict"), [
    (b"BLOCKED 13\n", "BLOCKED"), (b"noise\nESCAPED\nBLOCKED 1\n", "ESCAPED"), (b"INVALID TypeError x\n", "INVALID"),
    (b"", "INCONCLUSIVE"), (b"NOT BLOCKED\n", "INCONCLUSIVE"), (b"BLOCKEDX\n", "INCONCLUSIVE"),
])
def test_the_first_verdict_word_at_the_start_of_a_line_counts(output: bytes, verdict: str) -> None:
    assert probe.judge(output)[0] == verdict


def report(make_profile: MakeProfile, **changes: str) -> tuple[ProbeReport, object]:
    profile = make_profile()
    results = tuple(ProbeResult(p.id, changes.get(p.id.replace("-", "_"), "BLOCKED")) for p in PROBES)
    return ProbeReport(profile.probed_as(), "strict", probe.boot_id(), results), profile


@pytest.mark.parametrize("verdict", ["ESCAPED", "INVALID", "INCONCLUSIVE"])
def test_refuses_when_one_probe_is_not_blocked(make_profile: MakeProfile, verdict: str) -> None:
    good, profile = report(make_profile)
    probe.require(good, profile)  # type: ignore[arg-type]
    bad, profile = report(make_profile, clone3=verdict)
    with pytest.raises(LayerMissing) as caught:
        probe.require(bad, profile)  # type: ignore[arg-type]
    assert caught.value.code == "layer_missing.probe"
    assert caught.value.details == {"failed": ["clone3"]}


def test_refuses_when_the_report_is_of_another_boot_profile_or_part(make_profile: MakeProfile) -> None:
    good, profile = report(make_profile)
    probe.require(good, profile)  # type: ignore[arg-type]
    for wrong in (
        replace(good, boot_id="x"), replace(good, profile="x"), replace(good, results=good.results[1:]),
        replace(good, results=()),
    ):
        with pytest.raises(LayerMissing):
            probe.require(wrong, profile)  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_written_or_read_costs_nothing_but_time(tmp_path: Path) -> None:
    report = probe.ProbeReport("sha256:0", "standard", probe.boot_id(), (probe.ProbeResult("ptrace", "BLOCKED"),))
    probe._to_file(tmp_path / "nowhere" / "probes.json", report)
    cache = tmp_path / "probes.json"
    for odd in ("[]", "{", "7"):
        cache.write_text(odd)
        probe._to_file(cache, report)
        assert probe._from_file(cache, (report.profile, report.boot_id)) == report
    assert [p.name for p in tmp_path.iterdir()] == ["probes.json"]


@pytest.mark.root
@pytest.mark.parametrize("tier", [Tier.NONE, Tier.CRITICAL])
def test_all_probes_are_blocked(make_profile: MakeProfile, tree: Tree, runtime: Path, tier: Tier) -> None:
    profile, cache = make_profile(tier), runtime / "probes.json"
    found = probe.run_all(profile, tree, runtime, cache=cache, fresh=True)
    assert found.failed == ()
    assert len(found.results) == len(PROBES) >= 15
    probe.require(found, profile)
    probe._CACHE.clear()
    assert probe.run_all(profile, tree, runtime, cache=cache) == found, "from the file"
    value = json.loads(cache.read_text())
    value[profile.probed_as()]["boot_id"] = "another"
    cache.write_text(json.dumps(value))
    assert probe._from_file(cache, (profile.probed_as(), probe.boot_id())) is None


@pytest.mark.root
@pytest.mark.parametrize("one", PROBES, ids=lambda p: p.id)
def test_each_probe_escapes_without_the_layer_it_names(
    make_profile: MakeProfile, tree: Tree, runtime: Path, one: probe.Probe
) -> None:
    assert probe.control(make_profile(), one, tree, runtime).verdict == "ESCAPED"


@pytest.mark.root
def test_a_hole_in_the_filter_is_found_by_its_probe(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holed = tuple(n for n in SETS["strict"] if n != "keyctl")
    monkeypatch.setitem(seccomp.SETS, "strict", holed)
    keyring = next(p for p in PROBES if p.id == "keyring")
    assert probe.run_one(make_profile(), keyring, tree, runtime).verdict == "ESCAPED"
