"""Profiles as data: ceilings, paths, digests, and the golden command line of bubblewrap."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from interlock.errors import Denied, Malformed
from interlock.order import Dataset, Plan
from interlock.tier import Tier
from sandbox import bwrap
from sandbox.profile import HIDDEN, PROTECTED, STANDARD, STRICT, Host, Mount, for_plan, shape_for

GOLDEN = Path(__file__).with_name("golden")
HOST = Host(
    (Mount("ro", "/usr", "/usr"), Mount("symlink", "usr/bin", "/bin"), Mount("symlink", "usr/lib", "/lib")),
    "/opt/python", "/opt/python/bin/python3.11", "/srv/interlock/sandbox", "/srv/interlock/interlock",
)


def plan(tier: Tier = Tier.CRITICAL, **fields: object) -> Plan:
    return Plan(("python3", "train.py"), tier, "lab", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "tier", "fields", "extra"),
    [
        ("standard", Tier.NONE, {}, {}),
        ("strict", Tier.CRITICAL, {"datasets": (Dataset("docs", "/srv/docs"),)}, {"code": "/srv/code"}),
        ("strict-guest", Tier.HIGH, {"guest": True}, {"broker": "/srv/run/broker.sock"}),
    ],
)
def test_argv_is_the_golden_one(name: str, tier: Tier, fields: dict[str, object], extra: dict[str, str]) -> None:
    profile = for_plan(plan(tier, **fields), 60_100, HOST, **extra)  # type: ignore[arg-type]
    found = bwrap.argv(profile, bwrap.Descriptors(10, 11, 12))
    file = GOLDEN / f"{name}.json"
    assert found == json.loads(file.read_text()), f"write it anew only on purpose: {json.dumps(found)}"
    assert bwrap.argv(profile, bwrap.Descriptors(10, 11, 12)) == found


@pytest.mark.parametrize(
    "words",
    [["--unshare-all"], ["--unshare-user"], ["--disable-userns"], ["--cap-drop", "ALL"], ["--new-session"],
     ["--as-pid-1"], ["--clearenv"], ["--remount-ro", "/"], ["--remount-ro", "/dev"],
     ["--ro-bind", "/proc/sys", "/proc/sys"], ["--seccomp", "10"]],
)
def test_every_profile_has_each_layer_in_its_argv(words: list[str]) -> None:
    for tier in Tier:
        found = bwrap.argv(for_plan(plan(tier), 60_100, HOST), bwrap.Descriptors(10, 11, 12))
        assert any(found[i : i + len(words)] == words for i in range(len(found)))


def test_protected_names_are_masked_after_the_workspace_is_bound() -> None:
    found = bwrap.argv(for_plan(plan(), 60_100, HOST), bwrap.Descriptors(10, 11, 12))
    work = found.index("/work", found.index(bwrap.disk("work")))
    for name in PROTECTED:
        assert found.index(f"/work/{name}") > work


def test_refuses_when_the_shape_is_weaker_than_the_tier() -> None:
    for tier in (Tier.HIGH, Tier.CRITICAL):
        with pytest.raises(Denied) as caught:
            for_plan(plan(tier), 60_100, HOST, shape="standard")
        assert caught.value.code == "denied.profile"
        assert for_plan(plan(tier), 60_100, HOST).shape is STRICT
    assert for_plan(plan(Tier.NONE), 60_100, HOST).shape is STANDARD
    assert for_plan(plan(Tier.NONE), 60_100, HOST, shape="strict").shape is STRICT
    with pytest.raises(Malformed):
        shape_for(Tier.NONE, "none")


def test_refuses_when_the_plan_is_above_the_ceiling_and_does_not_trim() -> None:
    with pytest.raises(Denied, match="pids") as caught:
        for_plan(plan(pids=2049), 60_100, HOST)
    assert caught.value.details == {"limit": 2048, "asked": 2049}
    assert for_plan(plan(pids=2048), 60_100, HOST).bounds.pids == 2048


def test_refuses_when_the_uid_is_root_or_a_persons() -> None:
    for uid in (0, 1000, 59_999):
        with pytest.raises(Denied) as caught:
            for_plan(plan(), uid, HOST)
        assert caught.value.code == "denied.uid"
    assert for_plan(plan(), 60_000, HOST).uid == 60_000


@pytest.mark.parametrize("path", ["/", "/var", *HIDDEN, "/proc/1", "/etc/shadow", "/srv/state/x", "/srv/state", "/srv"])
def test_refuses_when_a_dataset_shows_a_protected_path(path: str) -> None:
    for spelled in (path, path + "/", path + "/."):
        with pytest.raises(Denied) as caught:
            for_plan(plan(datasets=(Dataset("d", spelled),)), 60_100, HOST, hidden=("/srv/state",))
        assert caught.value.code == "denied.path"
    fine = for_plan(plan(datasets=(Dataset("d", "/usr/share/doc"),)), 60_100, HOST, hidden=("/srv/state",))
    assert Mount("ro", "/usr/share/doc", "/data/d") in fine.mounts


def test_refuses_when_a_broker_socket_and_the_plan_disagree() -> None:
    with pytest.raises(Malformed):
        for_plan(plan(guest=True), 60_100, HOST)
    with pytest.raises(Malformed):
        for_plan(plan(), 60_100, HOST, broker="/srv/x.sock")


def test_the_environment_of_ours_cannot_be_replaced() -> None:
    profile = for_plan(plan(), 60_100, HOST, env=[("PYTHONPATH", "/evil"), ("MORE", "1")])
    env = dict(profile.env)
    assert env["PYTHONPATH"] == "/opt/interlock-guest"
    assert env["MORE"] == "1"


def test_every_field_of_a_profile_is_in_its_digest() -> None:
    profile = for_plan(plan(), 60_100, HOST)
    changed = [
        replace(profile, uid=60_101), replace(profile, shape=STANDARD), replace(profile, env=()),
        replace(profile, mounts=()), replace(profile, bounds=replace(profile.bounds, pids=1)),
        replace(profile, ranks=2), replace(profile, cwd="/tmp"), replace(profile, python="/x"),
    ]
    assert len({p.digest() for p in [profile, *changed]}) == len(changed) + 1
    assert profile.probed_as() == replace(profile, uid=60_101).probed_as() != replace(profile, ranks=2).probed_as()
