"""The sahajBERT notebook from top to bottom, by an organizer and a volunteer together, at its smallest size."""

import json
import re
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel, opened
from tests.notebooks.test_notebooks import press
from tests.recipes.test_downstream import soham, wikiann
from tests.recipes.test_tokenizer import BENGALI

FEWER_SAMPLES = """import dataclasses
settings = dataclasses.replace(settings, target_batch_size=8)"""
TRACKER = """
def init(project):
    print("tracking", project)

def log(metrics, step):
    with open("log.jsonl", "a") as opened:
        opened.write(json.dumps({**metrics, "step": step}) + "\\n")

import json
"""


def until_trained(
    kernel: Kernel, sources: dict[str, float], *, name: str, invitation: str = "", **form: object
) -> str:
    """Run the cells up to the optimizer; return what the cell after the model's showed."""
    kernel.run()
    kernel.run()
    press(kernel, name=name, invitation=invitation, agreed=True)
    assert "Swarm(sahajbert" in kernel.execute("print(swarm)")
    kernel.run(SOURCES=sources, **form)
    kernel.run()
    kernel.run()
    shown = kernel.run()
    kernel.run()
    kernel.execute(FEWER_SAMPLES)
    assert "training continues from step" in kernel.run()
    return shown


def check_table(shown: str, task: str) -> None:
    """The own model has a score in the column of the task, and only there; the baselines have none."""
    rows = re.findall(r"<tr>(.*?)</tr>", shown)
    cells = {row[0]: row[1:] for row in (re.findall(r">([^<]+)</t", row) for row in rows)}
    own = dict(zip(("ner", "ncc"), cells["sahajbert"][1::2], strict=True))
    other = {"ner": "ncc", "ncc": "ner"}[task]
    assert 0 <= float(own[task]) <= 100 and own[other] == "not measured"
    assert cells["FacebookAI/xlm-roberta-large"][1::2] == ["not measured"] * 2


@pytest.mark.slow
def test_an_organizer_and_a_volunteer_train_a_bengali_model_together(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(BENGALI * 20), encoding="utf-8")
    sources = {str(tmp_path / "text.txt"): 1.0, str(tmp_path / "t*.txt"): 2.0}
    homes = {name: tmp_path / name for name in ("organizer", "volunteer")}
    for home in homes.values():
        home.mkdir()
        (home / "trackio.py").write_text(TRACKER)
    form = {"SIZE": "tiny", "MICRO_BATCH": 2}
    first, second = (opened("sahajbert", home) for home in homes.values())
    with first as organizer, second as volunteer:
        shown = until_trained(organizer, sources, name="organizer", **form)
        assert "join sahajbert as worker" in shown
        share = "print(swarm.invite(settings=wanted | {'tokenizer': saved / 'tokenizer.json'}))"
        invitation = organizer.execute(share).strip()
        # the invitation's size and tokenizer win
        form["SIZE"] = "large"
        until_trained(volunteer, sources, name="carol", invitation=invitation, **form)
        assert "tracking sahajbert" in volunteer.run(TRACKER="trackio")
        assert "step 2 of 2: loss" in volunteer.run(MAX_STEPS=2)
        shown = volunteer.run_all(HELD_OUT=str(tmp_path / "text.txt"), NER_DATA="", NCC_DATA=soham(tmp_path))
        check_table(shown[-1], "ncc")
        organizer.run()
        organizer.run(MAX_STEPS=4)
        check_table(organizer.run_all(NER_DATA=wikiann(tmp_path), NCC_DATA="")[-1], "ner")
        same = "print([tuple(batches.tokenizer('আমি যাই')['input_ids']), len(batches.tokenizer)])"
        assert volunteer.execute(same) == organizer.execute(same)
    for home, task in zip(homes.values(), ("ner", "ncc"), strict=True):
        assert (home / "finetuned" / task / "model.safetensors").exists()
        assert [*(home / "sahajbert-peer" / "checkpoints").rglob("*.safetensors")]
    logged = [json.loads(line) for line in (homes["volunteer"] / "log.jsonl").read_text().splitlines()]
    assert logged[0]["step"] >= 1 and logged[0]["loss"] > 0
