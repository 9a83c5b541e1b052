from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.recipes.finetune.metrics import accuracy, entities, entity_f1, macro_f1

TAGS = st.lists(st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "E-LOC", "S-PER"]), max_size=12)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-PER I-PER O B-LOC", {(0, 2, "PER"), (3, 4, "LOC")}),
        ("B-PER B-PER I-PER", {(0, 1, "PER"), (1, 3, "PER")}),
        ("O I-PER I-LOC", {(1, 2, "PER"), (2, 3, "LOC")}),  # as conlleval reads tags that begin inside
        ("B-PER I-PER E-PER S-LOC I-LOC", {(0, 3, "PER"), (3, 4, "LOC"), (4, 5, "LOC")}),
        ("O O", set()),
    ],
)
def test_entities_are_read_from_tags(tags: str, found: set[tuple[int, int, str]]) -> None:
    assert entities(tags.split()) == found


@given(TAGS)
def test_entities_never_overlap_and_right_tags_score_one(tags: list[str]) -> None:
    spans = sorted(entities(tags))
    assert all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(spans))
    assert sum(end - start for start, end, _ in spans) == sum(tag != "O" for tag in tags)
    assert entity_f1([tags], [tags]) == 1.0


def test_an_entity_counts_only_with_both_borders_and_its_kind() -> None:
    expected = [["B-PER", "I-PER", "O"], ["B-LOC", "O", "B-LOC"]]
    predicted = [["B-PER", "O", "O"], ["B-LOC", "O", "B-PER"]]
    assert entity_f1(expected, predicted) == pytest.approx(
        1 / 3
    )  # one of three expected, one of three predicted


def test_accuracy_and_macro_f1_of_a_confusion_done_by_hand() -> None:
    expected, predicted = list("aaaabb"), list("aaabbc")
    assert accuracy(expected, predicted) == pytest.approx(4 / 6)
    by_hand = (2 * 3 / (3 + 4) + 2 * 1 / (2 + 2) + 0) / 3
    assert macro_f1(expected, predicted) == pytest.approx(by_hand)
