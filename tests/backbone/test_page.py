"""What the backbone's page shows: `tests.notebook` has its form and drawings."""

import dataclasses

from colab_swarm.backbone.backbone import status_page
from colab_swarm.snapshot import KeptModel, SwarmSnapshot
from tests.backbone.views import view

PAGE = status_page(view)


def live(*shown: SwarmSnapshot) -> str:
    return str(PAGE.render(shown, "/live")[1])


def test_every_model_has_its_part_with_its_checkpoints_and_a_warning_without_trainers() -> None:
    (shown,) = view()
    (alone,) = view(standing_in=2000)
    empty = dataclasses.replace(shown, model="other", loss_history=(), kept=KeptModel(()), peers=())
    page = live(shown, empty)
    assert page.count('role="group"') == 2
    for text in ("step 2400", "103.4", "catching up", "Step 2000, loss 7.724 pushed", "12.3 GB", "0 s ago"):
        assert text in page, text
    assert "loss of" in page and "loss of" not in live(empty)
    warning = "There are no trainers now. New trainers continue from the checkpoint of step 2,000"
    assert warning in live(alone) and warning not in page


def test_prometheus_gets_each_figure_of_the_run_once_and_those_of_every_model() -> None:
    (shown,) = view(evil='we"ird\\\n')
    text = str(PAGE.render((shown, dataclasses.replace(shown, model="other")), "/metrics")[1])
    labels = r'run="sahajbert",collaboration="we\"ird\\\n"'
    assert f"colab_swarm_step{{{labels}}} 2400.0\n" in text
    assert f'colab_swarm_peers{{{labels},role="trainer"}} 5.0\n' in text
    assert 'colab_swarm_step{run="sahajbert",collaboration="other"} 2400.0\n' in text
    assert text.count("colab_swarm_sent_bytes_total{") == 1
