import subprocess
import sys

import pytest

from colab_swarm.experiments.report import Report
from tests.benchmarks import elastic
from tests.benchmarks.elastic import ADDRESSES, add_speed
from tests.benchmarks.harness import Crew

needs_root = pytest.mark.skipif(elastic.missing() is not None, reason=str(elastic.missing()))
LISTEN = "import socket; s = socket.create_server(('{}', 7)); print(flush=True); input()"
DIAL = """
import socket, time
began = time.monotonic()
socket.create_connection(('{}', 7), 10)
print(time.monotonic() - began)
"""


@needs_root
@pytest.mark.slow
def test_a_round_trip_over_a_slow_link_takes_twice_its_delay() -> None:
    with elastic.slow_link(delay_s=0.1, jitter_s=0.01) as command, Crew() as crew:
        crew.start(command(0, sys.executable, "-c", LISTEN.format(ADDRESSES[0])))
        assert crew[0].process.stdout is not None and crew[0].process.stdout.readline()
        words = map(str, command(1, sys.executable, "-c", DIAL.format(ADDRESSES[0])))
        client = subprocess.run(list(words), capture_output=True, text=True, check=True)
    assert 0.18 <= float(client.stdout) < 1.0


@needs_root
@pytest.mark.slow
@pytest.mark.ordeal
def test_steps_of_every_scheduler_and_of_ddp_are_timed() -> None:
    report = Report("elastic", True)
    add_speed(report, seeds=1, steps=35)
    found = report.figures
    assert all(found[f"step_ms_{way}"] > 0 for way in ("ddp", *elastic.WAYS))
    assert found["step_ms_synchronous"] > 1e3 * elastic.DELAY_S
    assert found.keys() >= {"step_time_vs_synchronous", "synchronous_vs_ddp", "speed_accuracy_drop"}


def test_without_root_a_row_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "missing", lambda: "needs Linux and root")
    report = Report("elastic", True)
    add_speed(report, seeds=1, steps=35)
    assert [row.key for row in report.rows] == ["elastic.speed_measured"]
    assert "needs Linux and root" in report.rows[0].note
