"""drop.py: a closed folder becomes reachable, only for what was named, and root is gone for good."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import drop
from sandbox.start import interpreter

DROP = Path(drop.__file__)
UID = 60_995
PREFIX = os.path.realpath(sys.base_prefix)
SHOW = (
    "import json,os,sys\nr={}\n"
    "for p in sys.argv[1:]:\n"
    "    try: r[p]=open(p).read() if os.path.isfile(p) else sorted(os.listdir(p))\n"
    "    except OSError as e: r[p]=e.errno\n"
    "s=dict(l.split(':\\t') for l in open('/proc/self/status').read().splitlines() if ':\\t' in l)\n"
    "r['uid']=os.getresuid(); r['groups']=os.getgroups(); r['caps']=s['CapEff']; r['nnp']=s['NoNewPrivs']\n"
    "print(json.dumps(r))"
)


def run(words: list[str], *argv: str, uid: int = UID) -> "subprocess.CompletedProcess[str]":
    head = [*interpreter(), str(DROP), "--uid", str(uid), "--gid", str(uid)]
    return subprocess.run([*head, *words, "--", *argv], capture_output=True, text=True, check=False)


def python() -> str:
    return os.path.realpath(sys.executable)


@pytest.fixture
def closed(runtime: Path) -> Path:
    """runtime is 0700; below it one folder to reach, one to write, one that nobody named."""
    runtime.chmod(0o700)
    for name in ("code", "state", "secret"):
        (runtime / name).mkdir(mode=0o755)
        (runtime / name / "file").write_text(name)
    os.chown(runtime / "state", UID, UID)
    return runtime


@pytest.mark.root
def test_a_closed_tree_becomes_reachable_and_nothing_else(closed: Path) -> None:
    asked = [str(closed / n / "file") for n in ("code", "state", "secret")]
    bare = run(["--reach", PREFIX], python(), "-I", "-S", "-c", SHOW, *asked)
    assert [json.loads(bare.stdout)[p] for p in asked] == [13, 13, 13], "the positive control: closed without"
    done = run(
        ["--reach", PREFIX, str(closed / "code"), "--write", str(closed / "state")],
        python(), "-I", "-S", "-c", SHOW, *asked, str(closed),
    )
    found = json.loads(done.stdout)
    assert [found[p] for p in asked] == ["code", "state", 2]
    assert found[str(closed)] == ["code", "state"]
    assert found["uid"] == [UID, UID, UID]
    assert found["groups"] == []
    assert found["caps"] == "0" * 16
    assert found["nnp"] == "1"
    assert os.stat(closed).st_mode & 0o777 == 0o700, "no mode was widened"
    assert sorted(os.listdir(closed)) == ["code", "secret", "state"]


@pytest.mark.root
def test_a_closed_umask_of_the_caller_closes_nothing(closed: Path) -> None:
    """The folders that are made on the way to a named path have to be passable whatever umask root has."""
    (closed / "deep/er").mkdir(parents=True, mode=0o755)
    (closed / "deep/er/file").write_text("deep")
    words = ["--reach", PREFIX, str(closed / "deep/er"), "--", python(), "-I", "-S", "-c", SHOW,
             str(closed / "deep/er/file")]
    done = subprocess.run([*interpreter(), str(DROP), "--uid", str(UID), "--gid", str(UID), *words],
                          capture_output=True, text=True, check=False, umask=0o077)
    assert json.loads(done.stdout)[str(closed / "deep/er/file")] == "deep", done.stderr


@pytest.mark.root
def test_refuses_when_a_named_folder_is_itself_closed(closed: Path) -> None:
    words = ["--reach", PREFIX, str(closed / "code")]
    assert run(words, "/usr/bin/true").returncode == 0
    (closed / "code").chmod(0o700)
    done = run(words, "/usr/bin/true")
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, error["code"]) == (70, "layer_missing.drop")
    assert str(closed / "code") in error["message"]
    assert "chmod" in error["next_step"]


@pytest.mark.root
def test_reach_is_read_only_and_write_is_not(closed: Path) -> None:
    os.chown(closed / "code", UID, UID)
    code = (
        "import sys\nfor p in sys.argv[1:]:\n    try: open(p, 'w'); print('wrote')\n"
        "    except OSError as e: print(e.errno)"
    )
    done = run(
        ["--reach", PREFIX, str(closed / "code"), "--write", str(closed / "state")],
        python(), "-I", "-S", "-c", code, str(closed / "code/new"), str(closed / "state/new"),
    )
    assert done.stdout.split() == ["30", "wrote"]


@pytest.mark.root
def test_descriptors_and_environment_go_on(runtime: Path) -> None:
    fd = os.memfd_create("x", 0)
    os.write(fd, b"handed on")
    os.lseek(fd, 0, 0)
    head = [*interpreter(), str(DROP), "--uid", str(UID), "--gid", str(UID), "--reach", PREFIX]
    code = f"import os; print(os.read({fd}, 99), os.environ['MINE'], os.getcwd())"
    done = subprocess.run(
        [*head, "--", python(), "-I", "-S", "-c", code], pass_fds=[fd], env={"MINE": "1"}, capture_output=True,
        text=True, check=True,
    )
    os.close(fd)
    assert done.stdout.strip() == "b'handed on' 1 /"


@pytest.mark.root
@pytest.mark.parametrize("words", [["--reach", "/no/such/place"], ["--reach", "relative"], ["x"]])
def test_refuses_when_a_path_is_not_there_or_not_plain(closed: Path, words: list[str]) -> None:
    words = [w.replace("/no/such", str(closed)) for w in words]
    done = run(words, "/usr/bin/true")
    assert done.returncode == 70
    assert json.loads(done.stderr)["error"]["code"] == "layer_missing.drop"
    assert run(["--reach", "/usr"], "/usr/bin/true").returncode == 0


@pytest.mark.root
def test_refuses_when_the_user_is_root() -> None:
    done = run(["--reach", "/usr"], "/usr/bin/true", uid=0)
    assert done.returncode == 70
    assert "root" in json.loads(done.stderr)["error"]["message"]


def test_barrier_is_the_topmost_closed_folder(tmp_path: Path) -> None:
    deep = tmp_path / "a/b/c"
    deep.mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    (tmp_path / "a/b").chmod(0o700)
    found = drop.barrier(str(deep), UID, UID)
    assert str(deep).startswith(found)
    assert found
    assert len(found) <= len(str(tmp_path / "a"))
    assert drop.barrier("/usr/bin", UID, UID) == ""
    owner = os.stat(tmp_path / "a").st_uid
    assert drop.passes(os.stat(tmp_path / "a"), owner, 1)
