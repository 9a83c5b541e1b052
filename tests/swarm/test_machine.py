"""The probes of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from colab_swarm.notebook.checks import numbers
from colab_swarm.swarm.doctor import HOSTS, cores, free_ram_bytes, gpu, internet, versions, wanted


def test_this_machine_has_cores_and_the_needed_versions() -> None:
    assert cores() > 0 and (gpu() is None or len(gpu() or ()) == 3)
    found = versions()
    assert found["colab-swarm"][0] and found["cryptography"][1]
    assert all(numbers(installed) >= numbers(lowest) for installed, lowest in found.values() if installed)


def test_free_memory_is_limited_by_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert free_ram_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.current").write_text("1024000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_ram_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("2048000\n")
    assert free_ram_bytes(meminfo, tmp_path) == 1024000


def test_unreported_memory_is_none(tmp_path: Path) -> None:
    assert free_ram_bytes(tmp_path / "nothing", tmp_path) is None


def test_the_lowest_versions_come_from_the_requirements() -> None:
    lines = ["aiohttp>=3.13", 'torch<3,>=2.9; extra == "train"', "colab-swarm[train]; extra == 'all'"]
    assert wanted(lines) == {"aiohttp": "3.13", "torch": "2.9"}


@pytest.mark.parametrize("up", [0, 1, None])
def test_one_answering_host_means_internet(up: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(host: tuple[str, int], timeout_s: float) -> socket.socket:
        if up is None or host != HOSTS[up]:
            raise OSError("no route")
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    assert internet() is (up is not None)


def test_the_probes_work_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from colab_swarm.swarm import doctor; doctor.gpu()"
    subprocess.run([sys.executable, "-c", code], check=True)
