"""The sahajBERT notebook from top to bottom, by an organizer and a volunteer together, at its smallest size."""

import json
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel, opened
from tests.recipes.test_tokenizer import BENGALI

FEWER_SAMPLES = """import dataclasses
settings = dataclasses.replace(settings, target_batch_size=8, matchmaking_timeout_s=1.0)"""
TAGGED = {"tokens": ["আমি", "ঢাকায়", "যাই"], "ner_tags": ["O", "B-LOC", "O"]}
LABELLED = [{"text": text, "label": label} for text, label in (("ঢাকা জয়ী", "sport"), ("আমি যাই", "travel"))]


def until_trained(kernel: Kernel, sources: dict[str, float], **form: object) -> list[str]:
    """Run the cells up to the optimizer; what each showed."""
    shown = [kernel.run(**form) for _ in range(3)]
    assert "Swarm(sahajbert" in shown[-1]
    shown += [kernel.run(SOURCES=sources, **form) for _ in range(4)]
    kernel.execute(FEWER_SAMPLES)
    shown.append(kernel.run(**form))
    assert "training continues from step" in shown[-1]
    return shown


@pytest.mark.slow
def test_an_organizer_and_a_volunteer_train_a_bengali_model_together(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(BENGALI * 20), encoding="utf-8")
    for task, rows in (("ner", [TAGGED] * 20), ("classify", LABELLED * 10)):
        (tmp_path / task).mkdir()
        (tmp_path / task / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sources = {str(tmp_path / "text.txt"): 1.0, str(tmp_path / "t*.txt"): 2.0}
    homes = {name: tmp_path / name for name in ("organizer", "volunteer")}
    for home in homes.values():
        home.mkdir()
    form = {"SIZE": "tiny", "MICRO_BATCH": 2, "MINUTES": 0.1}
    first, second = (opened("sahajbert", home) for home in homes.values())
    with first as organizer, second as volunteer:
        shown = until_trained(organizer, sources, MY_NAME="organizer", **form)
        assert "join sahajbert as worker" in shown[5]
        share = "print(swarm.invite(settings=wanted | {'tokenizer': '../organizer/tokenizer'}))"
        invitation = organizer.execute(share).strip()
        until_trained(volunteer, sources, INVITATION=invitation, MY_NAME="carol", **form | {"SIZE": "large"})
        volunteer.run()
        volunteer.train_to(1, **form)
        shown = volunteer.run_all(
            **form, HELD_OUT=str(tmp_path / "text.txt"), TASK="classify", DATA=str(tmp_path / "classify")
        )
        assert "eval_accuracy" in shown[-1]
        assert "1 peer linked" not in volunteer.execute("print(swarm)")
        organizer.run()
        organizer.train_to(1, **form)
        assert "eval_f1" in organizer.run_all(**form, DATA=str(tmp_path / "ner"))[-1]
        same = "print([tuple(batches.tokenizer('আমি যাই')['input_ids']), optimizer.global_step > 0])"
        assert volunteer.execute(same) == organizer.execute(same)
        assert "True" in volunteer.execute(same)
    assert all((home / "finetuned" / "model.safetensors").exists() for home in homes.values())
    assert all((home / "text.state").stat().st_size > 1000 for home in homes.values())
