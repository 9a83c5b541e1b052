"""Three honest trainers, at real links or on the virtual clock, and members that attack them."""

import asyncio
import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import pytest

import colab_swarm as cs
from colab_swarm.events import Fault, RoundFinished, StepFinished
from colab_swarm.net.peers import end_tasks
from colab_swarm.swarm.simulation import NAMES
from colab_swarm.swarm.swarm import Swarm
from tests.training import toy

OPTIONS = cs.NetworkOptions(lan=False)
HONEST = ("alice", "bob", "carol")
HANG_S = 100.0  # only a hang reaches it
COMPUTES_S = 0.05  # a micro-batch, so that an attacker can follow
KNOWN_STEPS = 4  # after which the honest know each other


class Trainer:
    """A trainer on a thread of its own; keeps a digest of its parameters after each of its steps."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.net = toy.model()
        self.states: dict[tuple[int, bytes], bytes] = {}  # by step and lineage
        self.error: BaseException | None = None
        self.stopped = threading.Event()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, name=swarm.name, daemon=True)

    def _run(self) -> None:
        rows = toy.ROWS.get(self.swarm.name, slice(0, 3))
        try:
            self.optimizer = toy.join_training(self.swarm, self.net)
            self.ready.set()
            while not self.stopped.is_set():
                self.stopped.wait(COMPUTES_S)
                toy.take(self.optimizer, self.net, self.steps, rows)
                state = toy.parameters_of(self.net).numpy().tobytes()
                self.states[self.steps, self.optimizer.lineage] = sha256(state).digest()
        except BaseException as error:  # the town shows it
            self.error = error
            self.ready.set()

    @property
    def steps(self) -> int:
        return self.optimizer.global_step if hasattr(self, "optimizer") else 0

    @property
    def rounds(self) -> Any:
        return self.optimizer.rounds


def end(swarm: Swarm) -> None:
    """Leave without notice, which takes no time."""

    async def die() -> None:
        swarm.kill()
        await swarm.services.peers.close()

    swarm.runtime.call(die())


class Town:
    """Honest trainers at real links; ``trainers`` are those that must hold."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.alice = cs.create("attacked", peer_name="alice", options=OPTIONS)
        stack.callback(end, self.alice)
        swarms = [self.alice, *map(self.join, HONEST[1:])]
        self.trainers = [self.trainer(swarm) for swarm in swarms]

    def join(self, name: str, invite: object = None, options: cs.NetworkOptions = OPTIONS) -> Swarm:
        """A peer with its own invitation, or with this one."""
        swarm = cs.join(str(invite or self.alice.invite()), peer_name=name, options=options)
        self._stack.callback(end, swarm)
        return swarm

    def trainer(self, swarm: Swarm) -> Trainer:
        """One more trainer; its thread ends with the town."""
        trainer = Trainer(swarm)
        self._stack.callback(trainer.stopped.set)
        return trainer

    def train(self) -> None:
        """Begin, and return when the honest know each other."""
        for trainer in self.trainers:
            trainer.thread.start()
        self.wait(lambda: self.steps >= KNOWN_STEPS, "the first steps")

    @contextlib.contextmanager
    def meanwhile(self, work: Coroutine[Any, Any, None]) -> Iterator[None]:
        """Run the attack on the peers' event loop; it must not end."""

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(work)

        async def finish() -> None:
            assert not task.done(), task
            await end_tasks(task)

        task = self.alice.runtime.call(begin())
        try:
            yield
        finally:
            self.alice.runtime.call(finish())

    @property
    def steps(self) -> int:
        """That all honest peers have taken."""
        return min(trainer.steps for trainer in self.trainers)

    @property
    def prefix(self) -> str:
        return str(self.trainers[0].rounds.view.prefix)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        ended = threading.Event()
        for _ in range(int(HANG_S / 0.05)):
            self.check()
            if condition():
                return
            ended.wait(0.05)
        steps = {trainer.swarm.name: trainer.steps for trainer in self.trainers}
        pytest.fail(f"no {what} in {HANG_S:.0f} s; steps: {steps}")

    def check(self) -> None:
        for trainer in self.trainers:
            if trainer.error is not None:
                raise AssertionError(f"{trainer.swarm.name} failed") from trainer.error

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
        self.check()

    def assert_held(self, *, least_shared: int) -> None:
        """Equal lineages are equal parameters, ``least_shared`` steps are common to all, and no fault was told."""
        held: dict[tuple[int, bytes], set[bytes]] = defaultdict(set)
        for trainer in self.trainers:
            assert not trainer.swarm.events.recent(Fault)
            for key, digest in trainer.states.items():
                held[key].add(digest)
        assert all(len(digests) == 1 for digests in held.values())
        paths = [set(trainer.rounds.view._path.items()) for trainer in self.trainers]
        assert len(set.intersection(*paths)) >= least_shared


@contextlib.contextmanager
def town() -> Iterator[Town]:
    with contextlib.ExitStack() as stack:
        yield Town(stack)


Attack: TypeAlias = Callable[[Swarm, Any, Counter[str]], object]
"""Takes a hostile member, its optimizer, and counts how often it fires. It trains on after a return."""
CALM_S = 20.0  # of simulated training before an attack
SAMPLES, SAMPLES_PER_S = 2, 4.0
STEP_S = 4.0  # that the honest take for a step of theirs alone


@dataclass
class Aftermath:
    """What an attack left to the honest.

    Attributes:
        kept: the part of their steps, as if they were alone.
        rounds: theirs since the attack began.
        events: what they were told since then, with who was told it.
    """

    kept: float
    rounds: list[RoundFinished]
    events: list[tuple[str, Any]]
    fired: Counter[str]
    nets: dict[str, Any]
    hostile: set[str]


def attacked(attacks: Sequence[Attack], seed: int, seconds: float, honest: int = 3) -> Aftermath:
    """Train on the virtual clock beside a hostile member for each attack; no honest loop may raise."""
    after = Aftermath(0.0, [], [], Counter(), {}, set())
    steps = Counter[str]()

    def work(swarm: Swarm) -> None:
        net = toy.model()
        optimizer = toy.join_training(swarm, net, target_batch_size=int(honest * SAMPLES_PER_S * STEP_S))
        number = NAMES.index(swarm.name) - honest
        if number < 0:
            after.nets[swarm.name] = net
            swarm.events.listen(lambda event: hear(swarm.name, event))
        else:
            after.hostile.add(swarm.id.hex())
        while number < 0 or simulation.time < CALM_S:
            toy.take(optimizer, net, optimizer.global_step, slice(0, SAMPLES))
        with contextlib.suppress(Exception):  # it gets what it gives
            attacks[number](swarm, optimizer, after.fired)
            while True:
                toy.take(optimizer, net, optimizer.global_step, slice(0, SAMPLES))

    def hear(name: str, event: Any) -> None:
        if event.at > CALM_S:
            after.events.append((name, event))
            steps[name] += isinstance(event, StepFinished)

    with cs.simulate(
        honest + len(attacks), network="lan", seed=seed, samples_per_s=SAMPLES_PER_S
    ) as simulation:
        simulation.run(work, seconds=CALM_S + seconds)
    after.kept = min(steps[name] for name in NAMES[:honest]) * STEP_S / seconds
    after.rounds = [event for _, event in after.events if isinstance(event, RoundFinished)]
    print(f"seed {seed}: {after.kept:.2f} of the steps kept, {after.fired}")
    return after
