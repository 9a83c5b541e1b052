from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.moe.grid import Grid

SIDES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(SIDES, st.data())
def test_a_uid_leads_back_to_its_index(sides: list[int], data: st.DataObject) -> None:
    grid = Grid.of("layer-1.ffn", sides)
    index = tuple(data.draw(st.integers(0, side - 1)) for side in sides)
    assert grid.index(grid.uid(index)) == index
    assert index in set(grid) and len(set(grid)) == grid.size


@pytest.mark.parametrize(
    "uid", ["ffn.1", "ffn.1.2.3", "ffn.1.9", "ffn.1.02", "ffn.1.-1", "ffn.1.²", "gfn.1.2", "", "ffn.1."]
)
def test_a_name_outside_the_grid_is_refused(uid: str) -> None:
    with pytest.raises(ValueError, match="not an expert of"):
        Grid("ffn", (2, 9)).index(uid)


@pytest.mark.parametrize("prefix", ["", "a b", "ffn.1", "ffn.", "x" * 200])
def test_a_prefix_that_could_be_taken_for_an_expert_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="names no experts"):
        Grid(prefix, (2,))


@pytest.mark.parametrize("sides", [(), (0,), (2, 2, 2, 2, 2), (10_000,)])
def test_a_grid_has_sensible_sides(sides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="dimensions"):
        Grid("ffn", sides)
