"""The command line: what a person types, and what it answers."""

import json
import signal
import subprocess
import sys

import pytest
import torch

import colab_swarm as cs
from colab_swarm.project import install

COMMAND = [sys.executable, "-m", "colab_swarm.cli"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_a_mistyped_invitation_ends_with_one_sentence() -> None:
    done = run("peer", "swarm://test-run#AZnonsense")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "mistyped or cut off" in done.stderr


def test_the_demo_without_torch_ends_with_one_sentence() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from colab_swarm.cli.__main__ import main; main(['demo'])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"colab-swarm: the demo needs torch: {install('train')}\n"


def test_a_backbone_prints_an_invitation_and_ctrl_c_ends_it() -> None:
    """And it warns of one that only its own network can use."""
    command = [*COMMAND, "backbone", "run", "--json-lines", "--no-lan", "--announce", "ws://192.168.1.5:4500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        told, warned = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130 and process.stderr.read() == ""
    assert told["event"] == "invite" and told["invite"].startswith("swarm://run.")
    assert warned["event"] == "warning" and "same local network" in warned["warning"]


@pytest.mark.slow
def test_a_host_of_experts_is_there_until_ctrl_c() -> None:
    with cs.create("cli-experts", options=cs.NetworkOptions(lan=False)) as swarm:
        arguments = ["experts", str(swarm.invite()), "ffn", "--grid", "2x2", "--dim", "8", "--count", "3"]
        command = [*COMMAND, *arguments, "--no-lan", "--json-lines"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            told = json.loads(process.stdout.readline())
            layer = swarm.mixture_of_experts("ffn", 8, grid=(2, 2))
            layer(torch.ones(4, 8)).sum().backward()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130 and process.stderr.read() == ""
    assert told["event"] == "hosting" and set(layer.utilisation) == set(told["hosting"].split())


@pytest.mark.slow
@pytest.mark.ordeal
def test_the_demo_trains_while_one_peer_is_killed_and_another_joins() -> None:
    done = run("demo", "--steps", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "carol is killed, dave joins" in done.stdout and "carol  ended" in done.stdout
    assert "equal parameters on alice, bob, dave" in done.stdout
