"""Catching up: beside a scripted collaboration, and beside a swarm that trains on."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import StateError
from colab_swarm.events import Notice, RoundFinished
from colab_swarm.net.peers import PeerId
from colab_swarm.sim.runtime import run_virtual
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.catch_up import ATTEMPTS, CatchUp
from colab_swarm.training.link_rounds import LinkRounds
from colab_swarm.training.optimizer import SwarmOptimizer
from colab_swarm.training.progress import Progress
from colab_swarm.training.records import ProgressRecord
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.state import DonorsSilent
from tests.training.toy import alone, join_training, model, parameters_of, take

ME = PeerId(bytes(16))
CHECKPOINT = 10


def peer(number: int) -> PeerId:
    return PeerId(bytes(15) + bytes([number]))


def record(step: int, *, reduces: bool = True) -> ProgressRecord:
    return ProgressRecord(step, bytes([step]), 0.0, 0.0, syncing=False, reduces=reduces, name="")


class DeadTrainers:
    """Each of them died at a step of its own, but its record lives on; a backbone has an older checkpoint."""

    def __init__(self, steps: list[int]) -> None:
        joiner = ProgressRecord(0, b"", 0.0, 0.0, syncing=True, reduces=True, name="")
        self.progress = Progress(ME, joiner, round_samples=8)
        records = {peer(number): record(step) for number, step in enumerate(steps, 2)}
        self.progress.on_records({peer(1): record(CHECKPOINT, reduces=False)} | records, now=0.0)
        self.downloads: list[tuple[PeerId, ...]] = []
        self.level: tuple[int, bytes] | None = None

    async def refresh(self) -> None:
        pass

    def patience_s(self, donors: list[PeerId]) -> float:
        return 5.0

    async def download(self, donors: list[PeerId], timeout_s: float) -> Snapshot:
        """Through the backbone, as the donors are out of reach."""
        self.downloads.append(tuple(donors))
        if len(self.downloads) < 3:
            raise StateError("it does not stand in yet")
        return Snapshot.of(bytes([CHECKPOINT]), CHECKPOINT, b"", np.zeros(8, np.uint8))

    async def wait_called(self) -> None:
        await asyncio.Event().wait()
        raise AssertionError("no organizer calls")

    def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        self.level = step, lineage


@pytest.mark.parametrize("steps", [[11], [12, 13], [12, 13, 14]])
def test_a_late_joiner_gets_past_trainers_that_died_at_different_steps(steps: list[int]) -> None:
    swarm = DeadTrainers(steps)
    caught_up = run_virtual(CatchUp(swarm, capacity=4, has_state=False).run())
    assert caught_up is not None and swarm.level == (CHECKPOINT, bytes([CHECKPOINT]))
    dead = {(peer(number),) for number in range(2, 2 + len(steps))}
    assert set(swarm.downloads[:-1]) == dead and swarm.downloads[-1] == (peer(1),)
    assert (
        len(swarm.downloads) == ATTEMPTS * len(steps) + 2
    )  # once with a checkpoint that was not the one before


def test_a_state_of_another_lineage_than_the_swarms_is_not_taken_up() -> None:
    swarm = DeadTrainers([])
    swarm.progress.on_records(
        {peer(1): msgspec.structs.replace(record(CHECKPOINT), lineage=b"other")}, now=0.0
    )
    with pytest.raises(StateError, match="the swarm moved on during the download"):
        run_virtual(CatchUp(swarm, capacity=4, has_state=False).run())
    assert swarm.level is None


def test_a_late_joiner_asks_other_trainers_as_soon_as_the_branchs_donors_are_silent() -> None:
    swarm = DeadTrainers([11])
    asked, donors_silent = [], {peer(2)}

    async def download(donors: list[PeerId], timeout_s: float) -> Snapshot:
        asked.append(tuple(donors))
        if donors_silent & {*donors}:
            raise DonorsSilent("frozen")
        return Snapshot.of(bytes([CHECKPOINT]), CHECKPOINT, b"", np.zeros(8, np.uint8))

    swarm.download = download  # type: ignore[method-assign]
    caught_up = run_virtual(CatchUp(swarm, capacity=4, has_state=True).run())
    assert caught_up is not None and asked == [(peer(2),)] * ATTEMPTS + [(peer(1),)]  # it may be its own link
    asked.clear()
    swarm.progress.election.trust_all()
    assert run_virtual(CatchUp(swarm, capacity=4, has_state=False).run()) is not None
    assert asked == [(peer(2),), (peer(1),)]


def test_a_swarm_of_nothing_but_liars_ends_in_an_error_that_says_so() -> None:
    swarm = DeadTrainers(list(range(11, 31)))
    with pytest.raises(
        StateError, match="could not catch up with the swarm: it does not stand in yet; the swarm"
    ):
        run_virtual(CatchUp(swarm, capacity=4, has_state=False).run())


def test_a_late_joiner_follows_the_rounds_during_a_long_download(monkeypatch: pytest.MonkeyPatch) -> None:
    download, downloaded = LinkRounds.download, []

    async def slowly(joiner: LinkRounds, donors: list[PeerId], timeout_s: float) -> Snapshot:
        snapshot = await download(joiner, donors, timeout_s)
        downloaded.append(snapshot.manifest.step)
        await asyncio.sleep(8)
        return snapshot

    def train(swarm: Swarm) -> tuple[int, bytes]:
        optimizer = join_training(swarm, net := model())
        began = optimizer.global_step
        while optimizer.global_step < 12:
            take(optimizer, net, optimizer.global_step, slice(0, 2))
        return began, optimizer.lineage

    monkeypatch.setattr(LinkRounds, "download", slowly)
    with cs.simulate(1, seed=1, samples_per_s=10.0) as sim:
        sim.join("bob", at=2.0)
        results = sim.run(train)
        members = [one for e in sim.swarms["alice"].events.recent(RoundFinished) for one in e.members]
    assert {one.share for one in members if not one.samples} == {0.0}  # it reduces nothing meanwhile
    assert len(downloaded) == 1 and results["bob"][0] >= downloaded[0] + 3
    assert results["alice"][1] == results["bob"][1]


LOCAL = {"local_steps": 2, "target_batch_size": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": True}, LOCAL, {**LOCAL, "overlap": True}, {**LOCAL, "communication": "auto"}],
    ids=["plain", "overlap", "local steps", "local steps and overlap", "auto"],
)
def test_a_late_joiner_holds_the_weights_of_the_step_that_it_reports(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swarm takes steps during the download."""
    download, downloaded = LinkRounds.download, []
    weights: dict[int, torch.Tensor] = {}
    options = dict(settings)
    if "communication" in options:
        del options["local_steps"]

    async def slowly(joiner: LinkRounds, donors: list[PeerId], timeout_s: float) -> Snapshot:
        snapshot = await download(joiner, donors, timeout_s)
        downloaded.append(snapshot.manifest.step)
        await asyncio.sleep(8)
        return snapshot

    def train(swarm: Swarm) -> int:
        net = model(seed=len(swarm.name))
        if swarm.name == "bob":
            optimizer = join_training(swarm, net, **options)
            assert torch.equal(parameters_of(net), weights[optimizer.global_step])
            return optimizer.global_step
        plain = {name: value for name, value in settings.items() if name in LOCAL}
        optimizer = join_training(swarm, net, **plain)
        while optimizer.global_step < 12:
            if take(optimizer, net, optimizer.global_step, slice(0, 2)) is not None:
                weights[optimizer.global_step] = parameters_of(net)
        return optimizer.global_step

    monkeypatch.setattr(LinkRounds, "download", slowly)
    with cs.simulate(1, seed=1, samples_per_s=10.0) as sim:
        sim.join("bob", at=4.0)
        results = sim.run(train)
    assert results["bob"] > downloaded[-1], "steps were taken during the download"


