"""Files that outlive a crash whole: what is in the folder after each failure."""

import os
from pathlib import Path

import pytest

from interlock.durable import write_new, write_over


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_new_file_is_made_once_and_private(tmp_path: Path) -> None:
    write_new(tmp_path / "a", b"one")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert _names(tmp_path) == ["a"]


def test_a_dangling_link_counts_as_taken(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"one")
    assert not (tmp_path / "elsewhere").exists()


def test_an_older_file_is_replaced_whole(tmp_path: Path) -> None:
    write_over(tmp_path / "a", b"one", 0o644)
    write_over(tmp_path / "a", b"two", 0o644)
    assert (tmp_path / "a").read_bytes() == b"two"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
    assert _names(tmp_path) == ["a"]


@pytest.mark.parametrize("write", [write_new, write_over])
def test_nothing_half_written_keeps_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object) -> None:
    """A disk that fills up in the middle leaves no key of ten bytes and no torn entry of the order log."""
    assert callable(write)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path / "a", b"one")
    assert _names(tmp_path) == []
    write(tmp_path / "a", b"one")
    assert _names(tmp_path) == ["a"]


@pytest.mark.parametrize("write", [write_new, write_over])
def test_the_bytes_are_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object) -> None:
    assert callable(write)
    seen: list[bool] = []
    real = os.fsync

    def spy(fd: int) -> None:
        seen.append((tmp_path / "a").exists())
        real(fd)

    monkeypatch.setattr(os, "fsync", spy)
    write(tmp_path / "a", b"one")
    assert seen == [False, True], "the file before it has its name, the folder after"
