"""A round leaves torch's threads asleep: a cast of a chunk that wakes all cores takes longer than the cast."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUND = """
import os, threading
import torch
from tests.averaging.swarm import run_round

def foreign_threads():
    tasks = {int(name) for name in os.listdir("/proc/self/task")}
    return len(tasks - {thread.native_id for thread in threading.enumerate()})

torch.set_num_threads(16)
before = foreign_threads()
for codec in ("float16", "bfloat16", "int8"):
    run_round(count=2, numel=600_000, codec=codec).assert_mean(atol=0.05)
after = foreign_threads()
torch.zeros(600_000).half()  # a cast at once, which does wake them
print(before, after, foreign_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by Linux's /proc")
def test_a_round_starts_none_of_torchs_threads() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-c", ROUND], check=False, env=variables, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    before, after, woken = map(int, result.stdout.split())
    assert after == before
    assert woken >= after + 15
