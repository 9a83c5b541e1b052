"""Processes with a folder, of which one is killed: nothing that a peer was told is lost or counted twice."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from tests.mailbox.history import rounds_of

PEERS, LAST, LIMIT_S = 3, 10, 120.0
CHILD = """
import json, sys, torch, colab_swarm as cs
from tests.training.toy import join_training, loss_of, model, parameters_of
from colab_swarm.training.digests import digest_of_tensors

invitation, box, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
with cs.join(invitation, mailbox=box) as swarm:
    settings = {"target_batch_size": 500, "local_steps": 4, "compression": "sparseloco"}
    optimizer = join_training(swarm, net := model(), **settings)
    while optimizer.global_step < last:
        loss_of(net, optimizer.global_step).backward()
        result = optimizer.step(samples=10)
        if result is not None:
            told = {"round": result.step, "member": swarm.id.hex()}
            told |= {"counted": swarm.id in result.contributors, "step": optimizer.global_step}
            told |= {"digest": digest_of_tensors(net.parameters()).hex(), "lineage": optimizer.lineage.hex()}
            print(json.dumps(told), flush=True)
"""


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_process_that_is_killed_loses_nothing_and_all_stay_equal(tmp_path: Path) -> None:
    logs = list[Path]()
    box = f"file://{tmp_path}/box"
    with cs.create("killed", mailbox=box) as founder:
        invitation = str(founder.invite())

    def start() -> subprocess.Popen[bytes]:
        logs.append(log := tmp_path / f"{len(logs)}.jsonl")
        with log.open("wb") as output:
            command = [sys.executable, "-c", CHILD, invitation, box, str(LAST)]
            return subprocess.Popen(command, stdout=output, cwd=Path(__file__).parents[2])

    def told() -> list[dict[str, Any]]:
        lines = [line for log in logs for line in log.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    processes = [start() for _ in range(PEERS)]
    try:
        until = time.monotonic() + LIMIT_S
        while max((one["step"] for one in told()), default=0) < LAST // 3:
            assert time.monotonic() < until, told()[-5:]
            time.sleep(0.05)
        victim = processes.pop()
        assert victim.poll() is None
        victim.kill()
        victim.wait()
        processes.append(start())
        assert [process.wait(LIMIT_S) for process in processes] == [0] * PEERS
    finally:
        for process in processes:
            process.kill()
            process.wait()

    folder = next((tmp_path / "box" / "runs").glob("*/model"))
    objects = sorted(folder.glob("rounds/*/*"), key=lambda path: path.stat().st_mtime_ns)
    manifests, _ = rounds_of((str(path.relative_to(folder)), path.read_bytes()) for path in objects)
    listed = {(entry.member.hex(), one.round) for one in manifests for entry in one.entries}
    for one in told():
        assert (
            one["round"] < manifests[0].round or not one["counted"] or (one["member"], one["round"]) in listed
        )
    equal = defaultdict[int, set[tuple[str, str]]](set)
    for one in told():
        equal[one["step"]].add((one["digest"], one["lineage"]))
    assert len(equal) > LAST // 2 and all(len(found) == 1 for found in equal.values())
    assert sum(len(one.entries) for one in manifests) > 2 * len(manifests)
