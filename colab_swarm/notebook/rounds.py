"""The round waterfall: when each member of an averaging round did what, and its result. Pure functions.

A lane has three tracks, because transfers overlap: above what this peer sent, in the middle the member's contribution
to this peer's span, below the average that the member returned. Time runs from forming the group to the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from colab_swarm.events import MemberTrace, RoundFinished
from colab_swarm.markup import aligned, count, plain, size, text
from colab_swarm.notebook import theme
from colab_swarm.notebook.theme import Document
from colab_swarm.snapshot import SwarmSnapshot

RECENT = 20  # rounds in the strip
MAX_LANES = 40
MIN_S, MAX_S = 1e-6, 1e6
ID_CHARS = 8
LANE_WIDTH, LANE_HEIGHT, SLOTS = 400, 20, 40
BAR_WIDTH, STRIP_HEIGHT = 24, 46
NONE_YET = (
    "No averaging round has ended yet: peers average as soon as they have the samples of a step together."
)
GROUP = "forming the group"


@dataclass(frozen=True)
class _Track:
    """A kind of transfer: field of `MemberTrace`, meaning, look and character."""

    field: str
    meaning: str
    hue: str
    dashes: str
    height: float
    character: str


TRACKS = (
    _Track("sent", "sent to it", "blue", "", 4, "░"),
    _Track("received", "received from it", "amber", "4 2", 10, "▒"),
    _Track("means", "average received", "green", "1.5 1.5", 16, "▓"),
)


def draw(snapshot: SwarmSnapshot, back: int = 0) -> Document:
    """Return the round ``back`` rounds before the last one, and the strip of the last rounds."""
    shown = Document("", label="averaging rounds")
    draw_waterfall(shown, snapshot.rounds, back, _names(snapshot))
    return shown


def draw_waterfall(
    shown: Document, rounds: Sequence[RoundFinished], back: int, names: Mapping[str, str]
) -> None:
    """Draw one round in full and the last ones as a strip.

    Args:
        shown: where.
        rounds: oldest first.
        back: how many rounds before the last one; the first one if there are fewer.
        names: of peers, by the first `ID_CHARS` of their ids.
    """
    if not rounds:
        shown.draw(f'<p class="soft">{NONE_YET}</p>', NONE_YET)
        return
    rounds = [_drawable(one) for one in rounds]
    chosen = max(len(rounds) - 1 - back, 0)
    one, recent = rounds[chosen], rounds[-RECENT:]
    facts = _facts(one)
    shown.draw(theme.heading(f"round {one.step}", text(facts, 400)), f"round {one.step}: {plain(facts, 400)}")
    times = ", ".join(_time(each.seconds) + "✖" * _lost(each) for each in recent)
    shown.draw(_strip(rounds, chosen), f"  last {count(len(recent), 'round')}: {times}")
    shown.note(*([f"shares: {one.explanation}"] if one.explanation else []))
    if not one.members:
        shown.note("This round left no trace of its members.")
        return
    members = sorted(
        one.members, key=lambda member: not member.dropped
    )  # failed ones are not hidden by a crowd
    lanes = [
        (_name(member, names), _slots(member, one), f"{_share(member)} {_outcome(member)[1]}")
        for member in members[:MAX_LANES]
    ]
    key = "".join(f"  {track.character} {track.meaning}" for track in TRACKS)
    lines = [*aligned(lanes), f"  · {GROUP}{key}"]
    shown.draw(_lanes(one, members[:MAX_LANES], names), *lines)
    if len(members) > MAX_LANES:
        shown.note(f"… and {len(members) - MAX_LANES} more members")


def _names(snapshot: SwarmSnapshot) -> dict[str, str]:
    here = {peer.id[:ID_CHARS]: peer.name + (" (me)" if peer.me else "") for peer in snapshot.peers}
    return {**snapshot.names, **here}


def _name(member: MemberTrace, names: Mapping[str, str]) -> str:
    short = member.peer[:ID_CHARS]
    return plain(names.get(short, short), 24)


def _drawable(finished: RoundFinished) -> RoundFinished:
    """Return the round with finite, positive times: a recording may hold anything."""
    seconds = finished.seconds if 0 < finished.seconds < MAX_S else MIN_S
    averaging_s = finished.averaging_s if 0 <= finished.averaging_s < seconds else seconds
    return replace(finished, seconds=seconds, averaging_s=averaging_s)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _lost(finished: RoundFinished) -> bool:
    return finished.spans_lost > 0 or finished.kept_local > 0


def _facts(finished: RoundFinished) -> str:
    waited_s = finished.seconds - finished.averaging_s
    facts = [
        f"values of {len(finished.contributors)} of {count(finished.group_size, 'peer')}",
        f"{finished.samples:,.0f} samples",
        f"{_time(finished.seconds)}, of which {_time(waited_s)} for {GROUP}",
        f"{size(finished.sent_bytes)} sent, {size(finished.received_bytes)} received",
    ]
    if finished.predicted_s is not None:
        facts.append(f"averaging took {_time(finished.averaging_s)}, {_time(finished.predicted_s)} expected")
    if finished.spans_lost:
        facts.append(f"{count(finished.spans_lost, 'reducer')} lost")
    if finished.kept_local:
        facts.append(f"{finished.kept_local:,} values not averaged")
    return ", ".join(facts)


def _share(member: MemberTrace) -> str:
    return f"{member.share:4.0%}" if math.isfinite(member.share) else "   ?"


def _outcome(member: MemberTrace) -> tuple[str, str]:
    if member.dropped:
        return "red", f"✖ {plain(member.dropped, 80)}"
    if not any((member.sent, member.received, member.means)):
        return "soft", "– nothing to exchange"  # this peer itself
    return "green", "✔ complete"


def _spans(member: MemberTrace, finished: RoundFinished) -> list[tuple[_Track, float, float]]:
    waited = finished.seconds - finished.averaging_s
    spans = []
    for track in TRACKS:
        times = getattr(member, track.field)
        if times is not None and all(map(math.isfinite, times)):
            begin, end = (min(max((waited + second) / finished.seconds, 0.0), 1.0) for second in times)
            spans.append((track, begin, max(begin, end)))
    return spans


def _part_waited(finished: RoundFinished) -> float:
    return (finished.seconds - finished.averaging_s) / finished.seconds


def _slots(member: MemberTrace, finished: RoundFinished) -> str:
    slots = ["·" if slot < SLOTS * _part_waited(finished) else " " for slot in range(SLOTS)]
    for track, begin, end in _spans(member, finished):
        first = min(int(begin * SLOTS), SLOTS - 1)
        for slot in range(first, max(first + 1, math.ceil(end * SLOTS))):
            slots[slot] = track.character
    return "".join(slots)


def _lanes(finished: RoundFinished, members: Sequence[MemberTrace], names: Mapping[str, str]) -> str:
    rows = []
    for member in members:
        hue, outcome = _outcome(member)
        words = f'<span class="{hue}">{text(outcome, 90)}</span>'
        lane, samples = _lane(member, finished), f"{member.weight:,.0f}"
        rows.append((text(_name(member, names)), lane, samples, _share(member), words))
    axis = (
        '<span style="display:flex;justify-content:space-between"><span>0 s</span>'
        f"<span>{_time(finished.seconds)}</span></span>"
    )
    columns, widths = ("member", axis, "samples", "reduces", "result"), ("18%", "40%", "9%", "9%", "24%")
    table = theme.table(columns, rows, numbers=(2, 3), widths=widths, label="members of the round")
    entries = [("soft", "1 4", 1.5, GROUP), *((one.hue, one.dashes, 4, one.meaning) for one in TRACKS)]
    key = "".join(
        f'<span><svg width="28" height="8" style="display:inline-block" aria-hidden="true">'
        f"{_line(hue, dashes, thick, 0, 28, 4, meaning)}</svg> {meaning}</span>"
        for hue, dashes, thick, meaning in entries
    )
    return f'{table}<p class="key soft">{key}</p>'


def _line(hue: str, dashes: str, thick: float, begin: float, end: float, y: float, title: str) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<path class="{hue}" d="M{begin:.1f} {y:g}H{end:.1f}" stroke="currentColor" stroke-width="{thick:g}"'
        f'{dashed} vector-effect="non-scaling-stroke"><title>{title}</title></path>'
    )


def _lane(member: MemberTrace, finished: RoundFinished) -> str:
    waited = LANE_WIDTH * _part_waited(finished)
    drawn = [_line("soft", "1 4", 1.5, 0, waited, 10, GROUP)] if waited else []
    labels = []
    for track, begin, end in _spans(member, finished):
        left, right = LANE_WIDTH * begin, max(LANE_WIDTH * end, LANE_WIDTH * begin + 2)
        times = " to ".join(_time(part * finished.seconds) for part in (begin, end))
        labels.append(f"{track.meaning}: {times}")
        drawn.append(_line(track.hue, track.dashes, 4, left, right, track.height, labels[-1]))
    return (
        f'<svg viewBox="0 0 {LANE_WIDTH} {LANE_HEIGHT}" width="100%" height="{LANE_HEIGHT}" role="img" '
        f'preserveAspectRatio="none" aria-label="{"; ".join(labels) or "nothing to exchange"}">{"".join(drawn)}</svg>'
    )


def _strip(rounds: Sequence[RoundFinished], chosen: int) -> str:
    """Draw the last rounds as bars: hollow while forming the group, full while averaging."""
    begin = min(max(len(rounds) - RECENT, 0), chosen)
    recent = rounds[begin : begin + RECENT]
    longest = max(one.seconds for one in recent)
    bars = "".join(_bar(one, index, longest, index + begin == chosen) for index, one in enumerate(recent))
    width = BAR_WIDTH * len(recent)
    label = f"{count(len(recent), 'round')}, the longest {_time(longest)}"
    return (
        f'<svg viewBox="0 0 {width} {STRIP_HEIGHT + 30}" width="{width}" role="img" '
        f'aria-label="{label}">{bars}</svg><p class="soft">last {label}; hollow: {GROUP}, full: averaging, '
        "✖ data lost, ▲ shown below</p>"
    )


def _bar(finished: RoundFinished, index: int, longest: float, chosen: bool) -> str:
    left, wide, hue = BAR_WIDTH * index + 4, BAR_WIDTH - 8, "red" if _lost(finished) else "blue"
    tall = max(STRIP_HEIGHT * finished.seconds / longest, 1.0)
    hollow = tall * _part_waited(finished)
    top, middle = 14 + STRIP_HEIGHT - tall, left + wide / 2
    marks = f'<text x="{middle}" y="{top - 3:.1f}" text-anchor="middle">✖</text>' if _lost(finished) else ""
    marks += f'<text x="{middle}" y="{STRIP_HEIGHT + 27}" text-anchor="middle">▲</text>' if chosen else ""
    return (
        f'<g class="{hue}"><title>round {finished.step}: {text(_facts(finished), 400)}</title>'
        f'<rect x="{left}" y="{top:.1f}" width="{wide}" height="{tall:.1f}" fill="none" stroke="currentColor"/>'
        f'<rect x="{left}" y="{top + hollow:.1f}" width="{wide}" height="{tall - hollow:.1f}" fill="currentColor"/>'
        f"{marks}</g>"
    )
