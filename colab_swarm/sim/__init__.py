"""Virtual time, a simulated network and scripted faults: learn and test without a swarm.

## The problem

What happens if the third peer dies in the middle of a round, on a connection with 2 % loss? On real
machines this never happens twice. Here it is a script with a seed, and hours take seconds. It opens
no connection, so you can also use it on platforms whose terms forbid distributed workers.

## The idea

A simulated peer is a real `Node` with real links: the same calls, streams, credit and roles. Only the connections below
them, and the clock of the event loop, have a second implementation:

    your training function, one thread for each peer, strictly in turns
              |
    Swarm, optimizer, averaging, DHT, experts        the same code as on the internet
              |
    Node ---------- real: colab_swarm.net.node       WebSocket, Noise, routers
              '---- simulated: SimPeers              pipes with rate, latency, loss; faults by script
              |
    time ---------- real: the clock                  or: jumps to the next timer as soon as all threads wait

Exactly one thread runs at any moment: the loop's, or one peer's. So a run depends on its seeds alone.

## What is simulated, and what is not

| simulated | not |
|---|---|
| each peer's upload and download, first in, first out | the handshake's messages, encryption, keep-alive |
| latency of each pair, jitter, loss as retransmission | routers, relays, tunnels (`tests/netlab` runs real ones) |
| wall clocks that are off | other processes on the machine |
| roles: calls above a peer's ``role=`` are refused | admission: every peer is admitted |
| compute time: ``samples_per_s`` of each peer | the speed of your machine: gradients are real, not their time |
| crash, freeze, partition, slow connection, churn | Byzantine peers: script them in your training function |

| profile | one-way latency | bandwidth |
|---|---|---|
| `lan` | 0.3 ms | 1 Gbit/s |
| `home` | 30 ms, spread 0.5, 0.5 % loss | 20 Mbit/s up, 100 down |
| `dedloc16` | 30 ms | 4 x 200, 8 x 100, 4 x 50 Mbit/s, as in DeDLOC's ALBERT experiment |
| `paper_cloud` | 92.5 ms | 100 Mbit/s, as in Learning@home |

## Failures

`network.at(12.0)`, `network.now()` and `network.when(predicate, nth=3)` (just before the third matching message is
delivered) take: `crash`, `restart`, `freeze`, `cut`, `partition`, `heal`, `slow`, `skew`, `lose`, `latency`,
`bandwidth`. Each fault that happened is in `network.fired`: a test of a fault asserts that it fired.

A crashed peer's links break, and other peers notice after a moment. A partition leaves links
silent, as a cut cable does; they break after 30 s, when keep-alive would notice. A lost message
costs 0.2 s, or a round trip if that is longer.

## How to use it

    with cs.simulate(peers=4, network="home", seed=0) as simulation:
        simulation.network.at(60).crash("carol")
        simulation.join("grace", at=90)
        simulation.run(train)                    # train(swarm) is an ordinary function, run for each peer

Peers are called alice, bob, carol, dave, erin, frank, grace, heidi. With `churn=ChurnProfile(mean_session_s,
mean_absence_s)` they come and go. `colab_swarm.experiments.chaos` adds random faults, or those of a script.
Tests use `SimNetwork` (`colab_swarm.sim.network`) and `run_virtual` (`colab_swarm.sim.runtime`) directly.

## Limits

A simulated peer has one thread, so `swarm.trainer` (many batches in flight), invitations, work
units and tunnels need real peers. Figures of a simulation are predictions: adaptive shares, for
example, gain 1.81 times in simulation where the linear program predicts 1.92.
"""

from colab_swarm.sim.network import ScriptedFault, SimNetwork, SimPeers
from colab_swarm.sim.profiles import (
    DEDLOC16,
    HOME,
    LAN,
    PAPER_CLOUD,
    PROFILES,
    ChurnEvent,
    ChurnProfile,
    HostProfile,
    NetworkProfile,
)
from colab_swarm.sim.runtime import VirtualTimeLoop, run_virtual

__all__ = [
    "DEDLOC16",
    "HOME",
    "LAN",
    "PAPER_CLOUD",
    "PROFILES",
    "ChurnEvent",
    "ChurnProfile",
    "HostProfile",
    "NetworkProfile",
    "ScriptedFault",
    "SimNetwork",
    "SimPeers",
    "VirtualTimeLoop",
    "run_virtual",
]
