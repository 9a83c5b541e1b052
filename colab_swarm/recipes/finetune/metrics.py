"""Accuracy, macro-F1, and F1 of named entities as the CoNLL shared tasks count them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Entity: TypeAlias = tuple[int, int, str]
"""First word, one past the last, kind."""


def accuracy(expected: Sequence[str], predicted: Sequence[str]) -> float:
    """Share of labels that are right."""
    return sum(a == b for a, b in zip(expected, predicted, strict=True)) / len(expected)


def macro_f1(expected: Sequence[str], predicted: Sequence[str]) -> float:
    """The mean over all labels, expected or predicted, of each one's F1: rare labels count like frequent ones."""
    labels = sorted({*expected, *predicted})
    pairs = list(zip(expected, predicted, strict=True))
    return sum(
        f1(pairs.count((label, label)), sum(b == label for _, b in pairs), sum(a == label for a, _ in pairs))
        for label in labels
    ) / len(labels)


def entity_f1(expected: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """F1 over entities of all sentences; one counts only if its borders and its kind are right."""
    pairs = [(entities(a), entities(b)) for a, b in zip(expected, predicted, strict=True)]
    return f1(sum(len(a & b) for a, b in pairs), sum(len(b) for _, b in pairs), sum(len(a) for a, _ in pairs))


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities that BIO or BIOES tags spell; an inside tag that fits nothing before it begins one."""
    found: set[Entity] = set()
    start, kind = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, new = tag.partition("-")
        if kind and (new != kind or prefix in {"B", "S", "U"}):
            found.add((start, place, kind))
            kind = ""
        if new and not kind:
            start, kind = place, new
        if kind and prefix in {"E", "L", "S", "U"}:
            found.add((start, place + 1, kind))
            kind = ""
    return found


def f1(right: int, predicted: int, expected: int) -> float:
    """The harmonic mean of precision and recall; 1 if there was nothing to find and nothing was found."""
    return 2 * right / (predicted + expected) if predicted + expected else 1.0
