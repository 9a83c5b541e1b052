"""``python -m colab_swarm.recipes.finetune ner MODEL DATA`` or ``… classify MODEL DATA``: see ``--help``."""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from colab_swarm.recipes.finetune.data import Columns, load_examples
from colab_swarm.recipes.finetune.tasks import Classification, Tagging, Task
from colab_swarm.recipes.finetune.training import FineTuned, FineTuning, finetune

TASKS: dict[str, type[Task]] = {"ner": Tagging, "classify": Classification}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune once for each seed and print the measures."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = FineTuning(
        epochs=options.epochs, batch_size=options.batch_size, lr=options.lr, max_length=options.max_length
    )
    columns = Columns(options.text_column, options.label_column)
    results = []
    try:
        for seed in options.seeds:
            splits = load_examples(options.data, columns, seed=seed)
            folder = Path(options.output) / f"seed-{seed}"
            results.append(
                finetune(TASKS[options.task](), options.model, splits, folder, replace(settings, seed=seed))
            )
            print(f"{folder}: best epoch {results[-1].best_epoch}")
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    print(*summary(results), sep="\n")


def summary(results: Sequence[FineTuned]) -> list[str]:
    """One line per measure: its mean and standard deviation over the seeds, in percent."""
    lines = []
    for split in ("validation", "test"):
        for name in getattr(results[0], split):
            values = [100 * getattr(result, split)[name] for result in results]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            lines.append(f"{split} {name}: {statistics.mean(values):.2f}{spread} %")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m colab_swarm.recipes.finetune", description="Fine-tune a pretrained model."
    )
    parser.add_argument("task", choices=TASKS, help="ner: tag the words of a text; classify: label it")
    parser.add_argument("model", help="folder with model and tokenizer, or a name on the Hugging Face Hub")
    parser.add_argument(
        "data",
        help="file (.jsonl, .csv, .tsv, CoNLL), folder with train.*, validation.*, test.*, or hub name",
    )
    parser.add_argument("--output", default="finetuned", help="folder for the best models and their measures")
    parser.add_argument("--epochs", type=int, default=FineTuning.epochs)
    parser.add_argument("--batch-size", type=int, default=FineTuning.batch_size)
    parser.add_argument("--lr", type=float, default=FineTuning.lr)
    parser.add_argument("--max-length", type=int, default=FineTuning.max_length, help="tokens of a text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="train once with each")
    parser.add_argument("--text-column", help="if it has no usual name")
    parser.add_argument("--label-column", help="if it has no usual name")
    return parser


if __name__ == "__main__":
    main()
