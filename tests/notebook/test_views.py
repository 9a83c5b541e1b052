import dataclasses
import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.notebook.views import MAX_ON_MAP, draw, draw_map, metrics, summary
from colab_swarm.snapshot import ContributionRow, PeerRow, PeerTable, SessionTime, SwarmSnapshot

ALICE = PeerRow("alice", "a11ce000", "trainer", 12, 20.0, 64.0, reachable=True, me=True)
BOB = PeerRow("bob", "b0b00000", "catching up", 9, 0.0, 0.0, reachable=False, me=False)
LOSSES = ((1, 8.25), (6, 7.0), (12, 6.5))
WHAT = {"run": "demo", "me": "alice", "reached": "accepts connections", "state": "training"}
SPEED = {"samples_per_s": 20.0, "target_batch_size": 256.0, "accumulated": 64.0}
MOVED = {"sent_bytes": 1_234_567, "received_bytes": 999, "uptime_s": 3_725.0}
LATEST = {"step": 12, "loss_history": LOSSES, "log": ("bob joined",)}
SNAPSHOT = SwarmSnapshot(**WHAT, **SPEED, **MOVED, **LATEST, peers=(ALICE, BOB))


def parsed(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(markup.replace("<br>", "<br/>"))


def tags(markup: str) -> set[str]:
    return {element.tag for element in parsed(markup).iter()}


def test_text_shows_the_facts_line_by_line() -> None:
    assert draw(SNAPSHOT).text().splitlines() == [
        "alice: accepts connections, connected for 62 min",
        "demo: training, step 12, 20.0 samples/s from 1 of 2 peers, "
        "64 of 256 samples for the next step, loss 6.500 (first 8.250)",
        "  all peers: 20.0 samples/s; sent: 1.23 MB; received: 999 B",
        "  [#####...............] next step: 64 of 256 samples; no peer is training; waiting for samples",
        "  peer        role         step  samples/s  samples  averaged for others  RTT  link  reachable",
        "  alice (me)  trainer      12    20.0       64       –                               yes",
        "  bob         catching up  9     –          –        –                               outgoing only",
        "  bob joined",
    ]


def words(snapshot: SwarmSnapshot) -> str:
    return " ".join(" ".join(parsed(draw(snapshot).html()).itertext()).split())


def test_html_shows_the_same_facts_without_script_or_outside_resource() -> None:
    shown = words(SNAPSHOT)
    facts = ("demo: training, step 12", "64 of 256 samples", "6.500", "bob catching", "outgoing only")
    assert [fact for fact in (*facts, "bob joined") if fact not in shown] == []
    page = draw(SNAPSHOT).html()
    assert not re.search(r"<script|https?:|src=|url\(| on\w+=", page)
    assert (
        'aria-label="next step: 64 of 256 samples; no peer is training; waiting' in page
        and "width:25.0%" in page
    )


def test_speed_share_and_links_are_shown_in_both() -> None:
    bob = dataclasses.replace(BOB, rtt_s=0.0234, connected="relayed by a11ce000")
    trained = dataclasses.replace(
        SNAPSHOT,
        peers=(ALICE, bob),
        own_samples_per_s=20.5,
        computing=0.934,
        eta_s=9.6,
        last_share=0.25,
        leaderboard=(
            ContributionRow("bob", "b0b00000", 1024.0, 2e6, me=False),
            ContributionRow("carol", "ca401000", 512.0, 1e6, me=False),
        ),
    )
    facts = ("step 13 in about 10 s", "20.5 samples/s", "93% of the time", "25% of the last step")
    facts += ("23 ms", "via alice", "1,024", "2 MB", "carol away")
    for shown in (words(trained), " ".join(draw(trained).text().split())):
        assert [fact for fact in facts if fact not in shown] == []
    rows = [line.split() for line in draw(trained).text().splitlines()]
    assert ["carol", "away", "–", "–", "512", "1", "MB"] in rows  # it left, and stays credited


def test_peers_of_one_name_are_told_apart_and_others_need_no_id() -> None:
    twins = dataclasses.replace(SNAPSHOT, peers=(ALICE, BOB, dataclasses.replace(BOB, id="b2b00000")))
    assert all(one in words(twins) for one in ("bob b0b0", "bob b2b0", "alice (me)"))
    assert "b0b0" not in words(SNAPSHOT)


ME = dataclasses.replace(ALICE, role="peer", step=0, samples_per_s=0.0, samples=0.0)
LINKED_ONLY = dataclasses.replace(ME, name="carol", id="ca401000", me=False)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"silent": "bob, silent for 4 s"}, "bob, silent for 4 s"),
        ({"peers": (dataclasses.replace(ALICE, role="catching up"),)}, "the run's state from another peer"),
        ({"accumulated": 256.0}, "the averaging"),
        ({"step": 0}, "samples of the first round"),
        ({"step": 0, "accumulated": 300.0}, "the averaging of the first round"),
        ({"target_batch_size": 0.0, "peers": (ME,)}, "the first other peer"),
        ({"target_batch_size": 0.0, "peers": (ME, LINKED_ONLY)}, "a peer that trains"),
    ],
)
def test_the_view_says_what_the_run_waits_for(changes: dict[str, object], waits: str) -> None:
    shown = dataclasses.replace(SNAPSHOT, **changes)
    assert f"waiting for {waits}" in words(shown) and f"waiting for {waits}" in draw(shown).text()


