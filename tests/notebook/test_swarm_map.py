"""The map of the swarm: links of this peer, in HTML and in text."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.notebook.swarm_map import MAX_PEERS, WIDTH, draw
from colab_swarm.snapshot import PeerRow
from tests.notebook.test_views import ALICE, BOB, SNAPSHOT, parsed

LINKED = dataclasses.replace(
    BOB, role="trainer", samples_per_s=9.0, rtt_s=0.0234, connected="direct", upload_bps=2e7, download_bps=1e9
)
CAROL = dataclasses.replace(
    BOB,
    name="carol",
    id="ca401000",
    rtt_s=0.2,
    connected=f"relayed by {BOB.id}",
    upload_bps=2e9,
    download_bps=2e9,
)
DAVE = dataclasses.replace(BOB, name="dave", id="dae00000", role="paused")
SWARM = dataclasses.replace(SNAPSHOT, peers=(ALICE, DAVE, LINKED, CAROL))


def test_text_is_an_aligned_list_of_the_links() -> None:
    assert draw(SWARM).text().splitlines() == [
        "links of demo: 2 links, 1 of them relayed",
        "  ● alice (me)  training",
        "  ● bob         training     23 ms   direct   20 Mbit/s",
        "  ◔ carol       catching up  200 ms  via bob  2 Gbit/s",
        "  ‖ dave        paused               no link",
    ]


def test_the_html_has_the_same_content() -> None:
    texts = {text.text for text in parsed(draw(SWARM).html()).iter("text")}
    assert {"bob", "23 ms, direct", "200 ms, via bob", "no link", "alice (me)"} <= texts
    titles = {title.text for title in parsed(draw(SWARM).html()).iter("title")}
    assert {"23 ms, direct, 20 Mbit/s", "200 ms, via bob, 2 Gbit/s"} <= titles


def test_a_faster_link_is_wider_and_a_relayed_one_dashed() -> None:
    direct, relayed = parsed(draw(SWARM).html()).iter("path")
    assert float(direct.attrib["stroke-width"]) < float(relayed.attrib["stroke-width"])
    assert "stroke-dasharray" in relayed.attrib and "stroke-dasharray" not in direct.attrib
    bob = direct.attrib["d"].partition("L")[2]
    assert relayed.attrib["d"].startswith(f"M{bob}L")  # it begins at the relay


def test_a_peers_state_has_a_symbol_and_a_word() -> None:
    shown = "".join(parsed(draw(dataclasses.replace(SWARM, paused=True)).html()).itertext())
    assert "‖ paused" in shown and "◔ catching up" in shown and "● training" in shown


def test_a_lone_peer_has_a_map_too() -> None:
    alone = dataclasses.replace(SNAPSHOT, peers=(ALICE,))
    assert "0 links" in draw(alone).text()
    assert len(list(parsed(draw(alone).html()).iter("circle"))) == 1


def test_many_peers_are_cut_and_counted_and_their_labels_stay_apart() -> None:
    crowd = dataclasses.replace(SNAPSHOT, peers=(ALICE, *[LINKED] * 499))
    assert f"… and {499 - MAX_PEERS} more peers" in draw(crowd).text()
    page = parsed(draw(crowd).html())
    circles = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in page.iter("circle")]
    assert len(circles) == MAX_PEERS + 1 and "499 links" in draw(crowd).text()
    for side in (True, False):
        heights = sorted(y for x, y in circles if x != WIDTH / 2 and (x > WIDTH / 2) is side)
        assert min(b - a for a, b in itertools.pairwise(heights)) >= 26


rows = st.builds(
    PeerRow,
    name=st.text(max_size=60),
    id=st.text(max_size=10),
    role=st.text(max_size=60),
    step=st.integers(),
    samples_per_s=st.floats(),
    samples=st.floats(),
    reachable=st.none(),
    me=st.booleans(),
    rtt_s=st.none() | st.floats(),
    connected=st.text(max_size=60) | st.text(max_size=10).map("relayed by {}".format),
    upload_bps=st.none() | st.floats(),
    download_bps=st.none() | st.floats(),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(rows, max_size=5))
def test_any_peers_can_be_drawn(peers: list[PeerRow]) -> None:
    odd = dataclasses.replace(SNAPSHOT, peers=tuple(peers))
    usual = {element.tag for element in parsed(draw(SWARM).html()).iter()}
    assert {element.tag for element in parsed(draw(odd).html()).iter()} <= usual
    assert len(draw(odd).text().split("\n")) <= len(peers) + 2
