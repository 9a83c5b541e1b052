"""Virtual time, a simulated network and scripted faults: learn and test without a swarm."""

from colab_swarm.sim.clock import VirtualTimeLoop, run_virtual, virtual_time
from colab_swarm.sim.faults import ComingFault, FiredFault
from colab_swarm.sim.network import SimNetwork
from colab_swarm.sim.peer import SimPeers
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

__all__ = [
    "DEDLOC16",
    "HOME",
    "LAN",
    "PAPER_CLOUD",
    "PROFILES",
    "ChurnEvent",
    "ChurnProfile",
    "ComingFault",
    "FiredFault",
    "HostProfile",
    "NetworkProfile",
    "SimNetwork",
    "SimPeers",
    "VirtualTimeLoop",
    "run_virtual",
    "virtual_time",
]
