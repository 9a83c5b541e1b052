import dataclasses
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.notebook.theme import MAX_ROWS, Document
from colab_swarm.notebook.views import draw, draw_map, metrics
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


def words(document: Document) -> str:
    """All words of its HTML."""
    return " ".join(" ".join(parsed(document.html()).itertext()).split())


def told(**changes: Any) -> tuple[str, str]:
    """The words of the first page, in text and in HTML."""
    document = draw(dataclasses.replace(SNAPSHOT, **changes))
    return " ".join(document.text().split()), words(document)


def test_text_shows_the_facts_line_by_line() -> None:
    assert draw(SNAPSHOT).text().splitlines() == [
        "demo: training, step 12, 20.0 samples/s from 1 of 2 peers, "
        "64 of 256 samples for the next step, loss 6.500 (first 8.250)",
        "  alice: accepts connections, connected for 62 min",
        "  all peers: 20.0 samples/s; sent: 1.23 MB; received: 999 B",
        "  [#####...............] next step: 64 of 256 samples; its time is not known yet; waiting for samples",
        "  peer        role         step  samples/s  samples  averaged for others  RTT  link  reachable",
        "  alice (me)  trainer      12    20.0       64       –                               yes",
        "  bob         catching up  9     –          –        –                               outgoing only",
        "  bob joined",
    ]


def test_speed_share_and_links_are_shown_in_both() -> None:
    bob = dataclasses.replace(BOB, rtt_s=0.0234, connected="relayed by a11ce000")
    left = (
        ContributionRow("bob", "b0b00000", 1024.0, 2e6, me=False),
        ContributionRow("carol", "ca401000", 512.0, 1e6, me=False),
    )
    speeds = {"own_samples_per_s": 20.5, "computing": 0.934, "eta_s": 9.6, "last_share": 0.25}
    facts = ("step 13 in about 10 s", "20.5 samples/s", "93% of the time", "25% of the last step", "23 ms")
    facts += ("via alice", "1,024", "2 MB", "carol away – – 512 1 MB")  # carol left, and stays credited
    for shown in told(peers=(ALICE, bob), leaderboard=left, **speeds):
        assert [fact for fact in facts if fact not in shown] == []


def test_peers_of_one_name_are_told_apart_and_others_need_no_id() -> None:
    text, _ = told(peers=(ALICE, BOB, dataclasses.replace(BOB, id="b2b00000")))
    assert all(one in text for one in ("bob b0b0", "bob b2b0", "alice (me)"))
    assert "b0b0" not in told()[0]


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
    assert all(f"waiting for {waits}" in shown for shown in told(**changes))


FRESH = {"step": 0, "samples_per_s": 0.0, "loss_history": (), "peers": (ME, LINKED_ONLY)}


@pytest.mark.parametrize(
    ("changes", "line", "absent"),
    [
        (
            {"state": "left", "accumulated": 256.0},
            "left, step 12, 20.0 samples/s from 1 of 2 peers, loss 6.500 (first 8.250)",
            ("of 256", "waiting"),
        ),
        (
            FRESH,
            "training, before the first round, 64 of 256 samples for the next step",
            ("step 0", "0.0"),
        ),
        ({"target_batch_size": 0.0, "loss_history": ()}, "training, 2 peers", ("next step",)),
    ],
    ids=["left", "fresh", "without training"],
)
def test_what_is_over_or_not_known_yet_is_not_shown(
    changes: dict[str, object], line: str, absent: tuple[str, ...]
) -> None:
    assert draw(dataclasses.replace(SNAPSHOT, **changes)).line == f"demo: {line}"
    for shown in told(**changes):
        assert [one for one in absent if one in shown] == []


@pytest.mark.parametrize(("hours", "soon"), [(3, False), (11.5, True)])
def test_the_view_warns_before_the_session_ends_and_of_a_pause(hours: float, soon: bool) -> None:
    session = SessionTime("Colab", hours * 3600, 12 * 3600.0, leaves_s=11 * 3600.0 + 50 * 60)
    for shown in told(session=session):
        assert "of 12.0 h; leaves at 11.8 h" in shown and ("⚠ the session ends soon" in shown) is soon
    assert all("‖ Paused: your work has stopped" in shown for shown in told(paused=True))


@settings(max_examples=40)
@given(st.floats(), st.floats(), st.floats())
def test_no_number_breaks_a_view(one: float, other: float, third: float) -> None:
    alice = dataclasses.replace(ALICE, samples_per_s=one, samples=other, rtt_s=third)
    losses = ((1, one), (2, other), (3, third))
    speed = {"samples_per_s": one, "target_batch_size": other, "accumulated": third}
    speed |= {"uptime_s": one, "own_samples_per_s": other, "eta_s": third, "last_share": one}
    assert all(
        told(peers=(alice,), loss_history=losses, session=SessionTime("x", one, other, third), **speed)
    )


