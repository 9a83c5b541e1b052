"""Two friends behind NATs, and a peer outside: by the four cells of the notebook, and by iroh."""

import subprocess

import pytest

from tests.netlab.hosts import create, join
from tests.netlab.lab import Lab, Nat, Site, _inside

BY_IROH = {"listen": False, "iroh": "direct", "relay": False}
DROP = ("INPUT", "-p", "udp", "-j", "DROP")


@pytest.mark.slow
@pytest.mark.ordeal
def test_friends_behind_nats_train_with_nothing_but_the_four_cells() -> None:
    with Lab(Site("alice", nat=Nat()), Site("bob", nat=Nat(random=True))) as lab:
        outside = create(lab, "pub")
        friends = []
        for host in ("alice", "bob"):
            environment = ["env", f"SWARM_INVITATION={outside.invite}", "OMP_NUM_THREADS=1"]
            friends.append(lab.run(host, [*environment, *lab.command("tests.netlab.cells", 20)]))
        facts = [friend.line(120.0) for friend in friends]
    assert all(fact["step"] == 20 and "joining lab" in fact["said"] for fact in facts), facts
    assert all(len(fact["links"]) == 2 for fact in facts), facts  # the one outside, and the friend


@pytest.mark.slow
def test_a_peer_that_only_iroh_reaches_serves_friends_behind_nats_and_outlives_a_cut() -> None:
    with Lab(Site("alice", nat=Nat()), Site("bob", nat=Nat(random=True))) as lab:
        outside = create(lab, "pub", **BY_IROH)
        assert all(address.startswith("iroh://") for address in outside.contact[1])
        alice, bob = join(lab, outside.invite, "alice", "bob", listen=False)
        for friend in (alice, bob):
            sent = friend.send(outside, 4 << 20)
            assert sent["intact"] and sent["path"] == "iroh", sent
        space = lab.prefix + "pub"
        _inside(space, "iptables", "-A", *DROP)
        alice.tell("send", outside.contact, 4 << 20)
        with pytest.raises(AssertionError, match="printed nothing"):
            alice.program.line(2.0)
        assert dropped(space) > 0
        _inside(space, "iptables", "-D", *DROP)
        assert alice.program.line(60.0)["intact"]
        assert bob.send(outside, 1 << 20)["intact"]


def dropped(space: str) -> int:
    """Return the packets that the rule has dropped."""
    listed = ["ip", "netns", "exec", space, "iptables", "-nvxL", "INPUT"]
    lines = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    return int(next(line.split()[0] for line in lines if "DROP" in line))
