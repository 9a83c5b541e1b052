"""Binder's environment is written by hand, for it needs torch without CUDA: it must not fall behind the package's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_ON_BINDER = {"pyngrok"}  # Binder lets nothing in, not even through a tunnel


def lines(name: str) -> set[str]:
    return set((ROOT / name).read_text().split("\n"))


def test_binder_installs_what_the_package_wants() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["train"], *extras["notebook"]}
    missing = {re.split(r"\W", wish)[0] for wish in wanted - lines("binder/requirements.txt")}
    assert missing == NOT_ON_BINDER | {"torch"}


def test_binder_has_the_torch_that_is_known_to_be_good() -> None:
    (pin,) = (line for line in lines("constraints.txt") if line.startswith("torch=="))
    assert f"{pin}+cpu" in lines("binder/requirements.txt")
