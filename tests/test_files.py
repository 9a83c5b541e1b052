"""Files that are written whole or not at all, and through no link."""

import os
from pathlib import Path

import pytest

from colab_swarm.files import write_file

PARTIAL = "save.partial"


def write(folder: Path, *, sync: bool = False) -> None:
    write_file(folder / "save", [b"new ", b"contents"], sync=sync)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("name", ["save", PARTIAL])
def test_a_link_in_the_folder_leads_to_no_other_file(name: str, sync: bool, tmp_path: Path) -> None:
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    (tmp_path / name).symlink_to(other)
    write(tmp_path, sync=sync)
    assert other.read_text() == "years of work"
    assert (tmp_path / "save").read_bytes() == b"new contents" and not (tmp_path / "save").is_symlink()


def test_a_second_name_of_another_file_leads_to_it_neither(tmp_path: Path) -> None:
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    os.link(other, tmp_path / PARTIAL)
    write(tmp_path)
    assert other.read_text() == "years of work"


def test_a_link_to_nothing_makes_no_file_there(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).symlink_to(tmp_path / "elsewhere")
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"save"}


def test_what_a_killed_process_left_is_replaced_and_no_longer_readable(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_bytes(b"x" * 1000)
    (tmp_path / PARTIAL).chmod(0o666)
    write_file(tmp_path / "save", [b"secret"], private=True)
    assert {path.name for path in tmp_path.iterdir()} == {"save"}
    assert (tmp_path / "save").read_bytes() == b"secret"
    assert not (tmp_path / "save").stat().st_mode & 0o077