def test_a_record_that_differs_from_the_state_is_put_right_before_the_next_batch() -> None:
    def train(swarm: Swarm) -> None:
        optimizer = join_training(swarm, net := model())
        optimizer.collaboration.progress.leap(9, b"other", syncing=False)
        while optimizer.global_step == 0:
            take(optimizer, net, 0)
        own = optimizer.collaboration.progress.known.own
        assert (own.step, own.lineage, own.syncing) == (1, optimizer.lineage, False)

    alone(train)


@pytest.mark.parametrize("frozen_s", [15.0, 45.0])
def test_a_late_joiner_waits_with_a_visible_reason_while_all_donors_are_frozen(frozen_s: float) -> None:
    """The second time longer than keep-alive, so that their links break."""
    with cs.simulate(2, seed=2, samples_per_s=10.0) as sim:
        sim.network.at(8.0).freeze("alice", frozen_s)
        sim.network.at(8.0).freeze("bob", frozen_s)
        sim.join("carol", at=5.0)

        def train(swarm: Swarm) -> tuple[int, float]:
            if swarm.name == "carol":
                swarm.runtime.call(asyncio.sleep(4.0))
            optimizer, entered_at = join_training(swarm, net := model()), sim.time
            began = optimizer.global_step
            while optimizer.global_step < 60:
                take(optimizer, net, optimizer.global_step, slice(0, 2))
            return began, entered_at

        results = sim.run(train)
        lineages = {swarm.optimizers["model"].lineage for swarm in sim.swarms.values()}
        told = [one.text for one in sim.swarms["carol"].events.recent(Notice) if isinstance(one, Notice)]
    assert [(fault.name, fault.at) for fault in sim.network.fired] == [("freeze", 8.0)] * 2
    began, entered_at = results["carol"]
    assert began > 0 and entered_at >= 8.0 + frozen_s and len(lineages) == 1
    assert any(
        re.fullmatch(r"waiting for the state of step \d+: [12] donors? slow or frozen", text) for text in told
    )


