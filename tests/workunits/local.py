"""A coordinator in this process, on loopback, and a volunteer that can say anything to it."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
from torch import nn

from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import Message
from colab_swarm.trust.access import RunAccess
from colab_swarm.workunits.coordinator import Coordinator
from colab_swarm.workunits.dispatcher import COPIES, MORE_REPLICAS, Dispatcher
from colab_swarm.workunits.job import Job, WorkPlan
from colab_swarm.workunits.messages import AskForUnit, GivenUnit, Problem, Token, UnitAnswer
from colab_swarm.workunits.sql_store import MEMORY, SqlStore
from colab_swarm.workunits.state import AnyEntry, Began
from colab_swarm.workunits.store import ParameterStore
from colab_swarm.workunits.weights import Floats

M = TypeVar("M", bound=Message)
RUN = "digits-run"
OPEN = RunAccess(RUN, "open")
CODE = "from tests.workunits.local import tiny_job\njob = tiny_job()\n"


def tiny_job(**plan: Any) -> Job:
    """A job without anything to learn: 64 samples of noise in 4 subsets, a model of 15 values."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(64, 4)).astype(np.float32), rng.integers(0, 3, 64)
    given = WorkPlan(**{"subsets": 4, "max_epochs": 2, **plan})
    return Job("tiny", partial(nn.Linear, 4, 3), (inputs, labels), (inputs, labels), plan=given)


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def message(self, kind: type[M]) -> M:
        return msgspec.msgpack.decode(self.body, type=kind)

    @property
    def problem(self) -> Problem:
        return self.message(Problem)


class Scene:
    """A coordinator over HTTP, and its log."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator, self.server = coordinator, coordinator.server
        self.store, self.folder = coordinator.store, coordinator.folder
        self.session: aiohttp.ClientSession | None = None
        self.alice, self.bob = Stranger(self), Stranger(self)

    @property
    def log(self) -> list[AnyEntry]:
        """Without the starts of coordinators."""
        return [entry for _, entry in self.store.entries() if not isinstance(entry, Began)]

    def kinds(self) -> list[str]:
        return [type(entry).__name__ for entry in self.log]

    def state(self) -> tuple[object, ...]:
        """All that a request could have changed."""
        newest, folder = self.store.parameters(), self.folder
        files = sorted((str(file), file.stat().st_size) for file in folder.rglob("*") if file.is_file())
        return self.log, newest.version, newest.values.tobytes(), files

    def values(self, change: float = 0.01) -> Floats:
        """A result: the newest parameters, moved a little."""
        return self.store.parameters().values + np.float32(change)


class Stranger:
    """Signs requests as a peer does, and sends whatever a test wants."""

    def __init__(self, scene: Scene, membership: bytes = b"") -> None:
        self._scene = scene
        self.token = Token(Identity(), lambda: membership)

    async def send(
        self, method: str, path: str, body: bytes = b"", *, now: float | None = None, **headers: str
    ) -> Answer:
        """``headers``: with underscores for dashes; they win over those that a good volunteer sends."""
        signed = self.token.header(method, path, body, now=time.time() if now is None else now)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        assert self._scene.session is not None
        url = self._scene.server.url.rstrip("/") + path
        given = {"Authorization": signed} | given
        async with self._scene.session.request(method, url, data=body or None, headers=given) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def raw(self, method: str, target: str, body: bytes = b"", **headers: str) -> Answer:
        """Byte for byte, whatever HTTP says of it; the rest of the body never comes, and the answer is waited for."""
        url = urlsplit(self._scene.server.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        signed = self.token.header(method, target, body, now=time.time())
        given = {"Host": "x", "Authorization": signed, **headers}
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
        try:
            writer.write("\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            found = dict(line.lower().split(": ", 1) for line in head[1:-2])
            size = 0 if method == "HEAD" else int(found.get("content-length", 0))
            return Answer(int(head[0].split()[1]), found, await reader.readexactly(size))
        finally:
            writer.close()

    async def ask(self, count: int = 1, in_hand: tuple[str, ...] = (), **changes: Any) -> list[GivenUnit]:
        """Request ``count`` units, one after another; return those that came."""
        units = list[GivenUnit]()
        for _ in range(count):
            names = (*in_hand, *(unit.assignment for unit in units))
            body = msgspec.msgpack.encode(AskForUnit("alice", names, **changes))
            unit = (await self.send("POST", "/api/units", body)).message(UnitAnswer).unit
            if unit is not None:
                units.append(unit)
        return units

    async def upload(self, assignment: str, data: bytes) -> Answer:
        return await self.send("PUT", f"/api/results/{assignment}", data)

    async def unit(self) -> tuple[str, bytes]:
        """The assignment of a new unit, and a good file for it."""
        given = await self.ask()
        return given[0].assignment, self._scene.coordinator.schema.encode(self._scene.values())

    async def train(self, count: int = 1, change: float = 0.01) -> list[Answer]:
        given = await self.ask(count)
        file = self._scene.coordinator.schema.encode(self._scene.values(change))
        return [await self.upload(one.assignment, file) for one in given]


@asynccontextmanager
async def coordinating(
    job: Job,
    folder: Path,
    *,
    store: ParameterStore | None = None,
    admission: MembershipAdmission | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """A coordinator that has started; without settings with one parameter server, quick to notice things."""
    store = store or SqlStore(MEMORY, job.name)
    given: dict[str, Any] = {"servers": 1, "tick_s": 0.02, **settings}
    access = RunAccess(RUN, "invite", admission) if admission else OPEN
    coordinator = Coordinator(job, store, Token(Identity()), access, folder, **given)
    scene = Scene(coordinator)
    try:
        await coordinator.start({"host": "127.0.0.1"})
        async with aiohttp.ClientSession() as scene.session:
            yield scene
        check_state(coordinator.dispatcher)
    finally:
        await coordinator.shut_down()


def check_state(dispatcher: Dispatcher) -> None:
    state = dispatcher.state
    for key, unit in state.units.items():
        assert key.epoch <= state.epoch, f"{key} was assigned before epoch {state.epoch} was done"
        assert unit.staleness is None or unit.accepted, f"{key} was assimilated, but not accepted"
        live = [replica.given.volunteer for replica in unit.live()]
        assert len(live) == len(set(live)), f"two replicas of {key} are one volunteer's"
        assert len(live) <= dispatcher._plan.replication + MORE_REPLICAS + COPIES
        assert not (live and unit.accepted), f"{key} is accepted, and still awaited"
        assert unit.accepted == (key not in state.open), f"{key} is in the wrong set"
    out = {name for name, replica in state.replicas.items() if replica.fate == "out"}
    assert out == state.out.keys()
    whose = Counter(replica.given.volunteer for replica in state.out.values())
    assert whose == Counter({name: one.in_flight for name, one in state.volunteers.items()})
