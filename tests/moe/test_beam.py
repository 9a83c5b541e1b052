from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.moe.grid import Index, Mask, beam_search
from colab_swarm.tensors.codecs import Floats

Scores = list[Floats]


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], set[Index], Scores, int]:
    """Sides, live experts, scores with many ties, k."""
    sides = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    everywhere = list(itertools.product(*map(range, sides)))
    live = set(draw(st.lists(st.sampled_from(everywhere), max_size=20)))
    samples = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    scores = [rng.integers(-3, 4, (samples, side)).astype(np.float32) for side in sides]
    return sides, live, scores, draw(st.integers(1, 5))


def children_of(sides: tuple[int, ...], live: set[Index], prefix: Index) -> Mask:
    """Return what up-to-date records in the DHT would say."""
    depth = len(prefix)
    mask = np.zeros(sides[depth], np.bool_)
    mask[[index[depth] for index in live if index[:depth] == prefix]] = True
    return mask


def value(scores: Scores, sample: int, index: Index) -> float:
    return float(sum(scores[i][sample, j] for i, j in enumerate(index)))


def top(scores: Scores, sample: int, candidates: set[Index], k: int) -> list[Index]:
    return sorted(candidates, key=lambda index: (-value(scores, sample, index), index))[:k]


def paper_beam(sides: tuple[int, ...], live: set[Index], scores: Scores, sample: int, k: int) -> list[Index]:
    """Algorithm 1 as printed."""
    beam: list[Index] = [()]
    for depth in range(1, len(sides) + 1):
        alive = {index[:depth] for index in live if index[: depth - 1] in beam}
        beam = top(scores, sample, alive, k)
    return beam


def replacing_beams(children: Callable[[Index], Mask], scores: Scores, k: int) -> list[list[Index]]:
    """Algorithm 1, repeated without the prefixes of any sample's beam that turned out to have no live child."""
    barren: set[Index] = set()
    while True:
        known, beams = len(barren), []
        for sample in range(len(scores[0])):
            beam: list[Index] = [()]
            for _ in scores:
                below = {p: {(*p, int(j)) for j in np.flatnonzero(children(p))} - barren for p in beam}
                barren |= {prefix for prefix, live in below.items() if prefix and not live}
                beam = top(scores, sample, set().union(*below.values()), k)
            beams.append(beam)
        if len(barren) == known:
            return beams


@settings(max_examples=50, deadline=None)
@given(problems())
def test_a_beam_of_k_matches_the_paper(problem: tuple[tuple[int, ...], set[Index], Scores, int]) -> None:
    sides, live, scores, k = problem
    found, unknown = beam_search(scores, k, lambda prefix: children_of(sides, live, prefix))
    assert not unknown
    assert found == [paper_beam(sides, live, scores, n, k) for n in range(len(scores[0]))]


@settings(max_examples=50, deadline=None)
@given(problems())
def test_look_ups_in_steps_give_the_same_result_after_one_wait_per_dimension(
    problem: tuple[tuple[int, ...], set[Index], Scores, int],
) -> None:
    sides, live, scores, k = problem
    known: dict[Index, Mask] = {}
    waits = 0
    while unknown := (found := beam_search(scores, k, known.get))[1]:
        assert not known.keys() & set(unknown)
        known |= {prefix: children_of(sides, live, prefix) for prefix in unknown}
        waits += 1
    assert waits <= len(sides)
    assert found == beam_search(scores, k, lambda prefix: children_of(sides, live, prefix))


@settings(max_examples=50, deadline=None)
@given(problems(), st.data())
def test_stale_prefixes_are_replaced_by_the_next_best(
    problem: tuple[tuple[int, ...], set[Index], Scores, int], data: st.DataObject
) -> None:
    sides, live, scores, k = problem
    dead = data.draw(st.sets(st.sampled_from(sorted(live)))) if live else set()

    def children(prefix: Index) -> Mask:
        """Rows are up to date, prefixes above them still contain dead experts."""
        return children_of(sides, live - dead if len(prefix) == len(sides) - 1 else live, prefix)

    found = beam_search(scores, k, children)[0]
    assert all(index in live - dead for best in found for index in best)
    assert found == replacing_beams(children, scores, k)


def test_a_full_grid_is_searched_after_one_wait() -> None:
    sides = (8, 8, 8)
    live = set(itertools.product(*map(range, sides)))
    rng = np.random.default_rng(0)
    scores = [rng.standard_normal((64, side)).astype(np.float32) for side in sides]
    unknown = beam_search(scores, 4, lambda _: None)[1]
    known = {prefix: children_of(sides, live, prefix) for prefix in unknown}
    assert not beam_search(scores, 4, known.get)[1]


def test_nan_is_the_worst_score() -> None:
    scores = [np.array([[np.nan, 1.0, np.inf, -np.inf]], np.float32)]
    assert beam_search(scores, 4, lambda _: np.ones(4, np.bool_))[0] == [[(2,), (1,), (0,), (3,)]]


def test_an_empty_grid_or_batch_gives_an_empty_result() -> None:
    assert beam_search([np.zeros((2, 3), np.float32)], 1, lambda _: np.zeros(3, np.bool_))[0] == [[], []]
    assert beam_search([np.zeros((0, 3), np.float32)], 1, lambda _: np.ones(3, np.bool_))[0] == []