def test_a_late_joiner_whose_donors_are_gone_for_good_is_told_so() -> None:
    with cs.simulate(1, seed=2, samples_per_s=10.0) as sim:
        sim.network.at(8.0).crash("alice")
        sim.join("carol", at=5.0)

        def train(swarm: Swarm) -> None:
            if swarm.name == "carol":
                swarm.runtime.call(asyncio.sleep(4.0))
                with pytest.raises(StateError, match="could not catch up with the swarm"):
                    join_training(swarm, model())
                return
            optimizer = join_training(swarm, net := model())
            while True:
                take(optimizer, net, optimizer.global_step)

        sim.run(train, seconds=400.0)
        assert "carol" in sim.results and [fault.name for fault in sim.network.fired] == ["crash"]


def test_a_donor_whose_state_does_not_load_sends_the_late_joiner_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    garbage, rules, snapshot = list[Snapshot](), dict[str, UpdateRule](), Replica.snapshot

    def spoil(replica: Replica) -> Snapshot:
        true = snapshot(replica)
        if replica.rule is not rules["alice"]:
            return true
        garbage.append(Snapshot.of(true.manifest.subject, true.manifest.step, b"", np.zeros(8, np.uint8)))
        return garbage[-1]

    monkeypatch.setattr(Replica, "snapshot", spoil)
    with cs.simulate(2, seed=1, samples_per_s=10.0) as sim:
        sim.join("carol", at=6.0)

        def train(swarm: Swarm) -> tuple[int, bytes]:
            optimizer = join_training(swarm, net := model())
            rules[swarm.name] = optimizer.rule
            began = optimizer.global_step
            while optimizer.global_step < 12:
                take(optimizer, net, optimizer.global_step, slice(0, 2))
            return began, optimizer.lineage

        results = sim.run(train)
    assert garbage and results["carol"][0] > 0 and len({lineage for _, lineage in results.values()}) == 1


def test_peers_that_resume_an_old_state_call_nobody_back(tmp_path: Path) -> None:
    def train(swarm: Swarm) -> tuple[list[int], bytes]:
        steps: list[int] = []

        def begin_and_train(until: int) -> SwarmOptimizer:
            store = SimpleNamespace(checkpoints=lambda name: tmp_path / swarm.name)
            with pytest.MonkeyPatch.context() as patch:  # simulated peers save nothing otherwise
                patch.setattr(swarm, "network", SimpleNamespace(store=store))
                optimizer = join_training(swarm, net := model())
            while optimizer.global_step < until:
                take(optimizer, net, optimizer.global_step, slice(0, 2))
                steps.append(optimizer.global_step)
            return optimizer

        if swarm.name != "alice":
            begin_and_train(6).close()
            swarm.runtime.call(asyncio.sleep(30.0))  # alice goes on alone
        return steps, begin_and_train(40).lineage

    with cs.simulate(4, seed=1, samples_per_s=10.0) as sim:
        results = sim.run(train)
    alone, resumed = results["alice"][0], results["bob"][0]
    # It saved step 6, and never went on from it.
    assert 6 in resumed and min(resumed[resumed.index(6) + 1 :]) > 10
    assert alone == sorted(alone) and len({lineage for _, lineage in results.values()}) == 1
