"""Five processes with a folder, killed at random: nothing that a peer was told is lost or counted twice."""

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import colab_swarm as cs
from colab_swarm.mailbox.objects import PLACE, RoundManifest, content_digest, unseal
from colab_swarm.net.peers import PeerId

PEERS, KILLS, LAST, LIMIT_S = 4, 2, 14, 120.0
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


Contribution = tuple[PeerId, int]  # a member, and the round


def rounds_of(objects: Iterable[tuple[str, bytes]]) -> tuple[list[RoundManifest], set[Contribution]]:
    """Return the manifests in order, and all contributions; asserts that the rounds follow each other.

    Objects are in the order of their writing; each contribution is listed once at most.
    """
    manifests, digests, written = list[RoundManifest](), list[bytes](), set[Contribution]()
    for path, data in objects:
        if (place := PLACE.search(path)) is None:
            continue
        if place[2]:
            written.add((PeerId(bytes.fromhex(place[2])), int(place[1])))
        else:
            manifests.append(unseal(data, RoundManifest)[0])
            digests.append(content_digest(data))
    assert [one.round for one in manifests] == list(
        range(manifests[0].round, manifests[0].round + len(manifests))
    )
    assert [one.base for one in manifests[1:]] == digests[:-1]
    listed = [(entry.member, entry.round) for one in manifests for entry in one.entries]
    assert len(listed) == len(set(listed)) and set(listed) <= written
    return manifests, written - set(listed)


@pytest.mark.ordeal
def test_processes_that_are_killed_at_random_lose_nothing_and_stay_equal(tmp_path: Path) -> None:
    rng, logs = random.Random(0), list[Path]()
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
        for kill in range(KILLS):
            wanted, until = (kill + 1) * LAST // (KILLS + 2), time.monotonic() + LIMIT_S
            while max((one["step"] for one in told()), default=0) < wanted:
                assert time.monotonic() < until, told()[-5:]
                time.sleep(0.05)
            victim = rng.choice(processes)
            assert victim.poll() is None
            victim.kill()
            victim.wait()
            processes.remove(victim)
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
