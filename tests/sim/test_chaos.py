"""Scripts of faults, and random ones."""

import math
import random

import pytest

from colab_swarm.sim import ScriptedFault
from colab_swarm.sim.chaos import LASTS_S, random_faults, read_script

PEERS = ("alice", "bob", "carol")


def test_a_script_has_a_fault_in_each_line_and_a_wrong_one_is_quoted() -> None:
    text = "12 crash bob\n\n40.5 freeze carol 10\n32 restart bob  # comes back\n50 slow bob 20\n"
    assert read_script(text, PEERS) == [
        ScriptedFault(12.0, "crash", ("bob",)),
        ScriptedFault(32.0, "restart", ("bob",)),
        ScriptedFault(40.5, "freeze", ("carol", 10.0)),
        ScriptedFault(50.0, "slow", ("bob", 20.0)),
    ]
    wrong = ("crash bob", "12 crash", "12 explode bob", "12 crash zoe", "12 crash bob 1", "12 cut bob")
    for line in (*wrong, "x crash bob"):
        with pytest.raises(ValueError, match=line.split()[0]):
            read_script(line, PEERS)


@pytest.mark.parametrize("seed", range(5))
def test_random_faults_leave_one_peer_alone_and_are_over_at_the_end(seed: int) -> None:
    given = {"until_s": 600.0, "mean_s": 5.0, "kinds": tuple(LASTS_S)}
    faults = random_faults(PEERS, **given, rng=random.Random(seed))
    assert faults == random_faults(PEERS, **given, rng=random.Random(seed)) and len(faults) > 20
    disturbed_until: dict[str, float] = {}
    for fault in faults:
        peer, *number = fault.arguments
        over = fault.name == "restart" or number == [1.0]
        lasts_s = 0.0 if over else number[0] if fault.name in ("freeze", "cut") else math.inf
        disturbed_until[peer] = fault.at + lasts_s
        assert sum(until > fault.at for until in disturbed_until.values()) < len(PEERS)
    assert max(disturbed_until.values()) <= 600.0
