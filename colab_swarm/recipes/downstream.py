"""Score a pretrained model on downstream tasks: named entities and news categories, as in DeDLOC's Table 2.

A model is fine-tuned on the train split of a data set. The loss on the validation split chooses the epoch, and
the test split gives the score. The settings are from DeDLOC's published scripts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from colab_swarm import markup
from colab_swarm.errors import require
from colab_swarm.recipes.batches import IGNORED
from colab_swarm.recipes.text import load_tokenizer

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerFast

Entity: TypeAlias = tuple[str, int, int]
"""The kind of an entity, the index of its first word, and the index after its last word."""
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class DownstreamTask:
    """A task of Table 2: its data set on the Hub (``name:configuration``), and the columns of the data set."""

    data: str
    inputs: str
    labels: str


TASKS = {
    "ner": DownstreamTask("unimelb-nlp/wikiann:bn", "tokens", "ner_tags"),
    "ncc": DownstreamTask("ai4bharat/indic_glue:sna.bn", "text", "label"),
}
"""Named entity recognition on WikiANN, and Soham's news category classification of IndicGLUE."""
PUBLISHED = {
    "neuropark/sahajBERT": {"ner": "95.45 ± 0.53", "ncc": "91.97 ± 0.47"},
    "FacebookAI/xlm-roberta-large": {"ner": "96.48 ± 0.22", "ncc": "90.05 ± 0.38"},
    "ai4bharat/indic-bert": {"ner": "92.52 ± 0.45", "ncc": "74.46 ± 1.91"},
    "neuralspace-reverie/indic-transformers-bn-roberta": {"ner": "82.32 ± 0.67", "ncc": "80.94 ± 0.45"},
}
"""DeDLOC's Table 2 as its authors' blog post prints it, in percent, by the models' names on the Hub."""
TABLE_COLUMNS = ("model", "entity F1: paper", "here", "accuracy: paper", "here")


@dataclass(frozen=True)
class DownstreamSettings:
    """Settings of the paper's fine-tuning. A batch is a sum of micro-batches, so a small GPU gives the same result.

    Training ends early if the validation loss has not fallen by ``threshold`` for ``patience`` epochs.
    """

    learning_rate: float = 1e-5
    max_length: int = 128
    epochs: int = 20
    patience: int = 3
    threshold: float = 0.01
    batch_size: int = 128
    micro_batch: int = 8
    seed: int = 42


def entities(tags: Sequence[str]) -> set[Entity]:
    """Return the entities of one sentence in IOB2, by the rules of seqeval and of CoNLL's script.

    A broken sequence also has entities: an ``I-`` tag begins an entity unless it continues one of its kind.
    """
    complete = set()
    kind = None
    first = 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, tagged = tag.partition("-")
        if kind is not None and (prefix != "I" or tagged != kind):
            complete.add((kind, first, place))
            kind = None
        if kind is None and prefix in ("B", "I"):
            kind = tagged
            first = place
    return complete


def entity_f1(true: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> float:
    """Return F1 over all entities of all sentences. An entity is correct if its kind and both borders are correct."""
    right = 0
    total = 0
    for true_tags, predicted_tags in zip(true, predicted, strict=True):
        wanted = entities(true_tags)
        present = entities(predicted_tags)
        right += len(wanted & present)
        total += len(wanted) + len(present)
    if not total:
        return 0.0
    return 2 * right / total


def load_splits(data: str, task: DownstreamTask) -> Any:
    """Return the three splits of a data set: a name on the Hub, or a folder of the same layout.

    Raises:
        ValueError: the data set cannot be loaded, or a split, a column or the labels' names are missing.
    """
    from datasets import load_dataset

    path, _, configuration = data.partition(":")
    try:
        splits = load_dataset(path, configuration or None)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{data!r} is neither a folder of data nor a data set on the Hub: {error}"
        ) from error
    missing = [name for name in SPLITS if name not in splits]
    require(not missing, f"{data!r} has no split {', '.join(missing)}: the evaluation needs all three")
    columns = splits["train"].column_names
    require(
        {task.inputs, task.labels} <= {*columns},
        f"{data!r} has columns {', '.join(columns)}: this task reads {task.inputs} and {task.labels}",
    )
    require(
        label_names(splits, task),
        f"the column {task.labels} of {data!r} does not name its labels: store them as ClassLabel of datasets",
    )
    return splits


def label_names(splits: Any, task: DownstreamTask) -> list[str]:
    """Return the labels' names in the order of their numbers; empty if the data set has none."""
    labels = splits["train"].features[task.labels]
    label = getattr(labels, "feature", labels)  # the labels may be in a list
    return list(getattr(label, "names", ()))


def encode(
    row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast", task: DownstreamTask, max_length: int
) -> dict[str, Any]:
    """Return a row as inputs of a model. A word's first token has the word's tag; its other tokens are `IGNORED`."""
    inputs = row[task.inputs]
    label = row[task.labels]
    by_word = isinstance(inputs, list)
    coded = tokenizer(inputs, is_split_into_words=by_word, truncation=True, max_length=max_length)
    if not by_word:
        return {**coded, "labels": label}
    tags = []
    before = None
    for word in coded.word_ids():
        if word is None or word == before:
            tags.append(IGNORED)
        else:
            tags.append(label[word])
        before = word
    return {**coded, "labels": tags}


