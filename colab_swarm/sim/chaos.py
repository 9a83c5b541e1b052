"""Scripts of faults, and random faults, for `colab_swarm.experiments.chaos`. Pure: this module only plans them.

A script has one `ScriptedFault` per line: seconds, the name of a method of `Script`, and its arguments. ``#`` begins a
comment.

    12      crash bob          killed
    32      restart bob        started again
    40.5    freeze carol 10    stopped (SIGSTOP) for 10 s
    60      cut dave 15        no traffic between dave and the others for 15 s
    80      slow dave 20       dave's connection becomes 20 times slower than at first
"""

import random
from collections.abc import Sequence

from colab_swarm.errors import require
from colab_swarm.sim.network import ScriptedFault

LASTS_S = {"crash": (5, 30), "freeze": (1, 40), "restart": (0, 0), "cut": (5, 40), "slow": (10, 40)}
"""The kinds of random faults, and for how many seconds each lasts; a restart is a crash of 0 seconds."""
SLOW_FACTOR = 20.0
STARTS_S = 10.0  # minimum time from the start of a peer to its next random fault


def read_script(text: str, peers: Sequence[str]) -> list[ScriptedFault]:
    """Return the faults of a script, in the order of time; raises a ValueError that quotes the first wrong line."""
    faults = []
    for line in text.splitlines():
        match line.partition("#")[0].split():
            case []:
                pass
            case [at, "crash" | "restart" as name, peer] if peer in peers:
                faults.append(ScriptedFault(float(at), name, (peer,)))
            case [at, "freeze" | "cut" | "slow" as name, peer, number] if peer in peers:
                faults.append(ScriptedFault(float(at), name, (peer, float(number))))
            case _:
                kinds = "crash PEER, restart PEER, freeze PEER SECONDS, cut PEER SECONDS or slow PEER FACTOR"
                raise ValueError(f"{line!r}: write SECONDS and {kinds}; the peers are {', '.join(peers)}")
    return sorted(faults, key=lambda fault: fault.at)


def random_faults(
    peers: Sequence[str], *, until_s: float, mean_s: float, kinds: Sequence[str], rng: random.Random
) -> list[ScriptedFault]:
    """Return random faults that all end by ``until_s``; on average one begins every ``mean_s`` seconds.

    At any time, at least one peer has no fault; while the others all have one, no further fault begins. Raises
    ValueError for an unknown kind, or if ``mean_s`` is 0 or less.
    """
    known = set(kinds) <= LASTS_S.keys()
    require(known and mean_s > 0, f"kinds={','.join(kinds)}: choose of {', '.join(LASTS_S)}")
    faults = list[ScriptedFault]()
    at = 0.0
    free_at = dict.fromkeys(peers, 0.0)
    while (at := at + rng.expovariate(1 / mean_s)) < until_s:
        free = [peer for peer in peers if free_at[peer] <= at]
        kind = rng.choice(kinds)
        if len(free) > 1:
            seconds = min(rng.uniform(*LASTS_S[kind]), until_s - at)
            peer = rng.choice(free)
            faults += _spell(kind, peer, at, at + seconds)
            free_at[peer] = at + seconds + (STARTS_S if faults[-1].name == "restart" else 0.0)
    return sorted(faults, key=lambda fault: fault.at)


def _spell(kind: str, peer: str, begin: float, end: float) -> list[ScriptedFault]:
    match kind:
        case "crash" | "restart":
            return [ScriptedFault(begin, "crash", (peer,)), ScriptedFault(end, "restart", (peer,))]
        case "slow":
            return [ScriptedFault(begin, kind, (peer, SLOW_FACTOR)), ScriptedFault(end, kind, (peer, 1.0))]
    return [ScriptedFault(begin, kind, (peer, end - begin))]
