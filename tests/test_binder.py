"""Binder's environment is written by hand, for it needs torch without CUDA: it must not fall behind the package's."""

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_ON_BINDER = {"pyngrok", "iroh"}  # Binder lets nothing in, not even through a tunnel
MEMORY_BYTES = 2e9
"""What Binder gives a session, its Jupyter server included."""
SERVER_BYTES = 0.2e9
LESSON = "tutorials/01_first_swarm.ipynb"


def lines(name: str) -> set[str]:
    return set((ROOT / name).read_text().split("\n"))


def test_binder_installs_what_the_package_wants() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["train"], *extras["notebook"]}
    missing = {re.split(r"\W", line)[0] for line in wanted - lines("binder/requirements.txt")}
    assert missing == NOT_ON_BINDER | {"torch"}


def test_binder_has_the_torch_that_is_known_to_be_good() -> None:
    (pin,) = (line for line in lines("constraints.txt") if line.startswith("torch=="))
    assert f"{pin}+cpu" in lines("binder/requirements.txt")


@pytest.mark.slow
def test_what_is_known_to_be_good_satisfies_binders_wishes() -> None:
    """Nothing but torch, which may be another build here, would be installed again."""
    wishes = ["-r", "binder/requirements.txt", "-c", "constraints.txt"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", *wishes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not re.findall(r"Would install (?!torch-)", done.stdout), done.stdout


def peak_bytes(command: list[str], **environment: str) -> float:
    """Run a command to its success; the most memory that it and its children had at a time."""
    import psutil

    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
    peak = 0.0
    while process.poll() is None:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        held = 0.0
        for member in family:
            try:
                held += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, held)
        time.sleep(0.1)
    assert process.returncode == 0, f"{command} failed"
    return peak


@pytest.mark.slow
@pytest.mark.skipif("COLAB_SWARM_BUILD_BINDER" not in os.environ, reason="takes minutes: make binder")
def test_the_first_lesson_runs_in_an_environment_made_as_binder_makes_it(tmp_path: Path) -> None:
    binaries = tmp_path / "binder" / "bin"
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([sys.executable, "-m", "venv", binaries.parent], check=True)
    wanted = ["nbclient", "ipykernel", "-r", "binder/requirements.txt"]
    subprocess.run([binaries / "pip", "install", "-q", *wanted], cwd=ROOT, check=True)
    prepared = peak_bytes(["bash", "binder/postBuild"], PATH=path)
    execute = [str(binaries / "jupyter"), "execute", f"--output={tmp_path / 'read.ipynb'}", LESSON]
    read = peak_bytes(execute, PATH=path)
    print(f"postBuild took {prepared / 1e9:.2f} GB of memory, {LESSON} {read / 1e9:.2f} GB")
    assert read + SERVER_BYTES < MEMORY_BYTES
