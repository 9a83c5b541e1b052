"""Downstream evaluation: entities as seqeval counts them, and both tasks on folders in the data sets' own layout."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AlbertForPreTraining
from transformers import PreTrainedTokenizerFast as Words
from transformers.trainer_utils import EvalPrediction

from colab_swarm.recipes import downstream
from colab_swarm.recipes.downstream import (
    TASKS,
    DownstreamScore,
    DownstreamSettings,
    DownstreamTable,
    encode,
    entities,
    entity_f1,
    evaluate,
    load_splits,
    score_of,
)
from colab_swarm.recipes.masked_lm import SIZES, albert_config
from colab_swarm.recipes.text import load_tokenizer, train_tokenizer
from tests.recipes.test_tokenizer import BENGALI

TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
NEWS = ["kolkata", "state", "national", "sports", "entertainment", "international"]
SETTINGS = DownstreamSettings(learning_rate=3e-3, epochs=8, threshold=0.0, batch_size=8, micro_batch=4)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-PER I-PER O B-LOC", {("PER", 1, 3), ("LOC", 4, 5)}),
        ("B-PER B-PER I-PER", {("PER", 0, 1), ("PER", 1, 3)}),
        # Broken sequences: an inside without a beginning, and one of another kind.
        ("O I-LOC", {("LOC", 1, 2)}),
        ("B-PER I-LOC I-LOC", {("PER", 0, 1), ("LOC", 1, 3)}),
        ("B-PER O I-PER", {("PER", 0, 1), ("PER", 2, 3)}),
    ],
)
def test_entities_are_those_that_seqeval_sees(tags: str, found: set[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == found


@pytest.mark.parametrize(
    ("true", "predicted", "f1"),
    [
        (["B-PER I-PER O"], ["B-PER I-PER O"], 1.0),
        (["B-PER I-PER O"], ["B-PER O O"], 0.0),  # a border is wrong, though two words of three are right
        (["B-PER I-PER O"], ["B-LOC I-LOC O"], 0.0),
        (["B-PER O B-LOC", "B-ORG O"], ["B-PER O O", "B-ORG B-ORG"], 2 * 2 / (3 + 3)),
        (["B-PER", "O"], ["O", "B-PER"], 0.0),  # sentences are not joined
        (["O O"], ["O O"], 0.0),
    ],
)
def test_f1_counts_whole_entities_over_all_sentences(
    true: list[str], predicted: list[str], f1: float
) -> None:
    assert entity_f1(map(str.split, true), map(str.split, predicted)) == pytest.approx(f1)


def test_a_score_ignores_tokens_that_begin_no_word() -> None:
    labels = torch.tensor([[-100, 1, -100, 2, 0, -100]])
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 5, 2, 0, 3]]), len(TAGS))
    outcome = EvalPrediction(predictions=logits.numpy(), label_ids=labels.numpy())
    assert score_of(outcome, TAGS) == {"score": 1.0}
    news = EvalPrediction(predictions=logits[0].numpy(), label_ids=torch.tensor([3, 1, 5, 0, 1, 0]).numpy())
    assert score_of(news, NEWS) == {"score": pytest.approx(3 / 6)}


def write_data(folder: Path, name: str, rows: dict[str, list[Any]], labels: Any) -> str:
    """Write rows as both data sets are on the Hub: Parquet of three splits, named by a card; return their name."""
    import datasets

    column = "label" if "label" in rows else "ner_tags"
    table = datasets.Dataset.from_dict(rows).cast_column(column, labels)
    files = {}
    for split in downstream.SPLITS:
        files[split] = f"{name}/{split}-00000-of-00001.parquet"
        (folder / name).mkdir(parents=True, exist_ok=True)
        table.to_parquet(folder / files[split])
    listed = "\n".join(f"  - split: {split}\n    path: {path}" for split, path in files.items())
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{listed}\n---\n")
    return f"{folder}:{name}"


def wikiann(folder: Path) -> str:
    import datasets

    rng = random.Random(0)
    tokens, tags = [], []
    for _ in range(24):
        name = rng.choice(["ঢাকা", "কলকাতা", "সিলেট"])
        tokens.append(["আমি", "আজ", name, "শহর", "যাই"])
        tags.append([0, 0, 5, 6, 0])
    rows = {"tokens": tokens, "ner_tags": tags, "langs": [["bn"] * 5] * 24, "spans": [["LOC: x"]] * 24}
    return write_data(folder / "wikiann", "bn", rows, datasets.List(datasets.ClassLabel(names=TAGS)))


def soham(folder: Path) -> str:
    import datasets

    rows = {"text": ["ঢাকা খেলায় জয়ী।", "নতুন ছবি আসছে।"] * 12, "label": [3, 4] * 12}
    return write_data(folder / "indic_glue", "sna.bn", rows, datasets.ClassLabel(names=NEWS))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    words = train_tokenizer(BENGALI, vocabulary=120, language="bn")
    torch.manual_seed(0)
    AlbertForPreTraining(albert_config(SIZES["tiny"], words)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("task", "write", "labels"), [("ner", wikiann, TAGS), ("ncc", soham, NEWS)])
def test_a_model_is_fine_tuned_and_scored_on_the_splits_of_the_data_set(
    task: str, write: Any, labels: list[str], pretrained: Path, tmp_path: Path
) -> None:
    score = evaluate(pretrained, task, data=write(tmp_path), settings=SETTINGS, folder=tmp_path / "tuned")
    assert (score.task, score.epochs, score.test_samples) == (task, 8, 24)
    assert score.percent == 100.0
    from transformers import AutoConfig

    saved = AutoConfig.from_pretrained(tmp_path / "tuned" / task)
    assert [saved.id2label[number] for number in range(len(labels))] == labels
    text = "আমি ঢাকা যাই"
    assert load_tokenizer(tmp_path / "tuned" / task)(text) == load_tokenizer(pretrained)(text)


@pytest.mark.slow
def test_fine_tuning_ends_early_when_the_validation_loss_no_longer_falls(
    pretrained: Path, tmp_path: Path
) -> None:
    settings = DownstreamSettings(learning_rate=1e-9, batch_size=8, micro_batch=4)
    score = evaluate(pretrained, "ncc", data=soham(tmp_path), settings=settings, folder=tmp_path)
    assert score.epochs == 1 + settings.patience


def test_a_row_is_cut_to_its_length_and_each_word_has_one_tag(pretrained: Path) -> None:
    words: Words = load_tokenizer(pretrained)
    row = {"tokens": ["আমি", "বাংলায়", "যাই"] * 50, "ner_tags": [0, 5, 0] * 50}
    coded = encode(row, words, TASKS["ner"], 32)
    assert len(coded["labels"]) == len(coded["input_ids"]) == 32
    counted = [label for label in coded["labels"] if label != -100]
    assert counted == row["ner_tags"][: len(counted)] and 0 < len(counted) < 32


@pytest.mark.slow
def test_data_of_another_layout_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "train.jsonl").write_text('{"text": "a", "label": 0}\n')
    with pytest.raises(ValueError, match="has no split validation, test"):
        load_splits(str(tmp_path / "one"), TASKS["ncc"])
    with pytest.raises(ValueError, match="has columns text, label: this task reads tokens and ner_tags"):
        load_splits(soham(tmp_path), TASKS["ner"])
    for split in downstream.SPLITS:
        (tmp_path / "one" / f"{split}.jsonl").write_text('{"text": "a", "label": 0}\n')
    with pytest.raises(ValueError, match="does not name its labels"):
        load_splits(str(tmp_path / "one"), TASKS["ncc"])
    with pytest.raises(ValueError, match="neither a folder of data nor a data set"):
        load_splits(str(tmp_path / "absent" / "data"), TASKS["ncc"])
    with pytest.raises(ValueError, match="'pos' is none of ner, ncc"):
        evaluate("model", "pos")


def test_scores_stand_beside_the_papers_and_what_was_not_measured_says_so() -> None:
    scores = [
        DownstreamScore("sahajbert", "ner", 91.234, 9, 1000),
        DownstreamScore("ai4bharat/indic-bert", "ncc", 75.0, 20, 1411),
    ]
    table = DownstreamTable(scores)
    rows = {row[0]: row[1:] for row in table.rows()}
    assert rows["sahajbert"] == ["not in the paper", "91.23", "not in the paper", "not measured"]
    assert rows["ai4bharat/indic-bert"] == ["92.52 ± 0.45", "not measured", "74.46 ± 1.91", "75.00"]
    assert rows["neuropark/sahajBERT"] == ["95.45 ± 0.53", "not measured", "91.97 ± 0.47", "not measured"]
    assert len(rows) == 5
    assert "not measured" in str(table) and "<table>" in table._repr_html_()
