"""The survey of a host, and that a missing layer closes the tiers that need it."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from interlock.errors import LayerMissing
from sandbox import layers
from sandbox.layers import Layer
from sandbox.profile import STANDARD, STRICT

from .conftest import MakeProfile

NAMES = ["bwrap", "user_namespaces", "apparmor_userns", "seccomp", "landlock", "cgroup", "cgroup_kill", "uid", "swap"]


def test_the_survey_names_each_layer_with_a_way_to_get_it() -> None:
    found = layers.survey()
    assert [x.name for x in found] == NAMES
    assert all(x.how for x in found)
    assert set(found[0].as_json()) == {"name", "present", "detail", "how_to_get"}


@pytest.mark.parametrize("name", NAMES[:-1])
def test_refuses_when_a_layer_is_missing_and_names_it(make_profile: MakeProfile, name: str) -> None:
    complete = [Layer(n, True, "", "how", needed=n != "swap") for n in NAMES]
    lacking = [replace(x, present=x.name != name) for x in complete]
    assert layers.tiers(complete) == ["none", "high", "critical"]
    layers.require(make_profile(), complete)
    assert layers.tiers(lacking) == []
    with pytest.raises(LayerMissing) as caught:
        layers.require(make_profile(), lacking)
    assert caught.value.code == f"layer_missing.{name}"
    assert caught.value.next_step == "how"


def test_refuses_when_swap_is_on_for_strict_only() -> None:
    lacking = [Layer(n, n != "swap", "", "how", needed=n != "swap") for n in NAMES]
    assert layers.tiers(lacking) == ["none"]
    assert layers.shape_missing(STANDARD, lacking) == []
    assert [x.name for x in layers.shape_missing(STRICT, lacking)] == ["swap"]


@pytest.mark.parametrize(("restricted", "profiles", "present"), [
    ("1", "", False), ("1", "interlock-bwrap (unconfined)", True), ("0", "", True), ("", "", True),
])
def test_apparmor_is_a_layer_only_where_it_restricts(
    monkeypatch: pytest.MonkeyPatch, restricted: str, profiles: str, present: bool
) -> None:
    monkeypatch.setattr(layers, "_text", lambda path: profiles if path.endswith("profiles") else restricted)
    assert layers._apparmor().present is present


def test_the_host_shows_runs_usr_the_interpreter_and_no_state() -> None:
    host = layers.this_host()
    shown = [m.target for m in host.system]
    assert "/usr" in shown
    assert not {"/etc", "/var", "/run", "/home", "/root"} & set(shown)
    assert Path(host.python).exists()
    assert (Path(host.init) / "init.py").exists()
    assert (Path(host.guest) / "leash.py").parent.name == "interlock"


@pytest.mark.root
def test_looks_at_the_same_time_do_not_disturb_each_other() -> None:
    missing: list[str] = []

    def look() -> None:
        for _ in range(60):
            missing.extend(x.name for x in layers._cgroups() if not x.present)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missing == []


def test_refuses_when_the_kernel_makes_no_user_namespace_though_its_settings_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a chroot the settings read well and the kernel refuses: found by trying, not by reading."""
    refusing = tmp_path / "kernel-says-no"
    refusing.write_text("#!/bin/sh\nexit 1\n")
    refusing.chmod(0o755)
    try:
        for interpreter, present in ((str(refusing), False), (layers.sys.executable, True)):
            layers._one_was_made.cache_clear()
            monkeypatch.setattr(layers.sys, "executable", interpreter)
            found = next(x for x in layers.survey() if x.name == "user_namespaces")
            assert found.present is present
            assert bool(layers.tiers([found])) is present
    finally:
        monkeypatch.undo()
        layers._one_was_made.cache_clear()
