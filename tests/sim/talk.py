"""What alice and bob say to each other in these tests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from colab_swarm.net.peers import Message, PeerId, Role, Stream, StreamEnded
from colab_swarm.sim import HostProfile, NetworkProfile, SimNetwork, SimPeers
from tests.net.swarm import introduce

Meeting = AsyncIterator[list[SimPeers]]
FAR = NetworkProfile("far", latency_s=0.1)


class Ask(Message, frozen=True):
    number: int


class Tell(Message, frozen=True):
    number: int


async def double(caller: PeerId, message: Ask) -> Tell:
    return Tell(2 * message.number)


async def count_bytes(opening: Ask, stream: Stream) -> None:
    total = 0
    try:
        while True:
            _, payload = await stream.receive(Tell)
            total += len(payload)
    except StreamEnded:
        await stream.send(Tell(total))


def pair(
    profile: NetworkProfile = FAR, *, bob: HostProfile | None = None
) -> tuple[SimNetwork, SimPeers, SimPeers]:
    """A network where alice and bob know each other and bob serves."""
    network = SimNetwork(profile, seed=1)
    alice, served = network.peer("alice"), network.peer("bob", host_profile=bob)
    network.introduce()
    served.serve(Ask, double)
    served.serve_stream(Ask, count_bytes)
    return network, alice, served


@asynccontextmanager
async def simulated(*names: str, clients: Sequence[str] = (), viewers: Sequence[str] = ()) -> Meeting:
    """Do as `tests.net.swarm.peers`, in the simulator."""
    network = SimNetwork(FAR, seed=1)
    everyone = []
    for name in names:
        role = Role.VIEWER if name in viewers else Role.WORKER
        everyone.append(network.peer(name, listen=name not in clients, role=role))
    introduce(everyone)
    yield everyone
    for each in everyone:
        await each.close()


async def forever(caller: PeerId, message: Ask) -> Tell:
    await asyncio.get_running_loop().create_future()
    return Tell(0)
