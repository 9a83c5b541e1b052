"""Virtual time, a simulated network and scripted faults, to learn and test without a swarm. See README.md here."""

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
