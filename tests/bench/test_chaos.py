"""Chaos end to end: the same script on simulated peers and on processes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.bench import chaos as module
from colab_swarm.bench.chaos import chaos
from colab_swarm.cli.__main__ import main
from colab_swarm.sim.chaos import read_script
from colab_swarm.swarm.swarm import Swarm

PEERS = ("alice", "bob", "carol")
SCRIPT = "0 kill bob 10\nstep20 freeze alice 8\nstep25 cut carol 6\nstep26 slow bob 5\n"


@pytest.mark.slow
def test_training_goes_on_under_a_script_of_faults_in_virtual_time() -> None:
    told: list[str] = []
    limits: dict[str, Any] = {"minutes": 1.5, "baseline_s": 15.0, "simulated": True, "tell": told.append}
    found = chaos(PEERS, read_script(SCRIPT, PEERS), **limits)
    assert [line.split("  ")[-1] for line in told if "end of" not in line] == [
        "kill bob",
        "freeze alice",
        "cut carol",
        "slow bob",
    ]
    assert (
        len(told) == 2 * found["faults"] == 8
        and int(next(line for line in told if "freeze" in line).split()[3]) >= 20
    )
    assert found["steps"] > 20 and not found["forks that lasted"] and not found["exceptions in a loop"]
    assert (found["restarts that trained again"], found["restarts that did not"]) == (1, 0)


def test_an_exception_in_a_simulated_loop_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, first = module.train, dict[str, int]()

    def broken(swarm: Swarm, peers: int, on_step: Callable[..., object], pause: Callable[[], object]) -> None:
        def step(**taken: Any) -> None:
            on_step(**taken)
            first.setdefault(swarm.name, taken["step"])
            if swarm.name == "bob" and len(first) == 3 and taken["step"] > max(first.values()) + 1:
                raise ValueError("planted")

        trained(swarm, peers, step, pause)

    monkeypatch.setattr(module, "train", broken)
    found = chaos(PEERS, (), minutes=0.5, baseline_s=5.0, simulated=True)
    assert found["exceptions in a loop"] == ["bob: ValueError('planted')"] and found["steps"] > 10


def test_faults_of_the_network_are_simulated_only() -> None:
    with pytest.raises(ValueError, match=r"'cut'.*can only be simulated"):
        chaos(PEERS, read_script("1 cut bob 5", PEERS), minutes=1.0)


@pytest.mark.parametrize(("fork", "status"), [(["bob"], 1), ([], None)])
def test_the_command_fails_if_a_fork_lasted(
    fork: list[str],
    status: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def stand_in(peers: object, faults: object, **given: Any) -> dict[str, Any]:
        asked.append((peers, faults))
        given["tell"]("kill bob")
        return {"steps": 3, "forks that lasted": fork, "exceptions in a loop": []}

    monkeypatch.setattr(module, "chaos", stand_in)
    (tmp_path / "script").write_text(SCRIPT)
    command = ["chaos", "--simulate", "--json-lines", "--peers", "3", "--script", str(tmp_path / "script")]
    try:
        main(command)
        ended = None
    except SystemExit as error:
        ended = error.code
    assert ended == status and asked == [(list(PEERS), read_script(SCRIPT, PEERS))]
    fault, report = map(json.loads, capsys.readouterr().out.splitlines())
    assert fault == {"event": "fault", "text": "kill bob"} and report["steps"] == 3


@pytest.mark.slow
@pytest.mark.ordeal
def test_processes_are_killed_frozen_and_restarted_and_train_again() -> None:
    script = "2 kill bob 3\n8 freeze alice 5\n20 restart carol\n"
    found = chaos(PEERS, read_script(script, PEERS), minutes=1.5, baseline_s=10.0)
    assert found["faults"] == 3 and found["restarts that trained again"] == 2
    assert found["steps"] > 5 and not found["forks that lasted"] and not found["exceptions in a loop"]