def test_a_peer_that_has_left_waits_for_nothing() -> None:
    shown = dataclasses.replace(SNAPSHOT, state="left", accumulated=256.0)
    for text in (draw(SNAPSHOT).text(), summary(SNAPSHOT)):
        assert "64 of 256" in text
    for text in (draw(shown).text(), summary(shown)):
        assert "left, step 12" in text and "of 256" not in text and "waiting" not in text


def test_what_is_not_known_yet_is_no_zero() -> None:
    fresh = {"step": 0, "samples_per_s": 0.0, "loss_history": (), "peers": (ME, LINKED_ONLY)}
    shown = dataclasses.replace(SNAPSHOT, **fresh)
    assert summary(shown) == "demo: training, before the first round, 64 of 256 samples for the next step"
    assert "step 0" not in words(shown) and "0.0" not in words(shown)


@pytest.mark.parametrize(("hours", "soon"), [(3, False), (11.5, True)])
def test_the_view_warns_before_the_session_ends_and_of_a_pause(hours: float, soon: bool) -> None:
    session = SessionTime("Colab", hours * 3600, 12 * 3600.0, leaves_s=11 * 3600.0 + 50 * 60)
    snapshot = dataclasses.replace(SNAPSHOT, session=session)
    clock = "of 12.0 h; leaves at 11.8 h"
    assert clock in words(snapshot) and clock in draw(snapshot).text()
    assert ('class="warn"' in draw(snapshot).html()) is soon
    paused = dataclasses.replace(SNAPSHOT, paused=True)
    assert "Paused: your work has stopped" in words(paused) and "Paused: your" in draw(paused).text()


@settings(max_examples=40)
@given(st.floats(), st.floats(), st.floats())
def test_no_number_breaks_a_view(one: float, other: float, third: float) -> None:
    alice = dataclasses.replace(ALICE, samples_per_s=one, samples=other, rtt_s=third)
    losses = ((1, one), (2, other), (3, third))
    speed = {"samples_per_s": one, "target_batch_size": other, "accumulated": third}
    speed |= {"uptime_s": one, "own_samples_per_s": other, "eta_s": third, "last_share": one}
    speed["session"] = SessionTime("Colab", one, other, third)
    odd = dataclasses.replace(SNAPSHOT, peers=(alice,), loss_history=losses, **speed)
    parsed(draw(odd).html())
    assert draw(odd).text() and summary(odd)


@pytest.mark.parametrize("number", [0, 1, 20, 500])
def test_any_number_of_peers_is_shown_in_a_bounded_page(number: int) -> None:
    long_name = dataclasses.replace(BOB, name="x" * 10_000, role="y" * 10_000)
    crowd = dataclasses.replace(SNAPSHOT, peers=(long_name,) * number)
    assert len(draw(crowd).html()) < 20_000 and len(draw(crowd).text()) < 20_000


@settings(max_examples=60)
@given(
    st.text(max_size=60)
    | st.sampled_from(["<script>alert(1)</script>", '"><img src=x>', "&lt;", "a\x1b[2Jb\n"])
)
def test_texts_of_peers_are_escaped(words: str) -> None:
    bob = dataclasses.replace(BOB, name=words, role=words)
    texts = dict.fromkeys(("run", "me", "state"), words)
    hostile = dataclasses.replace(SNAPSHOT, peers=(ALICE, bob), log=(words,), **texts)
    assert tags(draw(hostile).html()) <= tags(draw(SNAPSHOT).html())
    assert len(draw(hostile).text().splitlines()) == len(draw(SNAPSHOT).text().splitlines())
    assert "\x1b" not in draw(hostile).text()


def test_before_training_there_is_no_progress_and_no_loss() -> None:
    fresh = dataclasses.replace(SNAPSHOT, target_batch_size=0.0, loss_history=(), state="joined")
    assert summary(fresh) == "demo: joined, 2 peers"
    assert "next step" not in draw(fresh).html() + draw(fresh).text()


LINKED = dataclasses.replace(
    BOB, role="trainer", samples_per_s=9.0, rtt_s=0.0234, connected="direct", upload_bps=2e7, download_bps=1e9
)
RELAYED = dataclasses.replace(
    BOB, connected=f"relayed by {BOB.id}", rtt_s=0.2, upload_bps=2e9, download_bps=2e9
)
CAROL = dataclasses.replace(RELAYED, name="carol", id="ca401000")
DAVE = dataclasses.replace(BOB, name="dave", id="dae00000", role="paused")
SWARM = dataclasses.replace(SNAPSHOT, peers=(ALICE, DAVE, LINKED, CAROL))


