"""Three honest trainers on loopback, and what an attacker needs: an invitation, and no scruples."""

import asyncio
import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import msgspec
import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import JoinEta, JoinRound, RoundTerms
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.standing import BURST_S, SHARE
from colab_swarm.events import Fault, RoundFinished, StepFinished, Waited
from colab_swarm.net.peers import PeerId, Refusal, Role, Stream
from colab_swarm.swarm.simulation import NAMES
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Manifest, Snapshot, send_chunks
from colab_swarm.training.records import ProgressRecord, progress_key
from colab_swarm.training.state import DescribeState, FetchState
from tests.training import toy

OPTIONS = cs.NetworkOptions(lan=False)
HONEST = ("alice", "bob", "carol")
HANG_S = 100.0  # only a hang reaches it
COMPUTES_S = 0.05  # a micro-batch, so that an attacker can follow
KNOWN_STEPS = 4  # after which the honest know each other


class Trainer:
    """An honest trainer on a thread of its own; keeps its parameters after each of its steps."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.net = toy.model()
        self.states: dict[tuple[int, bytes], bytes] = {}  # digest of the parameters by step and lineage
        self.losses: list[float] = []
        self.results: list[GroupResult] = []
        self.error: BaseException | None = None
        self.stopped, self.ready = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name=swarm.name, daemon=True)

    def _run(self) -> None:
        try:
            self.optimizer = toy.join_training(self.swarm, self.net)
            self.ready.set()
            self.note()
            while not self.stopped.is_set():
                self.take_batch()
                if self.steps > max((step for step, _ in self.states), default=0):
                    self.note()
        except BaseException as error:  # the town shows it
            self.error = error
        finally:
            self.ready.set()

    def take_batch(self) -> None:
        step, rows = self.optimizer.global_step, toy.ROWS.get(self.swarm.name, slice(0, 3))
        loss = toy.loss_of(self.net, step, rows)
        loss.backward()
        self.stopped.wait(COMPUTES_S)
        result = self.optimizer.step(samples=rows.stop - rows.start, loss=loss.item())
        if result is not None:
            self.results.append(result)

    def note(self) -> None:
        key = self.optimizer.global_step, self.optimizer.lineage
        parameters = toy.parameters_of(self.net)
        self.states[key] = sha256(parameters.numpy().tobytes()).digest()
        with torch.no_grad():
            self.losses.append(float(torch.stack([toy.loss_of(self.net, step) for step in range(20)]).mean()))

    @property
    def steps(self) -> int:
        return self.optimizer.global_step if hasattr(self, "optimizer") else 0

    @property
    def progress(self) -> Any:
        return self.optimizer.rounds.view


def end(swarm: Swarm) -> None:
    """Leave without notice, which takes no time."""

    async def die() -> None:
        swarm.kill()
        await swarm.services.peers.close()

    swarm.runtime.call(die())


class Town:
    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        alice = cs.create("attacked", peer_name="alice", options=OPTIONS)
        stack.callback(end, alice)
        self.swarms = {"alice": alice}
        for name in HONEST[1:]:
            self.swarms[name] = self.join(name)
        self.trainers = [Trainer(swarm) for swarm in self.swarms.values()]

    def join(self, name: str, invite: object = None, options: cs.NetworkOptions = OPTIONS) -> Swarm:
        """A peer with its own invitation, or with this one."""
        invite = invite or self.swarms["alice"].invite()
        swarm = cs.join(str(invite), peer_name=name, options=options)
        self._stack.callback(end, swarm)
        return swarm

    def trainer(self, swarm: Swarm, kind: type[Trainer] = Trainer) -> Trainer:
        """One more trainer; a thread that is stopped at the end."""
        trainer = kind(swarm)
        self._stack.callback(trainer.stopped.set)
        return trainer

    def train(self) -> None:
        """Begin, and return when the honest know each other."""
        for trainer in self.trainers:
            trainer.thread.start()
        self.wait(lambda: self.steps >= KNOWN_STEPS, "the first steps")

    @contextlib.contextmanager
    def meanwhile(self, work: Coroutine[Any, Any, None]) -> Iterator[None]:
        """Run the attack on the peers' event loop; it must not fail."""

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(work)

        async def finish() -> None:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError), outcome

        runtime = self.swarms["alice"].runtime
        task = runtime.call(begin())
        try:
            yield
        finally:
            runtime.call(finish())

    @property
    def steps(self) -> int:
        """That all honest peers have taken."""
        return min(trainer.steps for trainer in self.trainers)

    @property
    def prefix(self) -> str:
        return str(self.trainers[0].progress.prefix)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        ended = threading.Event()
        for _ in range(int(HANG_S / 0.05)):
            for trainer in self.trainers:
                if trainer.error is not None:
                    raise AssertionError(f"{trainer.swarm.name} failed") from trainer.error
            if condition():
                return
            ended.wait(0.05)
        steps = {trainer.swarm.name: trainer.steps for trainer in self.trainers}
        pytest.fail(f"no {what} in {HANG_S:.0f} s; steps: {steps}")

    def go_on(self, steps: int) -> None:
        """Return when all honest peers have taken ``steps`` more steps."""
        least = self.steps + steps
        self.wait(lambda: self.steps >= least, f"{steps} steps during the attack")

    def stop(self) -> None:
        for trainer in self.trainers:
            trainer.stopped.set()
        for trainer in self.trainers:
            trainer.thread.join(HANG_S)
            assert not trainer.thread.is_alive(), f"{trainer.swarm.name} hangs"
            if trainer.error is not None:
                raise AssertionError(f"{trainer.swarm.name} failed") from trainer.error

    def assert_held(self, *, least_shared: int, loss: bool = True) -> None:
        """Equal lineages are equal parameters, ``least_shared`` steps are common to all, and nothing was raised."""
        held: dict[tuple[int, bytes], dict[str, bytes]] = defaultdict(dict)
        for trainer in self.trainers:
            for key, digest in trainer.states.items():
                held[key][trainer.swarm.name] = digest
            assert not loss or max(trainer.losses) < 2 * trainer.losses[0], "the loss diverged"
            faults = [e for e in trainer.swarm.events.recent(Fault) if "deviant" not in str(e)]
            assert not faults, faults
        assert all(len(set(digests.values())) == 1 for digests in held.values()), (
            "equal lineages, different parameters"
        )
        shared = sum(digests.keys() >= {*HONEST} for digests in held.values())
        assert shared >= least_shared, f"only {shared} steps were shared by all"

    def waited_for(self, *peers: PeerId) -> float:
        """The seconds that the honest were told to have waited for these, all together."""
        names, events = {peer.hex() for peer in peers}, [swarm.events for swarm in self.swarms.values()]
        return sum(one.seconds for log in events for one in log.recent(Waited) if one.peer in names)

    def rounds(self) -> list[RoundFinished]:
        return [e for trainer in self.trainers for e in trainer.swarm.events.recent(RoundFinished)]


