"""The round waterfall: who did what when, who dropped out and why, in HTML and in text."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.events import MemberTrace, RoundFinished
from colab_swarm.notebook.theme import MAX_ROWS, Document
from colab_swarm.notebook.views import NONE_YET, SLOTS, draw_rounds, draw_waterfall
from tests.notebook.test_views import ALICE, BOB, SNAPSHOT, parsed

ME = MemberTrace(ALICE.id + "0" * 56, 64.0, 0.5)
OTHER = MemberTrace(BOB.id + "0" * 56, 128.0, 0.5, sent=(0.0, 0.5), received=(0.25, 0.75), means=(0.75, 1.0))
GONE = MemberTrace("ca401000" + "0" * 56, 32.0, 0.0, sent=(0.0, 0.2), dropped="the link to ca401000 is lost")
WHO = {"group_size": 3, "contributors": (ME.peer, OTHER.peer), "members": (ME, OTHER, GONE)}
LOST = {"spans_lost": 1, "kept_local": 1000, "explanation": "bob's line is the faster"}
MOVED = {"samples": 192.0, "sent_bytes": 2_000_000, "received_bytes": 1_000_000}
TIMES = {"at": 0.0, "seconds": 2.0, "averaging_s": 1.0, "predicted_s": 0.9}
ROUND = RoundFinished(step=12, **WHO, **LOST, **MOVED, **TIMES)
GOOD = dataclasses.replace(ROUND, step=11, spans_lost=0, kept_local=0, members=(ME, OTHER))
TOLD = dataclasses.replace(SNAPSHOT, rounds=(GOOD, ROUND))


def waterfall(finished: RoundFinished, **names: str) -> Document:
    shown = Document(label="rounds")
    draw_waterfall(shown, finished, names)
    return shown


def test_text_has_a_lane_for_each_member_on_one_time_axis() -> None:
    lines = draw_rounds(TOLD).text().splitlines()
    assert lines[0] == (
        "round 12: values of 2 of 3 peers, 192 samples, 2.00 s, of which 1.00 s for forming the group, "
        "2 MB sent, 1 MB received, averaging took 1.00 s, 900 ms expected, 1 reducer lost, "
        "1,000 values not averaged"
    )
    half = "·" * (SLOTS // 2)
    assert lines[1] == "  shares: bob's line is the faster"
    assert lines[2:6] == [
        f"  member      {'0 to 2.00 s':40}  samples  reduces  result",
        f"  ca401000    {half}{'░' * 4}{' ' * 16}  32         0%     ✖ the link to ca401000 is lost",
        f"  alice (me)  {half}{' ' * 20}  64        50%     ✔ complete",
        f"  bob         {half}{'░' * 5}{'▒' * 10}{'▓' * 5}  128       50%     ✔ complete",
    ]
    assert lines[6] == "  · forming the group  ░ sent to it  ▒ received from it  ▓ average received"


def test_a_lane_tells_screen_readers_its_times() -> None:
    drawn = parsed(draw_rounds(TOLD).html()).iter("svg")
    labels = [lane.attrib["aria-label"] for lane in drawn if "aria-label" in lane.attrib]
    assert labels[:2] == [
        "forming the group: 0 ms to 1.00 s; sent to it: 1.00 s to 1.20 s",
        "forming the group: 0 ms to 1.00 s",
    ]
    assert labels[2].endswith("average received: 1.75 s to 2.00 s")


def test_each_track_of_a_lane_and_of_the_legend_has_a_colour_and_a_pattern_of_its_own() -> None:
    drawn = [
        [(line.attrib["class"], line.attrib["stroke-dasharray"]) for line in lane.iter("path")]
        for lane in parsed(draw_rounds(TOLD).html()).iter("svg")
    ]
    looks = drawn[2]  # bob's
    assert [len(set(part)) for part in zip(*looks, strict=True)] == [4, 4]
    assert drawn[0] == looks[:2] and drawn[1] == looks[:1] and [one for (one,) in drawn[3:]] == looks


def test_nothing_to_exchange_stands_beside_no_samples() -> None:
    idle = MemberTrace(ME.peer, 0.0, 0.0)
    shown = waterfall(dataclasses.replace(ROUND, members=(ME, idle))).text().splitlines()
    assert [line.split("  ")[-1].strip() for line in shown if "a11ce000" in line] == [
        "✔ complete",
        "– nothing to exchange",
    ]


def test_a_member_that_left_is_named_in_the_reason_too() -> None:
    shown = waterfall(ROUND, ca401000="carol").text()
    assert "✖ the link to carol is lost" in shown and "ca401000" not in shown


def test_an_earlier_round_can_be_chosen_down_to_the_first() -> None:
    for back, step in ((0, 12), (1, 11), (5, 11)):
        assert draw_rounds(TOLD, back).line.startswith(f"round {step}:")


def test_before_the_first_round_there_is_a_hint_and_a_round_without_traces_says_so() -> None:
    assert draw_rounds(SNAPSHOT).text().strip() == NONE_YET
    assert "left no trace" in waterfall(dataclasses.replace(ROUND, members=())).text()


def test_many_members_are_cut_and_counted_and_failed_ones_stay() -> None:
    crowd = dataclasses.replace(ROUND, members=(OTHER,) * 500 + (GONE,))
    shown = waterfall(crowd).text()
    assert f"… and {501 - MAX_ROWS} more members" in shown and "the link to ca401000 is lost" in shown


times = st.none() | st.tuples(st.floats(), st.floats())
traces = st.builds(
    MemberTrace, st.text(), st.floats(), st.floats(), times, times, times, st.text(max_size=200)
)


@settings(max_examples=15)
@given(st.lists(traces, max_size=4), st.floats(), st.floats(), st.text(max_size=50))
def test_any_round_can_be_drawn(
    members: list[MemberTrace], seconds: float, averaging_s: float, said: str
) -> None:
    odd = dataclasses.replace(
        ROUND, members=tuple(members), seconds=seconds, averaging_s=averaging_s, explanation=said
    )
    names = {member.peer[:8]: said for member in members}
    drawn = waterfall(odd, **names)
    parsed(drawn.html())
    assert len(drawn.text().split("\n")) <= len(members) + 7 and "\x1b" not in drawn.text()
