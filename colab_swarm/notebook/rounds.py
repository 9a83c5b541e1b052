"""The round waterfall: when each member of an averaging round did what, and its result. Pure functions.

A lane has three tracks, because transfers overlap: above what this peer sent, in the middle the member's contribution
to this peer's span, below the average that the member returned. Time runs from forming the group to the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from colab_swarm.events import MemberTrace, RoundFinished
from colab_swarm.markup import aligned, count, plain, size, text
from colab_swarm.notebook import theme
from colab_swarm.notebook.theme import Document
from colab_swarm.snapshot import SwarmSnapshot

RECENT = 20  # rounds to choose from, and in the list of times
MAX_LANES = 40
MIN_S, MAX_S = 1e-6, 1e6
ID_CHARS = 8
LANE_WIDTH, LANE_HEIGHT, SLOTS = 400, 20, 40
NONE_YET = (
    "No averaging round has ended yet: peers average as soon as they have the samples of a step together."
)
GROUP = "forming the group"


class _Track(NamedTuple):
    field: str  # of `MemberTrace`; empty for the time before the averaging
    meaning: str
    hue: str
    dashes: str
    height: float
    character: str


TRACKS = (
    _Track("", GROUP, "soft", "1 4", 10, "·"),
    _Track("sent", "sent to it", "blue", "", 4, "░"),
    _Track("received", "received from it", "amber", "4 2", 10, "▒"),
    _Track("means", "average received", "green", "1.5 1.5", 16, "▓"),
)


def draw(snapshot: SwarmSnapshot, back: int = 0) -> Document:
    """Return the round ``back`` rounds before the last one, and the times of the last rounds."""
    shown = Document("", label="averaging rounds")
    here = {peer.id[:ID_CHARS]: peer.name + " (me)" * peer.me for peer in snapshot.peers}
    draw_waterfall(shown, snapshot.rounds, back, {**snapshot.names, **here})
    return shown


def draw_waterfall(
    shown: Document, rounds: Sequence[RoundFinished], back: int, names: Mapping[str, str]
) -> None:
    """Draw one round in full, and the times of the last ones.

    Args:
        shown: where.
        rounds: oldest first.
        back: how many rounds before the last one; the first one if there are fewer.
        names: of peers, by the first `ID_CHARS` of their ids.
    """
    if not rounds:
        shown.draw(f'<p class="soft">{NONE_YET}</p>', NONE_YET)
        return
    one, recent = _drawable(rounds[max(len(rounds) - 1 - back, 0)]), rounds[-RECENT:]
    facts = _facts(one)
    shown.draw(theme.heading(f"round {one.step}", text(facts, 400)), f"round {one.step}: {plain(facts, 400)}")
    times = ", ".join(
        _time(each.seconds) + "✖" * (each.spans_lost > 0 or each.kept_local > 0)
        for each in map(_drawable, recent)
    )
    words = f"last {count(len(recent), 'round')}: {times}"
    shown.draw(f'<p class="soft">{words}</p>', f"  {words}")
    shown.note(*([f"shares: {one.explanation}"] if one.explanation else []))
    _draw_members(shown, one, names)


def _draw_members(shown: Document, one: RoundFinished, names: Mapping[str, str]) -> None:
    if not one.members:
        shown.note("This round left no trace of its members.")
        return
    # failed ones are not hidden by a crowd
    members = sorted(one.members, key=lambda member: not member.dropped)[:MAX_LANES]
    labels = ((member, member.peer[:ID_CHARS]) for member in members)
    named = [(member, plain(names.get(short, short), 24)) for member, short in labels]
    lanes = [(name, _slots(member, one), f"{_share(member)} {_outcome(member)[1]}") for member, name in named]
    key = "".join(f"  {track.character} {track.meaning}" for track in TRACKS)
    shown.draw(_lanes(one, named), *aligned(lanes), key)
    if len(one.members) > MAX_LANES:
        shown.note(f"… and {len(one.members) - MAX_LANES} more members")


def _drawable(finished: RoundFinished) -> RoundFinished:
    """Return the round with finite, positive times: a recording may hold anything."""
    seconds = finished.seconds if 0 < finished.seconds < MAX_S else MIN_S
    averaging_s = finished.averaging_s if 0 <= finished.averaging_s < seconds else seconds
    return replace(finished, seconds=seconds, averaging_s=averaging_s)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


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
        times = getattr(member, track.field) if track.field else (-waited, 0.0)
        if times is not None and all(map(math.isfinite, times)):
            begin, end = (min(max((waited + second) / finished.seconds, 0.0), 1.0) for second in times)
            spans.append((track, begin, max(begin, end)))
    return spans


def _slots(member: MemberTrace, finished: RoundFinished) -> str:
    slots = [" "] * SLOTS
    for track, begin, end in _spans(member, finished):
        first = min(int(begin * SLOTS), SLOTS - 1)
        for slot in range(first, max(first + 1, math.ceil(end * SLOTS))):
            slots[slot] = track.character
    return "".join(slots)


def _lanes(finished: RoundFinished, named: Sequence[tuple[MemberTrace, str]]) -> str:
    rows = []
    for member, name in named:
        hue, outcome = _outcome(member)
        words = f'<span class="{hue}">{text(outcome, 90)}</span>'
        rows.append((text(name), _lane(member, finished), f"{member.weight:,.0f}", _share(member), words))
    axis = (
        '<span style="display:flex;justify-content:space-between"><span>0 s</span>'
        f"<span>{_time(finished.seconds)}</span></span>"
    )
    columns, widths = ("member", axis, "samples", "reduces", "result"), ("18%", "40%", "9%", "9%", "24%")
    table = theme.table(columns, rows, numbers=(2, 3), widths=widths, label="members of the round")
    key = "".join(
        f'<span><svg width="28" height="8" style="display:inline-block" aria-hidden="true">'
        f"{_line(track, 0, 28, 4, track.meaning)}</svg> {track.meaning}</span>"
        for track in TRACKS
    )
    return f'{table}<p class="key soft">{key}</p>'


def _line(track: _Track, begin: float, end: float, y: float, title: str) -> str:
    dashed = f' stroke-dasharray="{track.dashes}"' if track.dashes else ""
    return (
        f'<path class="{track.hue}" d="M{begin:.1f} {y:g}H{end:.1f}" stroke="currentColor" stroke-width="4"'
        f'{dashed} vector-effect="non-scaling-stroke"><title>{title}</title></path>'
    )


def _lane(member: MemberTrace, finished: RoundFinished) -> str:
    drawn, labels = "", []
    for track, begin, end in _spans(member, finished):
        left, right = LANE_WIDTH * begin, max(LANE_WIDTH * end, LANE_WIDTH * begin + 2)
        times = " to ".join(_time(part * finished.seconds) for part in (begin, end))
        labels.append(f"{track.meaning}: {times}")
        drawn += _line(track, left, right, track.height, labels[-1])
    return (
        f'<svg viewBox="0 0 {LANE_WIDTH} {LANE_HEIGHT}" width="100%" height="{LANE_HEIGHT}" role="img" '
        f'preserveAspectRatio="none" aria-label="{"; ".join(labels)}">{drawn}</svg>'
    )
