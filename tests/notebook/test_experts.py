"""The experts panel."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from colab_swarm.moe.grid import Grid
from colab_swarm.moe.watch import ExpertsListing, ExpertsSnapshot, HostOfExperts, LiveExpert, ServedExpert
from colab_swarm.notebook.expert_grid import cells_of, render_svg
from colab_swarm.notebook.expert_grid import render_text as grid_text
from colab_swarm.notebook.experts import MAX_ROWS, render_html, render_text, summary

GRID = Grid("ffn", (2, 4))
ALICE, BOB = "a1a1a1a1", "b2b2b2b2"


def live(uid: str, share: float | None, host: str = ALICE) -> LiveExpert:
    return LiveExpert(uid, host, host == BOB, 120, 12.3, share)


LISTING = ExpertsListing(
    GRID,
    live=(live("ffn.0.0", 0.0), live("ffn.0.1", 0.1), live("ffn.1.2", 0.9, BOB)),
    hosts=(HostOfExperts(ALICE, False, 2, 0.1, 0.045), HostOfExperts(BOB, True, 1, 0.9, None)),
    left_out=("ffn.1.1",),
    dead=("ffn.1.3",),
)
SERVED = (ServedExpert("ffn.1.2", 120, 64, 31.8, 2.5, 79.6, 0.0042, 0.12),)
SNAPSHOT = ExpertsSnapshot(LISTING, 4.0, SERVED)


def full(*sides: int, share: float = 0.0) -> ExpertsListing:
    """All places of a grid live, at alice."""
    grid = Grid("ffn", sides)
    return ExpertsListing(grid, tuple(live(grid.uid(i), share) for i in grid))


def test_a_line_tells_how_many_live_and_what_this_peer_does() -> None:
    assert summary(SNAPSHOT) == (
        "ffn[2 x 4]: 3 of 8 places live on 2 hosts, 1 left out, 1 dead, 1 here, 80 samples/s"
    )
    assert summary(ExpertsSnapshot(ExpertsListing(GRID))) == "ffn[2 x 4]: asking the swarm for its experts"
    assert summary(replace(SNAPSHOT, over=True)).endswith("; left")


def test_the_text_has_the_map_the_hosts_and_this_peer_s_experts() -> None:
    assert render_text(SNAPSHOT).splitlines()[1:] == [
        "  ! not called for a while, for they failed this peer: ffn.1.1",
        "   0  1  .  .",
        "   .  ! [3] x",
        "  . nobody  0-4 use  [ ] mine  ! left out  x dead",
        "  host           experts  of the updates  round trip",
        "  a1a1a1a1       2        10%             45 ms",
        "  b2b2b2b2 (me)  1        90%             –",
        "  my expert  step  waiting  batch  calls/s  samples/s  latency, p50 / p99",
        "  ffn.1.2    120   64       32     2.5      80         4.2 ms / 120 ms",
    ]


def test_the_html_is_sound_and_says_the_same() -> None:
    tree = ElementTree.fromstring(render_html(SNAPSHOT))
    told = [title.text for title in tree.iter("title")]
    assert told == [
        "ffn.0.0 at a1a1a1a1: step 120, 0.0%, 12 s old",
        "ffn.0.1 at a1a1a1a1: step 120, 10.0%, 12 s old",
        "ffn.1.1: left out",
        "ffn.1.2 at b2b2b2b2 (me): step 120, 90.0%, 12 s old",
        "ffn.1.3: dead",
    ]
    shown = " ".join(tree.itertext())
    for word in ("left out", "dead", "mine", "4.2 ms / 120 ms", "45 ms", "about an even share"):
        assert word in shown
    assert all(svg.get("role") or svg.get("aria-hidden") for svg in tree.iter("svg"))


def test_even_use_is_the_middle_step() -> None:
    cells = cells_of(full(2, 4, share=1 / 8))
    assert {cells.level(cell) for cell in cells.cells.values()} == {2}


@pytest.mark.parametrize("sides", [(1,), (300,), (16, 16), (64, 64), (3, 4, 5), (9, 30, 30), (5, 6, 7, 8)])
def test_every_place_is_in_one_cell_and_large_grids_stay_small(sides: tuple[int, ...]) -> None:
    listing = full(*sides)
    cells = cells_of(listing).cells.values()
    assert sum(cell.places for cell in cells) == listing.grid.size == sum(len(cell.live) for cell in cells)
    page = render_svg(listing)
    width = re.match(r'<svg class="blue" width="(\d+)"', page)
    assert width and int(width[1]) <= 770
    assert len(page) < 100_000 and max(map(len, grid_text(listing).splitlines())) < 125


def test_merged_cells_count_what_is_in_them() -> None:
    listing = ExpertsListing(Grid("ffn", (64, 64)), (live("ffn.0.0", 1.0, BOB),), dead=("ffn.0.1",))
    assert cells_of(listing).cells[0, 0].told() == "ffn.0-3.0-3: 1 of 16 live, 100.0%, 1 dead, 1 mine"
    assert "a cell is 16 places" in grid_text(listing) and "a cell is" not in grid_text(full(4, 4))


def test_a_listing_is_drawn_once() -> None:
    assert render_svg(LISTING) is render_svg(LISTING)


def test_a_crowd_is_counted_not_listed() -> None:
    crowd = replace(LISTING, hosts=(HostOfExperts(ALICE, False, 1, None, None),) * (MAX_ROWS + 7))
    for shown in (
        render_text(replace(SNAPSHOT, listing=crowd)),
        render_html(replace(SNAPSHOT, listing=crowd)),
    ):
        assert "and 7 more hosts" in shown


def test_what_is_wrong_is_said_and_never_becomes_markup() -> None:
    faulty = ExpertsSnapshot(ExpertsListing(GRID), 1.0, fault="<script>\x1b[2J")
    assert "swarm.host_experts" in render_text(faulty) and "swarm.host_experts" in render_html(faulty)
    assert "<script" not in render_html(faulty) and "\x1b" not in render_html(faulty) + render_text(faulty)
