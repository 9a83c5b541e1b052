"""Forecasts of ways to communicate, and the choice."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import colab_swarm as cs
from colab_swarm.events import Notice, RoundFinished
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.communication import ENOUGH, HOME_BPS, PRESETS, WAYS, plan_communication
from colab_swarm.training.settings import TrainingSettings
from tests.training.toy import join_training, model, take, wait_for_peers

LAN_BPS = 1e9, 1e9


@pytest.mark.parametrize(
    ("numel", "step_s", "line_bps", "chosen"),
    [
        (1_000_000, 12.0, LAN_BPS, "each step, float32"),
        (1_100_000, 12.0, HOME_BPS, "each step, float16"),  # LoRA
        (10_000_000, 12.0, HOME_BPS, "each 3 steps, sparseloco"),
        (350_000_000, 4.0, HOME_BPS, "each 3 steps, sparseloco"),
        (350_000_000, 0.5, HOME_BPS, "each 30 steps, sparseloco"),
    ],
)
def test_the_first_way_that_makes_most_progress_is_chosen(
    numel: int, step_s: float, line_bps: tuple[float, float], chosen: str
) -> None:
    plan = plan_communication(numel, step_s, 4, line_bps)
    assert plan.chosen.name == chosen and plan.chosen.communication == WAYS[chosen]
    worth, best = plan.chosen.worth_per_hour, max(one.worth_per_hour for one in plan.forecasts)
    assert worth >= ENOUGH * best
    assert all(one.worth_per_hour < ENOUGH * best for one in plan.forecasts[: list(WAYS).index(chosen)])
    assert f"> {chosen}" in repr(plan) and repr(plan).endswith(plan.why)


def test_where_all_ways_wait_long_advice_is_given() -> None:
    plan = plan_communication(7_000_000_000, 1.0, 4, (1e6, 1e6))
    assert plan.chosen.name == "each 30 steps, sparseloco" and "take a smaller model" in plan.why


def test_a_limit_on_bytes_is_kept_or_said_to_be_missed() -> None:
    free = plan_communication(1_000_000, 12.0, 4, LAN_BPS)
    few = plan_communication(1_000_000, 12.0, 4, LAN_BPS, gb_per_hour=0.1)
    assert free.chosen.name == "each step, float32" and few.chosen.mb_per_hour < 100
    assert few.chosen.name == "each 3 steps, sparseloco" and "would send" in few.why
    none = plan_communication(1_000_000, 12.0, 4, LAN_BPS, gb_per_hour=1e-6)
    assert none.chosen.name == "each 30 steps, sparseloco" and "still more than 0.001 MB an hour" in none.why
    with pytest.raises(ValueError, match="above 0"):
        plan_communication(1_000_000, 12.0, 4, LAN_BPS, gb_per_hour=0.0)


def test_a_peer_alone_and_an_unknown_line_have_a_forecast() -> None:
    assert plan_communication(10**9, 1.0, 1, (None, None)).chosen.name == "each step, float32"
    assert plan_communication(10**7, 12.0, 4, (None, None)) == plan_communication(10**7, 12.0, 4, HOME_BPS)


@pytest.mark.parametrize("nothing", [(0, 1.0), (10, 0.0)])
def test_a_plan_of_nothing_is_refused(nothing: tuple[int, float]) -> None:
    with cs.simulate(1) as sim, pytest.raises(ValueError, match="both must be above 0"):
        sim.swarms["alice"].plan(nothing[0], step_s=nothing[1])


NUMEL, STEP_S, PEERS, ROUNDS = 400_000, 4.0, 4, 4
MICRO = 8  # batches of each peer in a step: a round waits for those that are under way


def train(swarm: Swarm, way: cs.Communication) -> tuple[float, float]:
    """Return the steps an hour from the first round on, and the bytes that it sent a round; gradients are noise."""
    net = torch.nn.Linear(NUMEL // 8, 8, bias=False)
    torch.nn.init.zeros_(net.weight)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-6)
    optimizer = swarm.optimizer(sgd, target_batch_size=PEERS * MICRO, communication=way)
    wait_for_peers(swarm, optimizer, PEERS)
    noise = np.random.default_rng(swarm.id[0]).normal(size=NUMEL).astype(np.float32)
    stepped = list[float]()
    while optimizer.global_step < ROUNDS:
        net.weight.grad = torch.from_numpy(noise).view_as(net.weight).clone()
        optimizer.step(samples=1)
        if optimizer.global_step > len(stepped):
            stepped.append(swarm.runtime.time())
    sent = [one.sent_bytes for one in swarm.events.recent(RoundFinished)[1:]]
    return 3600 * (ROUNDS - 1) / (stepped[-1] - stepped[0]), sum(sent) / len(sent)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["each step, int8", "each 3 steps, sparseloco", "each 30 steps, int8"])
def test_a_forecast_is_close_to_a_run_on_home_lines(name: str) -> None:
    way = WAYS[name]
    if way.local_steps > 1:
        way = replace(way, local_steps=3)
    with cs.simulate(PEERS, network="home", samples_per_s=MICRO / STEP_S) as sim:
        found = sim.run(lambda swarm: train(swarm, way))
        plan = sim.swarms["alice"].plan(NUMEL, step_s=STEP_S, peers=PEERS)
    forecast = next(one for one in plan.forecasts if one.name == name)
    steps, sent = (np.mean(one) for one in zip(*found.values(), strict=True))
    assert forecast.steps_per_hour == pytest.approx(steps * way.local_steps, rel=0.1)
    tolerance = 0.02
    if "sparse" in name:
        # Opposite values of peers that weigh the same cancel out, and zeros are not sent.
        tolerance = 0.05
    assert forecast.sent_bytes == pytest.approx(sent, rel=tolerance)


@pytest.mark.parametrize("mailbox", [False, True], ids=["links", "bucket"])
def test_a_joiner_adopts_what_the_others_agreed_on_and_the_panel_compares(mailbox: bool) -> None:
    def work(swarm: Swarm) -> tuple[TrainingSettings, str]:
        net, founds = model(), swarm.name == "alice"
        plan = swarm.plan(350_000_000, step_s=4.0)
        optimizer = join_training(swarm, net, communication=plan if founds else "auto")
        for batch in range(40 if founds else 0):
            take(optimizer, net, batch)
        return optimizer.settings, swarm.snapshot().forecast

    with cs.simulate(1, mailbox=mailbox) as sim:
        alice, forecast = sim.run(work)["alice"]
        assert alice.communication == cs.Communication("sparseloco", local_steps=3, overlap=True)
        assert re.fullmatch(r".+ B in .+ s\nforecast .+ MB in .+ s", forecast)
        sim.join("bob")
        bob, _ = sim.run(lambda swarm: work(swarm) if swarm.name == "bob" else None)["bob"]
        notices = [notice.text for notice in sim.swarms["bob"].events.recent(Notice)]
    assert bob == alice
    assert "adopted from the others: Communication(compression='sparseloco', " in "\n".join(notices)


def test_a_communication_that_is_none_is_refused() -> None:
    with cs.simulate(1) as sim:
        with pytest.raises(
            ValueError, match=r"'fast': pass 'auto', one of 'synchronous', .*, cs.Communication"
        ):
            join_training(sim.swarms["alice"], model(), communication="fast")
        with pytest.raises(TypeError, match=r"pass communication=cs.Communication\(overlap=True\)"):
            sim.swarms["alice"].optimizer(
                torch.optim.SGD(model().parameters(), lr=0.1), target_batch_size=8, overlap=True
            )


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"compression": "int3"}, "int3"),
        ({"compression": "onebit", "error_feedback": False}, "a worse model without error_feedback"),
        ({"compression": "sparseloco", "error_feedback": False}, "a worse model without error_feedback"),
        ({"error_feedback": True}, "float32 cuts nothing off"),
        *(({"local_steps": steps}, f"={steps}: pass 1 to 1000") for steps in (0, -1, 1001, 2.5)),
        ({"local_steps": "auto"}, "pass 1 to 1000"),
        ({"mean_compression": "int3"}, "int3"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_when_they_are_made(
    parts: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        cs.Communication(**parts)


@pytest.mark.parametrize(("mailbox", "begun"), [(False, "synchronous"), (True, "sparseloco")])
def test_the_first_peer_begins_with_what_is_usual_there(mailbox: bool, begun: str) -> None:
    with cs.simulate(1, mailbox=mailbox) as sim:
        optimizer = join_training(sim.swarms["alice"], model(), communication="auto")
        assert optimizer.settings.communication == PRESETS[begun]


def test_a_plan_for_a_bucket_has_ways_with_local_steps_only() -> None:
    plan = plan_communication(10_000_000, 12.0, 4, HOME_BPS, in_bucket=True)
    assert len(plan.forecasts) == 3 and all(one.communication.local_steps > 1 for one in plan.forecasts)
    int8 = plan.forecasts[2]
    # one contribution up, all four down
    assert int8.round_s == pytest.approx(1.0 + int8.sent_bytes * 8 * (1 / 20e6 + 4 / 100e6))
