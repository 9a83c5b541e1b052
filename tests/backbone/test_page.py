"""What the backbone's page shows."""

import dataclasses
from pathlib import Path

import colab_swarm as cs
from colab_swarm.backbone.backbone import Backbone, status_page
from colab_swarm.backbone.config import RunFile
from colab_swarm.snapshot import KeptModel, SwarmSnapshot
from tests.backbone.views import view

PAGE = status_page(view)


def live(shown: tuple[SwarmSnapshot, ...]) -> str:
    return str(PAGE.render(shown, "/live")[1])


def test_the_page_shows_what_it_should() -> None:
    for text in (
        "step 2400", "103.4", "catching up", "Step 2000, loss 7.724 pushed",
        "alice", "2.5 h", "12.3 GB", "step 2,400", "0 s ago",
    ):  # fmt: skip
        assert text in live(view()), text


def test_the_page_warns_when_new_trainers_continue_from_a_checkpoint() -> None:
    warning = "There are no trainers now. New trainers continue from the checkpoint of step 2,000"
    assert warning in live(view(standing_in=2000)) and warning not in live(view())


def test_an_empty_run_has_a_page_too_and_every_model_its_part() -> None:
    (shown,) = view()
    empty = dataclasses.replace(shown, model="other", loss_history=(), kept=KeptModel(()), peers=())
    assert "loss of" not in live((empty,)) and "loss of" in live((shown,))
    assert live((shown, empty)).count('role="group"') == 2


def test_a_run_that_keeps_no_model_has_a_page_too(tmp_path: Path) -> None:
    with cs.simulate(1) as sim:
        page = Backbone(
            sim.swarms["alice"], RunFile(name="simulation", folder=str(tmp_path), collaborations=())
        )
        assert "simulation" in page.page.render(page.snapshots())[1]


def test_prometheus_gets_each_figure_of_the_run_once_and_those_of_every_model() -> None:
    (shown,) = view(evil='we"ird\\\n')
    text = str(PAGE.render((shown, dataclasses.replace(shown, model="other")), "/metrics")[1])
    labels = r'run="sahajbert",collaboration="we\"ird\\\n"'
    assert f"colab_swarm_step{{{labels}}} 2400.0\n" in text
    assert f'colab_swarm_peers{{{labels},role="trainer"}} 5.0\n' in text
    assert 'colab_swarm_step{run="sahajbert",collaboration="other"} 2400.0\n' in text
    assert text.count("colab_swarm_sent_bytes_total{") == 1