def test_text_is_an_aligned_list_of_the_links() -> None:
    assert draw_map(SWARM).text().splitlines() == [
        "links of demo: 2 links, 1 of them relayed",
        "  ◉ alice (me)  training",
        "  ● bob         training     23 ms   direct   20 Mbit/s",
        "  ◔ carol       catching up  200 ms  via bob  2 Gbit/s",
        "  ‖ dave        paused               no link",
    ]


def test_the_html_has_the_same_content() -> None:
    texts = {text.text for text in parsed(draw_map(SWARM).html()).iter("text")}
    assert {"bob", "23 ms, direct", "200 ms, via bob", "no link", "alice (me)"} <= texts
    titles = {title.text for title in parsed(draw_map(SWARM).html()).iter("title")}
    assert {"23 ms, direct, 20 Mbit/s", "200 ms, via bob, 2 Gbit/s"} <= titles
    shown = "".join(parsed(draw_map(dataclasses.replace(SWARM, paused=True)).html()).itertext())
    assert "‖ paused" in shown and "◔ catching up" in shown and "● training" in shown


def test_a_faster_link_is_wider_and_a_relayed_one_dashed() -> None:
    direct, relayed = parsed(draw_map(SWARM).html()).iter("path")
    assert float(direct.attrib["stroke-width"]) < float(relayed.attrib["stroke-width"])
    assert "stroke-dasharray" in relayed.attrib and "stroke-dasharray" not in direct.attrib


def test_a_lone_peer_has_a_map_too() -> None:
    alone = dataclasses.replace(SNAPSHOT, peers=(ALICE,))
    assert "0 links" in draw_map(alone).text()
    assert len(list(parsed(draw_map(alone).html()).iter("circle"))) == 1


def test_many_peers_are_cut_and_counted_and_their_labels_stay_apart() -> None:
    crowd = dataclasses.replace(SNAPSHOT, peers=(ALICE, *[LINKED] * 499))
    assert f"… and {499 - MAX_ON_MAP} more peers" in draw_map(crowd).text()
    page = parsed(draw_map(crowd).html())
    circles = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in page.iter("circle")]
    assert len(circles) == MAX_ON_MAP + 1 and "499 links" in draw_map(crowd).text()
    assert min(b - a for a, b in itertools.pairwise(sorted(y for _, y in circles[1:]))) >= 26


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


@settings(max_examples=15)
@given(st.lists(rows, max_size=5))
def test_any_peers_can_be_drawn(peers: list[PeerRow]) -> None:
    odd = dataclasses.replace(SNAPSHOT, peers=tuple(peers))
    assert tags(draw_map(odd).html()) <= tags(draw_map(SWARM).html())
    assert len(draw_map(odd).text().split("\n")) <= len(peers) + 2


@pytest.mark.parametrize(
    ("peers", "line"),
    [
        ((ALICE, BOB), "step 12   20.0 samples/s from alice"),
        ((dataclasses.replace(ALICE, loss=0.5), BOB), "step 12   loss 0.500   20.0 samples/s from alice"),
        ((dataclasses.replace(ALICE, role="away"), BOB), "nobody trains; 2 peers here"),
    ],
)
def test_the_peers_sum_up_who_trains(peers: tuple[PeerRow, ...], line: str) -> None:
    assert PeerTable(peers).line() == line


def test_a_watcher_shows_the_speed_of_computing_under_its_own_name() -> None:
    alice = dataclasses.replace(ALICE, samples_per_s=0.0, compute_samples_per_s=30.0)
    watching = dataclasses.replace(
        SNAPSHOT, samples_per_s=0.0, compute_samples_per_s=30.0, peers=(alice, BOB)
    )
    assert "compute rate 30.0 samples/s from 1 of 2 peers" in summary(watching)
    assert "compute rate: 30.0 samples/s" in draw(watching).text()
    table = PeerTable((alice, BOB))
    assert table.line() == "step 12   compute rate 30.0 samples/s from alice"
    for titles in (draw(watching).text(), str(table)):
        assert "compute rate" in titles and "step  samples/s" not in titles


def test_prometheus_gets_samples_per_second_only_by_the_clock() -> None:
    figures = {name: value for name, _, value in metrics(SNAPSHOT)}
    assert figures["samples_per_second"] == 20.0
    watched = dataclasses.replace(SNAPSHOT, samples_per_s=0.0, compute_samples_per_s=30.0)
    figures = {name: value for name, _, value in metrics(watched)}
    assert "samples_per_second" not in figures and figures["compute_samples_per_second"] == 30.0


def test_the_table_of_peers_says_when_each_was_last_heard_of() -> None:
    silent = dataclasses.replace(BOB, role="away", heard_s=40.0, loss=1.25)
    assert str(PeerTable((ALICE, silent))).splitlines() == [
        "  peer        role     step  samples/s  loss    last heard of",
        "  alice (me)  trainer  12    20.0",
        "  bob         away     9     0.0        1.2500  40 s ago",
    ]
