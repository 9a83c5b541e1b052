"""What every public object says of itself: one line, no addresses, secrets or places in memory; more of it as HTML."""

import copy
import inspect
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import colab_swarm as cs
from colab_swarm.averaging.group import Group, RoundTerms
from colab_swarm.averaging.moshpit import MoshpitResult
from colab_swarm.averaging.result import GroupResult
from colab_swarm.markup import MAX_FACT_ROWS, facts
from colab_swarm.moe.trainer import AsyncTrainer
from colab_swarm.net.peers import PeerId
from colab_swarm.net.tunnels import TunnelSettings
from colab_swarm.trust.contributions import Contribution, Leaderboard

CLASSES = [one for name in cs.__all__ if inspect.isclass(one := getattr(cs, name))]
ALICE, BOB = PeerId(b"\xa1" * 32), PeerId(b"\xb2" * 32)
ROWS = Contribution(ALICE, samples=1200.0), Contribution(BOB, reduced_bytes=2e6)
GIVEN = Leaderboard(ROWS, {"a1a1a1a1": "<b>alice</b>"}, BOB)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_public_class_leaves_its_objects_with_python_s_repr(kind: type) -> None:
    assert kind.__repr__ is not object.__repr__


def half(epoch: int) -> float:
    return 0.5


def objects(tmp_path: Path) -> list[tuple[object, str]]:
    adam = partial(torch.optim.Adam, lr=1e-3)
    model = torch.nn.Linear(2, 2)
    plan = cs.workunits.WorkPlan(max_epochs=3)
    digits = cs.workunits.Job("digits", lambda: model, data=(1, 2), validation=None, plan=plan)
    trainer = AsyncTrainer(model, lambda model, batch: model(batch), adam(model.parameters()), concurrency=4)
    group = Group(bytes(16), RoundTerms("", 7, b"", 10), ())
    round_ = GroupResult(
        group=group,
        step=7,
        announced={},
        contributors=(ALICE,),
        sent_bytes=10,
        received_bytes=20,
        seconds=0.5,
        exchange_s=0.4,
        members=(),
    )
    moshpit = MoshpitResult((ALICE, BOB), (2,), (round_, None), 1, 1.5, "bob left")
    tunnel = TunnelSettings("ngrok", auth_token="very-secret")
    return [
        (cs.NetworkOptions(), "NetworkOptions()"),
        (
            cs.NetworkOptions(port=4500, identity="my.key", announce=["ws://203.0.113.7:1"], tunnel=tunnel),
            "NetworkOptions(port=4500, tunnel=TunnelSettings(kind='ngrok', agent=None, quota_bytes=1000000000.0))",
        ),
        (cs.RelayQuota(total_bytes=1e9), "RelayQuota(total_bytes=1000000000.0)"),
        (cs.Allowlist(users=("alice",)), "Allowlist(users=('alice',), organisations=())"),
        (cs.moe.ExpertRule(adam, max_grad_norm=1), "ExpertRule(optimizer=Adam(lr=0.001), max_grad_norm=1)"),
        (cs.workunits.WorkPlan(alpha=half), "WorkPlan(alpha=half)"),
        (digits, "Job(name='digits', plan=WorkPlan(max_epochs=3))"),
        (cs.CheckpointFolder(tmp_path), f"CheckpointFolder({str(tmp_path)!r}, 0 of 3 kept)"),
        (round_, "RoundResult(step 7, 1 of 0 peers, 0.50 s)"),
        (moshpit, "MoshpitResult(2 peers on 2, 1 failures: bob left, 1.5 s)"),
        (GIVEN, "Leaderboard(2 peers, 1,200 samples)"),
        (GIVEN[0], "Contribution(a1a1a1a1, samples=1,200)"),
        (trainer, f"AsyncTrainer(4 batches in flight; {trainer.result})"),
    ]


def test_every_repr_is_one_line_without_addresses_secrets_or_places_in_memory(tmp_path: Path) -> None:
    for one, expected in objects(tmp_path):
        assert repr(one) == expected
        assert not re.search(r"0x[0-9a-f]{6}|ws://|secret|my\.key|\n", repr(one))


def html_of(one: Any) -> str:
    return str(one._repr_html_() if hasattr(one, "_repr_html_") else one._repr_mimebundle_()["text/html"])


def test_a_leaderboard_can_be_copied_and_pickled() -> None:
    for one in (copy.deepcopy(GIVEN), pickle.loads(pickle.dumps(GIVEN))):
        assert (one, one.names, one.me) == (GIVEN, GIVEN.names, BOB)


def test_the_leaderboard_is_sound_html_with_names_that_cannot_become_markup() -> None:
    page = html_of(GIVEN)
    ElementTree.fromstring(page)
    assert "&lt;b&gt;alice" in page and "(me)" in page and "<b>alice" not in page


def test_facts_escape_what_they_are_given_and_count_what_is_too_much() -> None:
    page = facts("<i>", {"<u>": "<s>"}, ("<b>",), [("<x>",)] * (MAX_FACT_ROWS + 3))
    assert not re.search("<[iusx]>", page) and "and 3 more" in page
    ElementTree.fromstring(page)


def test_objects_returned_by_a_swarm_have_reprs(capsys: pytest.CaptureFixture[str]) -> None:
    with cs.create("reprs", options=cs.NetworkOptions(lan=False)) as swarm:
        model = torch.nn.Linear(2, 2)
        optimizer = swarm.optimizer(torch.optim.SGD(model.parameters(), 0.1), target_batch_size=64)
        layer = swarm.experts.mixture("ffn", 4, grid=(2, 2), k=2)
        handed: list[Any] = [swarm, optimizer, swarm.contributions(), layer, swarm.invite()]
        for one in handed:
            assert not re.search(r"object at 0x|ws://", repr(one))
            assert one in (layer, optimizer) or len(html_of(one)) > 20
        assert repr(optimizer) == "SwarmOptimizer(SGD, step=0, 0 of 64 samples here)"