def score_of(outcome: "EvalPrediction", names: Sequence[str]) -> dict[str, float]:
    """Return accuracy for labels of shape (N,), and entity F1 for tags (N, words) by their ``names``."""
    labels = outcome.label_ids
    predicted = outcome.predictions.argmax(-1)
    if labels.ndim == 1:
        return {"score": float((predicted == labels).mean())}
    true_tags = []
    predicted_tags = []
    for row, predicted_row in zip(labels, predicted, strict=True):
        counted = row != IGNORED
        true_tags.append([names[label] for label in row[counted]])
        predicted_tags.append([names[label] for label in predicted_row[counted]])
    return {"score": entity_f1(true_tags, predicted_tags)}


@dataclass(frozen=True)
class DownstreamScore:
    """The score of one model at one task, in percent, on ``test_samples`` after ``epochs`` of fine-tuning."""

    model: str
    task: str
    percent: float
    epochs: int
    test_samples: int


def evaluate(
    model: str | Path,
    task: str = "ner",
    *,
    data: str = "",
    settings: DownstreamSettings | None = None,
    folder: str | Path = "finetuned",
) -> DownstreamScore:
    """Fine-tune a pretrained model on a task of DeDLOC's Table 2, and return its score on the test split.

    Args:
        model: a folder with model and tokenizer, or a name on the Hub.
        task: ``"ner"``, named entities by entity F1; or ``"ncc"``, news categories by accuracy.
        data: a data set on the Hub (``name:configuration``) or a folder of the same layout; empty: the paper's data.
        settings: settings of the fine-tuning; None: the paper's settings.
        folder: where the fine-tuned model and its tokenizer are saved, in a folder with the task's name.

    Raises:
        ValueError: the task is unknown, or the model or the data cannot be used.
    """
    require(task in TASKS, f"task={task!r} is none of {', '.join(TASKS)}")
    import transformers as hf

    chosen = TASKS[task]
    settings = settings or DownstreamSettings()
    splits = load_splits(data or chosen.data, chosen)
    names = label_names(splits, chosen)
    tokenizer = load_tokenizer(model)
    options = {"tokenizer": tokenizer, "task": chosen, "max_length": settings.max_length}
    rows = splits.map(encode, fn_kwargs=options, remove_columns=splits["train"].column_names)
    if isinstance(rows["train"][0]["labels"], list):
        kind = hf.AutoModelForTokenClassification
        collator = hf.DataCollatorForTokenClassification
    else:
        kind = hf.AutoModelForSequenceClassification
        collator = hf.DataCollatorWithPadding
    gpus = max(1, torch.cuda.device_count())
    hf.set_seed(settings.seed)
    with TemporaryDirectory() as checkpoints:
        arguments = hf.TrainingArguments(
            checkpoints,
            learning_rate=settings.learning_rate,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.micro_batch,
            gradient_accumulation_steps=max(1, settings.batch_size // (gpus * settings.micro_batch)),
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            save_only_model=True,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            report_to="none",
            seed=settings.seed,
        )
        trainer = hf.Trainer(
            kind.from_pretrained(str(model), id2label=dict(enumerate(names))),
            arguments,
            data_collator=collator(tokenizer),
            processing_class=tokenizer,
            train_dataset=rows["train"],
            eval_dataset=rows["validation"],
            compute_metrics=partial(score_of, names=names),
            callbacks=[hf.EarlyStoppingCallback(settings.patience, settings.threshold)],
        )
        trainer.train()
        epochs = round(trainer.state.epoch)
        results = trainer.evaluate(rows["test"])
    trainer.save_model(str(Path(folder) / task))
    return DownstreamScore(str(model), task, 100 * results["eval_score"], epochs, len(rows["test"]))


@dataclass(frozen=True)
class DownstreamTable:
    """Scores compared with DeDLOC's Table 2, in percent: a table in a notebook, text when printed."""

    scores: Sequence[DownstreamScore]

    def __str__(self) -> str:
        return "\n".join(markup.aligned([TABLE_COLUMNS, *self.rows()]))

    def _repr_html_(self) -> str:
        return markup.facts("Beside DeDLOC's Table 2, in percent", {}, TABLE_COLUMNS, self.rows())

    def rows(self) -> list[list[str]]:
        """Return a row for each model: its name, then for each task the paper's figure and ours."""
        measured = {(score.model, score.task): f"{score.percent:.2f}" for score in self.scores}
        models = [score.model for score in self.scores] + list(PUBLISHED)
        rows = []
        for model in dict.fromkeys(models):
            row = [model]
            for task in TASKS:
                row.append(PUBLISHED.get(model, {}).get(task, "not in the paper"))
                row.append(measured.get((model, task), "not measured"))
            rows.append(row)
        return rows
