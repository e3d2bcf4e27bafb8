"""No socket but the listed ones in what a run sees."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from interlock.errors import LayerMissing
from sandbox import sockets
from sandbox.profile import Mount, Profile
from tests.sandbox.conftest import MakeProfile


@pytest.fixture
def tree_of_host(tmp_path: Path) -> Path:
    folder = Path(os.path.realpath(tmp_path)) / "usr"
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/link").symlink_to("/")
    return folder


def profile_with(make_profile: MakeProfile, folder: Path) -> Profile:
    mounts = (Mount("ro", str(folder), str(folder)),)
    return replace(make_profile(), mounts=mounts, sockets=(Mount("socket", "/run/x", "/run/interlock/broker.sock"),))


def test_a_socket_in_a_tree_of_the_host_is_found(tree_of_host: Path) -> None:
    assert sockets.below(str(tree_of_host)) == ""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree_of_host / "a/b/s"))
    assert sockets.below(str(tree_of_host)) == str(tree_of_host / "a/b/s")
    assert sockets.bound_below(str(tree_of_host)) == ""  # nobody is bound to it any more


def test_refuses_when_somebody_binds_after_the_walk(make_profile: MakeProfile, tree_of_host: Path) -> None:
    kept = tree_of_host.parent / "kept.json"
    profile = profile_with(make_profile, tree_of_host)
    sockets.refuse(profile, kept)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree_of_host / "a/b/s"))
        with pytest.raises(LayerMissing) as caught:
            sockets.refuse(profile, kept)
        assert caught.value.code == "layer_missing.source"
        assert str(tree_of_host / "a/b/s") in str(caught.value)


def test_the_walk_is_remembered_for_this_boot_and_this_tree_only(
    make_profile: MakeProfile, tree_of_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("what another program noted counts only when root wrote it")
    kept = tree_of_host.parent / "kept.json"
    profile = profile_with(make_profile, tree_of_host)
    walked: list[str] = []
    monkeypatch.setattr(sockets, "below", lambda folder: walked.append(folder) or "")

    def next_program() -> int:
        monkeypatch.setattr(sockets, "_clean", set())
        walked.clear()
        sockets.refuse(profile, kept)
        sockets.refuse(profile, kept)
        return len(walked)

    assert next_program() == 1
    assert next_program() == 0
    for spoil in (lambda: kept.chmod(0o666), lambda: kept.write_text("{"), lambda: kept.unlink(),
                  lambda: kept.write_text(json.dumps({**json.loads(kept.read_text()), "boot": "another"}))):
        spoil()
        assert next_program() == 1
        assert next_program() == 0
    tree_of_host.rename(tree_of_host.with_name("old"))
    tree_of_host.mkdir()
    assert next_program() == 1  # another folder lies there now
