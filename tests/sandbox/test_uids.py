"""uids of runs: nobody else's, and one live run each."""

import subprocess
from pathlib import Path

import pytest

from interlock.errors import Conflict, LayerMissing
from sandbox import uids


@pytest.mark.parametrize(("first", "last", "passwd", "subuid"), [
    (60_100, 60_200, "x:x:60150:60150::/:/bin/sh\n", ""),
    (60_100, 60_200, "", "x:60199:65536\n"),
    (61_000, 61_200, "", ""),
    (0, 10, "", ""),
    (59_000, 59_001, "", ""),
    (60_200, 60_100, "", ""),
])
def test_refuses_when_the_range_belongs_to_somebody(
    tmp_path: Path, first: int, last: int, passwd: str, subuid: str
) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0::/:/bin/sh\n" + passwd)
    (tmp_path / "subuid").write_text(subuid)
    with pytest.raises(LayerMissing) as caught:
        uids.check_range(first, last, passwd=tmp_path / "passwd", subuid=tmp_path / "subuid")
    assert caught.value.code == "layer_missing.uid"
    (tmp_path / "subuid").write_text("x:100000:65536\n")
    (tmp_path / "passwd").write_text("root:x:0:0::/:/bin/sh\n")
    uids.check_range(60_100, 60_999, passwd=tmp_path / "passwd", subuid=tmp_path / "subuid")


def test_a_uid_is_given_to_one_run_at_a_time() -> None:
    pool = uids.Pool(60_590, 60_592)
    taken = {pool.take() for _ in range(3)}
    assert taken == {60_590, 60_591, 60_592}
    with pytest.raises(Conflict) as caught:
        pool.take()
    assert caught.value.code == "conflict.uid"
    pool.release(60_591)
    assert pool.take() == 60_591


@pytest.mark.root
def test_refuses_when_a_survivor_still_has_the_uid() -> None:
    process = subprocess.Popen(["/usr/bin/sleep", "30"], user=60_595)
    try:
        assert 60_595 in uids.in_use()
        assert uids.Pool(60_595, 60_596).take() == 60_596
    finally:
        process.kill()
        process.wait()
    assert 60_595 not in uids.in_use()
