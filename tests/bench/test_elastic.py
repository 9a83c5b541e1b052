from __future__ import annotations

import json
import subprocess
import sys

import pytest

from colab_swarm.bench import elastic_consistency as elastic
from colab_swarm.bench import slow_link
from colab_swarm.bench.elastic_consistency import OTHERS, WAYS, add_speed
from colab_swarm.bench.harness import BenchReport
from colab_swarm.bench.slow_link import ADDRESSES, SlowLink

needs_root = pytest.mark.skipif(slow_link.missing() is not None, reason=str(slow_link.missing()))
ECHO = "import socket; s = socket.create_server(('{}', 7)); print(flush=True); c, _ = s.accept(); c.sendall(c.recv(1))"
CLIENT = """
import json, socket, time
began = time.monotonic()
with socket.create_connection(('{}', 7), 10) as link:
    connected = time.monotonic()
    link.sendall(b'x'), link.recv(1)
print(json.dumps([connected - began, time.monotonic() - connected]))
"""


@needs_root
@pytest.mark.slow
def test_a_round_trip_over_a_slow_link_takes_twice_its_delay() -> None:
    with SlowLink(delay_s=0.1, jitter_s=0.01) as link:
        words = map(str, link.command(0, sys.executable, "-c", ECHO.format(ADDRESSES[0])))
        with subprocess.Popen(list(words), stdout=subprocess.PIPE, text=True) as echo:
            assert echo.stdout is not None and echo.stdout.readline()
            words = map(str, link.command(1, sys.executable, "-c", CLIENT.format(ADDRESSES[0])))
            client = subprocess.run(list(words), capture_output=True, text=True, check=True)
    assert all(0.18 <= took_s < 1.0 for took_s in json.loads(client.stdout))


@needs_root
@pytest.mark.slow
@pytest.mark.ordeal
def test_steps_of_every_scheduler_and_of_ddp_are_timed() -> None:
    report = BenchReport("elastic", True)
    add_speed(report, seeds=1, steps=35)
    found = report.figures
    assert all(found[f"step_ms_{way}"] > 0 for way in (*OTHERS, *WAYS))
    assert found["step_ms_synchronous"] > 1e3 * elastic.DELAY_S
    keys = ("step_time_vs_synchronous", "synchronous_vs_ddp", "speed_accuracy_drop", "communication_share")
    assert all(key in found for key in keys)


def test_without_root_a_row_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "missing", lambda: "needs Linux and root")
    report = BenchReport("elastic", True)
    add_speed(report, seeds=1, steps=35)
    assert [row.key for row in report.rows] == ["elastic.speed_measured"]
    assert "needs Linux and root" in report.rows[0].note
