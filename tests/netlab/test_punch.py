"""Who can be punched to whom, how often and how fast; run with ``-s`` to see the figures."""

import statistics

import pytest

from tests.netlab.lab import Lab, Nat, Site

TRIES = 40
MASQUERADE, FULL_CONE, RANDOM = Nat(), Nat("full cone"), Nat("random")
ANSWERING = Nat(unsolicited="rst")
PORT = 9000


def seconds_to_punch(
    lab: Lab, asking: str, asked: str, *, tries: int = TRIES, seconds: float = 5.0
) -> list[float]:
    """Of the tries that came to a connection; both ends must agree on which did."""
    lab.python("pub", "tests.netlab.puncher", "coordinate", PORT).line()
    arguments = (lab.address("pub"), PORT, tries, seconds)
    programs = [
        lab.python(host, "tests.netlab.puncher", role, *arguments)
        for host, role in ((asking, "ask"), (asked, "answer"))
    ]
    taken = [[program.line()["seconds"] for program in programs] for _ in range(tries)]
    assert all((one is None) == (other is None) for one, other in taken)
    return [one for one, _ in taken if one is not None]


def report(what: str, taken: list[float]) -> None:
    median = f"{statistics.median(taken):.3f} s, longest {max(taken):.3f} s" if taken else "none"
    print(f"\n{what}: {len(taken)} of {TRIES} punched, median {median}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "there", "rate"),
    [
        (MASQUERADE, MASQUERADE, 0.95),
        (MASQUERADE, FULL_CONE, 0.95),
        (FULL_CONE, FULL_CONE, 0.95),
        (RANDOM, FULL_CONE, 0.95),
        (MASQUERADE, ANSWERING, 0.95),
        (ANSWERING, ANSWERING, 0.8),
    ],
    ids=lambda value: f"{value.mapping} {value.unsolicited}" if isinstance(value, Nat) else "",
)
def test_two_sites_are_punched(here: Nat, there: Nat, rate: float) -> None:
    with Lab(Site("a", nat=here), Site("b", nat=there), rtt_s=0.01) as lab:
        taken = seconds_to_punch(lab, "a", "b")
    report(f"{here} - {there}", taken)
    assert len(taken) >= rate * TRIES
    assert statistics.median(taken) < 1.0


@pytest.mark.slow
def test_loss_does_not_stop_a_punch() -> None:
    with Lab(Site("a"), Site("b"), rtt_s=0.06, loss=0.02) as lab:
        taken = seconds_to_punch(lab, "a", "b", tries=TRIES // 2)
    report("60 ms, 2 % loss", taken)
    assert len(taken) >= 0.95 * TRIES // 2


@pytest.mark.slow
def test_two_hosts_behind_one_nat_meet_at_their_private_addresses() -> None:
    with Lab(Site("c1", "c2", nat=RANDOM)) as lab:
        taken = seconds_to_punch(lab, "c1", "c2")
    report("one NAT", taken)
    assert len(taken) == TRIES


@pytest.mark.slow
def test_a_nat_that_takes_random_ports_is_not_punched_and_nobody_waits_longer_than_told() -> None:
    with Lab(Site("a", nat=RANDOM), Site("b")) as lab:
        assert seconds_to_punch(lab, "a", "b", tries=2, seconds=1.0) == []
