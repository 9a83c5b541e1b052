"""Files that are written whole or not at all, and through no link."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from colab_swarm.files import write_file

PARTIAL = "save.partial"


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("name", ["save", PARTIAL])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_the_folder_leads_to_no_other_file(
    name: str, sync: bool, link: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    link(other, tmp_path / name)
    write_file(tmp_path / "save", [b"new ", b"contents"], sync=sync)
    assert other.read_text() == "years of work"
    assert (tmp_path / "save").read_bytes() == b"new contents" and not (tmp_path / "save").is_symlink()


def test_a_link_to_nothing_makes_no_file_there(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).symlink_to(tmp_path / "elsewhere")
    write_file(tmp_path / "save", [b"new"])
    assert {path.name for path in tmp_path.iterdir()} == {"save"}


def test_what_a_killed_process_left_is_replaced_and_no_longer_readable(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_bytes(b"x" * 1000)
    (tmp_path / PARTIAL).chmod(0o666)
    write_file(tmp_path / "save", [b"secret"], private=True)
    assert {path.name for path in tmp_path.iterdir()} == {"save"}
    assert (tmp_path / "save").read_bytes() == b"secret"
    assert not (tmp_path / "save").stat().st_mode & 0o077
