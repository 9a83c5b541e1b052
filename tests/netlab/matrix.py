"""Who reaches whom, and how: all pairs of places a peer may be at, through a public peer that relays.

    python -m tests.netlab.matrix --tries 40 [PLACE-PLACE …]

prints a line per pair; each try begins with two fresh peers.
"""

import argparse
import statistics
from dataclasses import dataclass
from itertools import combinations_with_replacement

from tests.netlab.hosts import LabPeer, create, join
from tests.netlab.lab import Lab, Nat, Site

WAY_TIMEOUT_S = 20.0
NATS = {"masquerade": Nat(), "cone": Nat("full cone"), "answering": Nat(unsolicited="rst")}
NATS |= {"random": Nat("random"), "strict": Nat(only_https=True)}
PLACES = ("public", *NATS)
PAIRS = (*combinations_with_replacement(PLACES, 2), ("neighbour", "neighbour"))


def expected_way(pair: tuple[str, str]) -> str:
    # Of a public peer and another one, the other one dials; neighbours have addresses of one network.
    dials = "public" in pair and "strict" not in pair
    return "direct" if dials or "neighbour" in pair else "relayed"


def lab_of(pair: tuple[str, str], *, rtt_s: float = 0.0, loss: float = 0.0) -> Lab:
    if "neighbour" in pair:
        return Lab(Site("a", "b", nat=NATS["masquerade"]), rtt_s=rtt_s, loss=loss)
    sites = [Site(host, nat=NATS[place]) for host, place in zip("ab", pair, strict=True) if place in NATS]
    public = [host for host, place in zip("ab", pair, strict=True) if place == "public"]
    return Lab(*sites, public=("pub", *public), rtt_s=rtt_s, loss=loss)


@dataclass(frozen=True)
class Met:
    """How one try went: the way at last, seconds to the first link and to that way, from the first call on."""

    way: str
    linked_s: float
    seconds: float


def meet(asking: LabPeer, asked: LabPeer, way: str) -> Met:
    answer = asking.ask("path", asked.contact, way, WAY_TIMEOUT_S, timeout_s=WAY_TIMEOUT_S + 10)
    assert "error" not in answer, answer
    return Met(answer["path"].split()[0], answer["linked_s"], answer["seconds"])


def measure(pair: tuple[str, str], tries: int, rtt_s: float) -> str:
    way, met = expected_way(pair), []
    for k in range(tries):
        with lab_of(pair, rtt_s=rtt_s) as lab:
            peers = join(lab, create(lab, "pub").invite, "a", "b")
            met.append(meet(*(peers if k % 2 == 0 else reversed(peers)), way))
    done = [one for one in met if one.way in way]
    linked, took = sorted(one.linked_s for one in met), sorted(one.seconds for one in done) or [0.0]
    return (
        f"{'-'.join(pair):24} {way:8} {len(done):3} of {tries}  first link {statistics.median(linked):.3f} s, "
        f"longest {linked[-1]:.3f} s  {way} {statistics.median(took):.3f} s, longest {took[-1]:.3f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--rtt", type=float, default=0.02, help="between any two routers, seconds")
    parser.add_argument("pairs", nargs="*")
    options = parser.parse_args()
    for pair in PAIRS:
        if not options.pairs or "-".join(pair) in options.pairs:
            print(measure(pair, options.tries, options.rtt), flush=True)


if __name__ == "__main__":
    main()