@contextlib.contextmanager
def town() -> Iterator[Town]:
    with contextlib.ExitStack() as stack:
        made = Town(stack)
        try:
            yield made
        finally:
            for trainer in made.trainers:
                trainer.stopped.set()
            for trainer in made.trainers:
                if trainer.thread.ident is not None:
                    trainer.thread.join(30.0)


class Mallory:
    """An attacker on the swarm's own network: publishes records that follow the honest peers', and answers as told."""

    def __init__(self, swarm: Swarm, prefix: str) -> None:
        self.swarm, self.prefix = swarm, prefix
        self.services, self.peers = swarm.services, swarm.services.peers
        self.fired: dict[str, int] = defaultdict(int)  # attacks by kind
        self.ready_in_s: float | None = None  # a broken promise would cost it its credit
        self.record: Callable[[ProgressRecord], ProgressRecord] = lambda honest: honest
        self.on_join: Callable[[JoinRound, Stream], Awaitable[None]] | None = None
        self.on_call: Callable[[PeerId, RoundTerms], Awaitable[None]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> "Mallory":
        self.swarm.runtime.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.swarm.runtime.call(self._stop())

    async def _start(self) -> None:
        self.services.router.serve(self.prefix, RoundTerms, self._answer_call, Role.GUEST)
        self.services.router.serve_stream(self.prefix, JoinRound, self._answer_join, Role.GUEST)
        await self._publish()
        self._tasks.add(asyncio.create_task(self._keep_publishing()))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_publishing(self) -> None:
        while True:
            with contextlib.suppress(cs.errors.PeerError):
                await self._publish()
            await asyncio.sleep(0.02)  # the honest take a step each `COMPUTES_S` at most

    async def honest(self) -> ProgressRecord | None:
        """The foremost honest record."""
        found = await self.services.dht.published(progress_key(self.prefix), ProgressRecord)
        honest = [record for record in found.values() if record.name in HONEST and not record.syncing]
        return max(honest, key=lambda record: record.step, default=None)

    async def _publish(self) -> None:
        if (honest := await self.honest()) is None:
            return
        addresses = self.peers.contact.addresses
        own = msgspec.structs.replace(honest, name="mallory", addresses=addresses, reduces=True, sketch=None)
        await self.services.dht.publish(progress_key(self.prefix), self.record(own), ttl_s=30.0)
        self.fired["records"] += 1

    async def _answer_call(self, peer: PeerId, terms: RoundTerms) -> JoinEta:
        self.fired["calls"] += 1
        if self.on_call is not None:
            self._tasks.add(asyncio.ensure_future(self.on_call(peer, terms)))
        return JoinEta(self.ready_in_s)

    async def _answer_join(self, opening: JoinRound, stream: Stream) -> None:
        self.fired["joins"] += 1
        if self.on_join is None:
            raise Refusal("no")
        await self.on_join(opening, stream)

    async def serve_state(self, held: Snapshot) -> None:
        """Give this state to those that ask."""

        async def describe(peer: PeerId, ask: DescribeState) -> Manifest:
            self.fired["manifests"] += 1
            return held.manifest

        async def send(ask: FetchState, stream: Stream) -> None:
            self.fired["states"] += 1
            await send_chunks(ask, stream, held.read)

        self.services.router.serve(self.prefix, DescribeState, describe, Role.GUEST)
        self.services.router.serve_stream(self.prefix, FetchState, send, Role.GUEST)


Attack: TypeAlias = Callable[[Swarm, str], Counter[str]]
"""Takes a hostile member and the prefix of its run; the counter tells later how often the attack fired."""
CALM_S = 20.0  # of simulated training before an attack
SAMPLES, SAMPLES_PER_S = 2, 4.0
STEP_S = 4.0  # that honest peers take for a step of theirs alone


@dataclass
class Aftermath:
    """What an attack left to the honest: ``kept`` of their steps, beyond what the hostile may cost by the rules.

    ``cost_s``: the most that one of the honest was told to have waited for the hostile (True), and for the honest.
    """

    steps: int
    kept: float
    fired: Counter[str]
    cost_s: dict[bool, float]


def attacked(honest: int, attacks: Sequence[Attack], seed: int, seconds: float) -> Aftermath:
    """Train on the virtual clock beside one hostile member for each attack; the user's loop must raise nothing.

    The attacks must begin at `CALM_S`.
    """
    steps, fired, hostile = Counter[str](), list[Counter[str]](), set[str]()
    cost_s: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}

    def work(swarm: Swarm) -> None:
        def hear(event: object) -> None:
            if isinstance(event, StepFinished) and event.at > CALM_S:
                steps[swarm.name] += 1
            elif isinstance(event, Waited) and event.at > CALM_S:
                cost_s[event.peer in hostile][swarm.name] += event.seconds

        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=int(honest * SAMPLES_PER_S * STEP_S))
        number = NAMES.index(swarm.name) - honest
        if number < 0:
            swarm.events.listen(hear)
        else:
            hostile.add(swarm.id.hex())
            fired.append(attacks[number](swarm, optimizer.rounds.view.prefix))
        while True:
            toy.loss_of(net, optimizer.global_step, slice(0, SAMPLES)).backward()
            optimizer.step(samples=SAMPLES)

    count = honest + len(attacks)
    with cs.simulate(count, network="lan", seed=seed, samples_per_s=SAMPLES_PER_S) as simulation:
        simulation.run(work, seconds=CALM_S + seconds)
    slowest = min(steps[name] for name in NAMES[:honest])
    bound_s = len(attacks) * (BURST_S + SHARE * seconds)
    most_s = {whose: max(each.values(), default=0.0) for whose, each in cost_s.items()}
    after = Aftermath(slowest, slowest * STEP_S / (seconds - bound_s), sum(fired, Counter[str]()), most_s)
    print(f"seed {seed}: {after}")
    return after