@pytest.mark.parametrize("number", [0, 1, 20, 500])
def test_any_number_of_peers_is_shown_in_a_bounded_page(number: int) -> None:
    long_name = dataclasses.replace(BOB, name="x" * 10_000, role="y" * 10_000)
    for page in (draw, draw_map):
        crowd = page(dataclasses.replace(SNAPSHOT, peers=(ALICE, *(long_name,) * number)))
        assert len(crowd.html()) < 20_000 and len(crowd.text()) < 20_000
        assert (f"… and {number + 1 - MAX_ROWS} more peers" in crowd.text()) is (number >= MAX_ROWS)


LINKED = dataclasses.replace(
    BOB, role="trainer", samples_per_s=9.0, rtt_s=0.0234, connected="direct", upload_bps=2e7, download_bps=1e9
)
RELAYED = dataclasses.replace(
    BOB, connected=f"relayed by {BOB.id}", rtt_s=0.2, upload_bps=2e9, download_bps=2e9
)
CAROL = dataclasses.replace(RELAYED, name="carol", id="ca401000")
DAVE = dataclasses.replace(BOB, name="dave", id="dae00000", role="paused")
SWARM = dataclasses.replace(SNAPSHOT, peers=(ALICE, DAVE, LINKED, CAROL))


def test_the_map_lists_the_links() -> None:
    assert draw_map(SWARM).text().splitlines() == [
        "links of demo: 2 links, 1 of them relayed",
        "  peer        state          RTT     link     speed",
        "  alice (me)  ◉ training",
        "  bob         ● training     23 ms   direct   20 Mbit/s",
        "  carol       ◔ catching up  200 ms  via bob  2 Gbit/s",
        "  dave        ‖ paused               no link",
    ]
    assert "alice (me) ‖ paused" in words(draw_map(dataclasses.replace(SWARM, paused=True)))


def test_a_faster_link_is_wider_and_a_relayed_one_dashed() -> None:
    direct, relayed = parsed(draw_map(SWARM).html()).iter("path")
    assert float(direct.attrib["stroke-width"]) < float(relayed.attrib["stroke-width"])
    assert (direct.attrib["stroke-dasharray"], relayed.attrib["stroke-dasharray"]) == ("none", "5 4")


WORDS = st.text(max_size=60) | st.sampled_from(["<script>alert(1)</script>", '"><img src=x>', "a\x1b[2Jb\n"])
rows = st.builds(
    PeerRow,
    name=WORDS,
    id=st.text(max_size=10),
    role=WORDS,
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


@settings(max_examples=40)
@given(st.lists(rows, max_size=5), WORDS)
def test_any_peers_can_be_drawn_and_their_texts_are_escaped(peers: list[PeerRow], said: str) -> None:
    odd = dataclasses.replace(SNAPSHOT, peers=(ALICE, *peers), log=(said,), run=said, me=said, state=said)
    calm = dataclasses.replace(SWARM, peers=(*SWARM.peers, *peers))
    for page in (draw, draw_map):
        assert tags(page(odd).html()) <= tags(page(SWARM).html())
        assert len(page(odd).text().split("\n")) <= len(page(calm).text().split("\n"))
        assert "\x1b" not in page(odd).text()


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
    watching = {"samples_per_s": 0.0, "compute_samples_per_s": 30.0, "peers": (alice, BOB)}
    text, _ = told(**watching)
    assert "compute rate 30.0 samples/s from 1 of 2 peers" in text and "compute rate: 30.0 samples/s" in text
    table = PeerTable((alice, BOB))
    assert table.line() == "step 12   compute rate 30.0 samples/s from alice"
    for titles in (text, str(table)):
        assert "compute rate" in titles and "step  samples/s" not in titles


def test_prometheus_gets_samples_per_second_only_by_the_clock() -> None:
    watched = dataclasses.replace(SNAPSHOT, samples_per_s=0.0, compute_samples_per_s=30.0)
    figures, watching = ({name: value for name, _, value in metrics(one)} for one in (SNAPSHOT, watched))
    assert figures["samples_per_second"] == 20.0
    assert "samples_per_second" not in watching and watching["compute_samples_per_second"] == 30.0


def test_the_table_of_peers_says_when_each_was_last_heard_of() -> None:
    silent = dataclasses.replace(BOB, role="away", heard_s=40.0, loss=1.25)
    assert str(PeerTable((ALICE, silent))).splitlines() == [
        "  peer        role     step  samples/s  loss    last heard of",
        "  alice (me)  trainer  12    20.0",
        "  bob         away     9     0.0        1.2500  40 s ago",
    ]
