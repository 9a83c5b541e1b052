"""The pages of a swarm's panel, as text and HTML: overview, rounds and map. Pure functions.

Everything from peers is escaped and bounded. A peer knows only its own links, so the map shows only
these. A round is a waterfall, a lane per member: what this peer sent it, the member's contribution
to this peer's span, and the average that it returned; the later covers the earlier.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from colab_swarm.events import MemberTrace, RoundFinished
from colab_swarm.markup import aligned, bandwidth, count, duration, milliseconds, plain, size, text
from colab_swarm.notebook import theme
from colab_swarm.notebook.page import Sample
from colab_swarm.snapshot import PeerRow, SwarmSnapshot

Mark: TypeAlias = tuple[str, str, str]  # hue, symbol and word
Place: TypeAlias = tuple[float, float]
ROLES = ("trainer", "catching up", "paused", "idle", "assistant")
MAX_ON_MAP = 32  # peers; the first page counts all
MAP_X, MAP_ROW = 150, 30
RELAYED = "relayed by "
ID_CHARS = 8
MAX_NAME_CHARS = 40
COLUMNS = ("peer", "role", "step", "samples/s", "samples", "averaged for others", "RTT", "link", "reachable")
SOON_S = 1800.0  # the view warns this long before a session's end
RECENT = 20  # rounds to choose from
MIN_S, MAX_S = 1e-6, 1e6
SLOTS = 40  # characters of a lane
NONE_YET = "No averaging round has ended yet: peers average once they have a step's samples."
GROUP = "forming the group"


def summary(snapshot: SwarmSnapshot) -> str:
    parts = [_state(snapshot)]
    if snapshot.target_batch_size > 0:
        if snapshot.samples_per_s:
            trainers = sum(peer.samples_per_s > 0 for peer in snapshot.peers)
            peers = count(len(snapshot.peers), "peer")
            parts.append(f"{snapshot.samples_per_s:,.1f} samples/s from {trainers} of {peers}")
        parts.append(f"{_collected(snapshot)} samples for the next step")
        if loss := _loss(snapshot):
            parts.append(f"loss {loss}")
    return ", ".join(parts)


def draw(snapshot: SwarmSnapshot) -> theme.Document:
    me = f"{_name(snapshot.me)}: {plain(snapshot.reached, 100)}, connected for {duration(snapshot.uptime_s)}"
    shown = theme.Document(_state(snapshot), me, label=f"swarm {plain(snapshot.run)}", line=me)
    shown.draw("", plain(summary(snapshot), theme.MAX_CHARS))
    _draw_notices(shown, snapshot)
    whose = f"{snapshot.model}, median over the trainers" if snapshot.model else "my batches"
    if drawn := theme.curve(
        snapshot.loss_history, label=f"loss of {text(whose)}: {_loss(snapshot)}", width=830, height=150
    ):
        shown.draw(drawn)
    shown.figures(_figures(snapshot))
    if snapshot.target_batch_size > 0:
        part = snapshot.accumulated / snapshot.target_batch_size
        words = f"{_collected(snapshot)} samples; {_when(snapshot)}; waiting for {_awaited(snapshot)}"
        shown.bar(part, words, title="next step")
    elif (awaited := _awaited(snapshot)) and not snapshot.model:
        shown.note(f"waiting for {awaited}")
    _draw_peers(shown, snapshot)
    shown.note(*reversed(snapshot.log), title="log, newest first")
    return shown


def _draw_peers(shown: theme.Document, snapshot: SwarmSnapshot) -> None:
    credits, present = {row.id: row for row in snapshot.leaderboard}, {peer.id for peer in snapshot.peers}
    gone = [
        PeerRow(row.name, row.id, "away", 0, 0.0, 0.0, None, row.me)
        for row in snapshot.leaderboard
        if row.id not in present
    ]
    peers = [*snapshot.peers, *gone]
    same = Counter(peer.name for peer in peers)
    names = {peer.id[:ID_CHARS]: peer.name for peer in peers}

    def cells(peer: PeerRow) -> tuple[str, ...]:
        credit = credits.get(peer.id)
        samples = peer.samples + (credit.samples if credit else 0.0)
        return (
            _name(peer.name) + f" {peer.id[:4]}" * (same[peer.name] > 1) + " (me)" * peer.me,
            _name(peer.role),
            _figure(peer.step, ",d"),
            _figure(peer.samples_per_s, ",.1f"),
            _figure(samples, ",.0f"),
            size(credit.reduced_bytes) if credit and credit.reduced_bytes else "–",
            milliseconds(peer.rtt_s),
            _way(peer, names),
            {True: "yes", False: "outgoing only", None: ""}[peer.reachable],
        )

    shown.table(COLUMNS, peers, cells, numbers=(2, 3, 4, 5, 6), what="peers")


def _figure(value: float, form: str) -> str:
    return f"{value:{form}}" if value else "–"


def _when(snapshot: SwarmSnapshot) -> str:
    if snapshot.eta_s is None or not math.isfinite(snapshot.eta_s):
        return "no peer is training"
    soon = "any moment" if snapshot.eta_s < 1 else f"in about {duration(snapshot.eta_s)}"
    return f"step {snapshot.step + 1} {soon}"


def _awaited(snapshot: SwarmSnapshot) -> str:
    """Return what the run waits for, in words; empty if this peer sees none of it."""
    if snapshot.silent:
        return snapshot.silent
    if any(peer.me and peer.role == "catching up" for peer in snapshot.peers):
        return "the run's state from another peer"
    if snapshot.target_batch_size > 0:
        full = snapshot.accumulated >= snapshot.target_batch_size
        return ("the averaging" if full else "samples") + " of the first round" * (snapshot.step == 0)
    if len(snapshot.peers) < 2:
        return "the first other peer"
    return "" if any(peer.samples_per_s > 0 for peer in snapshot.peers) else "a peer that trains"


def _name(name: str) -> str:
    return plain(name, MAX_NAME_CHARS)


def _state(snapshot: SwarmSnapshot) -> str:
    state = f"{_name(snapshot.run)}: {_name(snapshot.state)}"
    if snapshot.target_batch_size > 0 or snapshot.model:
        return f"{state}, step {snapshot.step}" if snapshot.step else f"{state}, before the first round"
    return f"{state}, {count(len(snapshot.peers), 'peer')}"


def _collected(snapshot: SwarmSnapshot) -> str:
    return f"{snapshot.accumulated:,.0f} of {snapshot.target_batch_size:,.0f}"


def _figures(snapshot: SwarmSnapshot) -> dict[str, str]:
    figures = {}
    if snapshot.samples_per_s and (snapshot.target_batch_size > 0 or snapshot.model):
        figures["all peers"] = f"{snapshot.samples_per_s:,.1f}\nsamples/s"
    if snapshot.kept is not None and snapshot.kept.checkpoints:
        saved = snapshot.kept.checkpoints[-1]
        figures["last saved"] = f"step {saved.step:,}\n{duration(snapshot.at - saved.at)} ago"
    if snapshot.target_batch_size > 0:
        if snapshot.own_samples_per_s:
            figures["me"] = f"{snapshot.own_samples_per_s:,.1f}\nsamples/s"
        if snapshot.last_share is not None:
            figures["my share"] = f"{snapshot.last_share:.0%}\nof the last step"
        if snapshot.forecast:
            figures["a round sends"] = snapshot.forecast
    return figures | {"sent": size(snapshot.sent_bytes), "received": size(snapshot.received_bytes)}


def metrics(snapshot: SwarmSnapshot) -> list[Sample]:
    """Return the figures for Prometheus; those of a model carry its name."""
    run = {"run": snapshot.run}
    model = {**run, "collaboration": snapshot.model}
    roles = Counter(peer.role for peer in snapshot.peers)
    samples: list[Sample] = [
        ("uptime_seconds", run, snapshot.uptime_s),
        ("linked_peers", run, sum(bool(peer.connected) for peer in snapshot.peers)),
        ("sent_bytes_total", run, snapshot.sent_bytes),
        ("received_bytes_total", run, snapshot.received_bytes),
        ("step", model, snapshot.step),
        ("samples_per_second", model, snapshot.samples_per_s),
        *(("loss", model, loss) for _, loss in snapshot.loss_history[-1:]),
        *(("peers", {**model, "role": role}, roles[role]) for role in ROLES),
    ]
    if (kept := snapshot.kept) is None:
        return samples
    for saved in kept.checkpoints[-1:]:
        samples += [("checkpoint_step", model, saved.step), ("checkpoint_timestamp_seconds", model, saved.at)]
    return [*samples, ("hub_failures_total", model, kept.hub_failures)]


def _draw_notices(shown: theme.Document, snapshot: SwarmSnapshot) -> None:
    paused = "Paused: your work has stopped and the others continue. Press Resume, or call swarm.unpause()."
    shown.warn(paused if snapshot.paused else "", "‖")
    if (kept := snapshot.kept) is not None:
        where = f"New trainers continue from the checkpoint of step {kept.standing_in or 0:,}."
        shown.warn("" if kept.standing_in is None else f"There are no trainers now. {where}")
        shown.note(*filter(None, [kept.hub]))
    if (session := snapshot.session) is None:
        return
    words = f"{plain(session.platform)}, {duration(session.elapsed_s)} of {duration(session.limit_s)}"
    words += f"; leaves at {duration(session.leaves_s)}"
    soon = session.elapsed_s > session.leaves_s - SOON_S
    part = session.elapsed_s / session.limit_s if session.limit_s > 0 else 1.0
    shown.bar(part, words, title="session", hue="amber" if soon else "soft")
    shown.warn("the session ends soon" if soon else "")


def _loss(snapshot: SwarmSnapshot) -> str:
    first, last = (
        next((loss for _, loss in history if math.isfinite(loss)), None)
        for history in (snapshot.loss_history, snapshot.loss_history[::-1])
    )
    return "" if first is None else f"{last:.3f} (first {first:.3f})"


def draw_map(snapshot: SwarmSnapshot) -> theme.Document:
    """Draw this peer at the left and a line for each link; the text lists the links."""
    others = sorted((peer for peer in snapshot.peers if not peer.me), key=lambda peer: not peer.connected)
    shown, relayed = others[:MAX_ON_MAP], sum(peer.connected.startswith(RELAYED) for peer in others)
    names = {peer.id[:ID_CHARS]: peer.name for peer in shown}
    own = ("amber", "‖", "paused") if snapshot.paused else ("blue", "◉", plain(snapshot.state, 24))
    rows = [(f"{own[1]} {plain(snapshot.me, 24)} (me)", own[2], "", "", "")]
    height = MAP_ROW * max(len(shown), 3)
    y, lines, nodes, marks = height / 2, "", "", {own}
    nodes += _node((MAP_X, y), own, f"{plain(snapshot.me, 24)} (me)", ())
    for index, peer in enumerate(shown):
        mark, link, place = _mark_of(peer), _link_words(peer, names), (2 * MAP_X, MAP_ROW * (index + 0.5))
        rows.append((f"{mark[1]} {plain(peer.name, 24)}", mark[2], *link))
        lines += _link_line(peer, (MAP_X, y), place) if peer.connected else ""
        nodes += _node(place, mark, peer.name, link)
        marks.add(mark)
    key = "".join(f"{theme.mark(*one[:2], text(one[2]))} &#160; " for one in sorted(marks))
    linked = f"{count(sum(bool(peer.connected) for peer in others), 'link')}, {relayed} of them relayed"
    run = plain(snapshot.run, 40)
    page = theme.Document(run, linked, label="map of the swarm", line=f"links of {run}: {linked}")
    page.draw(
        f'<svg viewBox="0 0 {4 * MAP_X} {height}" width="100%" style="max-width:720px" role="img" '
        f'aria-label="map of {count(len(shown) + 1, "peer")}">{lines}{nodes}</svg>'
        f'<p>{key}</p><p class="soft">line: a link, wider if faster; dashed: through a relay; no line: no link</p>',
        *aligned(rows),
    )
    if len(others) > MAX_ON_MAP:
        page.note(f"… and {len(others) - MAX_ON_MAP} more peers")
    return page


def _mark_of(peer: PeerRow) -> Mark:
    role = plain(peer.role, 24) or "idle"
    marks = {"paused": ("amber", "‖"), "catching": ("purple", "◔"), "left": ("red", "✖")}
    for word, (hue, symbol) in marks.items():
        if word in role:
            return hue, symbol, role
    return ("green", "●", "training") if peer.samples_per_s > 0 else ("soft", "○", role)


def _link_words(peer: PeerRow, names: Mapping[str, str]) -> tuple[str, str, str]:
    bps = _bandwidth_bps(peer)
    return milliseconds(peer.rtt_s), _way(peer, names) or "no link", bandwidth(bps) if bps else ""


def _way(peer: PeerRow, names: Mapping[str, str]) -> str:
    relay = peer.connected.removeprefix(RELAYED)[:ID_CHARS]
    way = f"via {names.get(relay, relay)}" if peer.connected.startswith(RELAYED) else peer.connected
    return plain(way, 17)


def _bandwidth_bps(peer: PeerRow) -> float:
    known = [bps for bps in (peer.upload_bps, peer.download_bps) if bps is not None and math.isfinite(bps)]
    return min(known, default=0.0)


def _link_line(peer: PeerRow, me: Place, place: Place) -> str:
    dashed = ' stroke-dasharray="5 4"' if peer.connected.startswith(RELAYED) else ""
    # 1 pixel for 1 Mbit/s or less, 1.3 more for each factor of ten
    width = min(1 + 1.3 * math.log10(max(_bandwidth_bps(peer) / 1e6, 1.0)), 6.0)
    return (
        f'<path class="soft" d="M{me[0]} {me[1]}L{place[0]} {place[1]}" fill="none" '
        f'stroke="currentColor" stroke-width="{width:.1f}"{dashed}/>'
    )


def _node(place: Place, mark: Mark, name: str, link: Sequence[str]) -> str:
    x, y = place
    hue, symbol, word = mark
    at, label = (x + 15, y - 2) if link else (x - 40, y + 29)
    short, full = (text(", ".join(filter(None, parts))) for parts in (link[:2], link))
    return (
        f'<g class="{hue}"><title>{text(word)}</title><circle cx="{x}" cy="{y}" r="10" '
        f'style="fill:var(--card)" stroke="currentColor" stroke-width="2"/>'
        f'<text x="{x}" y="{y + 4}" text-anchor="middle" style="fill:currentColor">{symbol}</text></g>'
        f'<text x="{at}" y="{label}" style="fill:var(--ink)">{text(name, 32)}</text>'
        f'<text x="{at}" y="{y + 11}">{short}<title>{full}</title></text>'
    )


TRACKS = {  # by the field of `MemberTrace`; empty for the time before the averaging
    "": ("·", GROUP, "soft", "1 4"),  # character, meaning, hue and the pattern of its line, pixels
    "sent": ("░", "sent to it", "blue", ""),
    "received": ("▒", "received from it", "amber", "7 3"),
    "means": ("▓", "average received", "green", "2 2"),
}
LANE = 320  # width of a lane, pixels


def draw_rounds(snapshot: SwarmSnapshot, back: int = 0) -> theme.Document:
    shown = theme.Document("", label="averaging rounds")
    here = {peer.id[:ID_CHARS]: peer.name + " (me)" * peer.me for peer in snapshot.peers}
    draw_waterfall(shown, snapshot.rounds, back, {**snapshot.names, **here})
    return shown


def draw_waterfall(
    shown: theme.Document, rounds: Sequence[RoundFinished], back: int, names: Mapping[str, str]
) -> None:
    """Draw the round ``back`` before the last; ``names`` are by the peers' short ids."""
    if not rounds:
        shown.draw(f'<p class="soft">{NONE_YET}</p>', NONE_YET)
        return
    one = _plausible(rounds[max(len(rounds) - 1 - back, 0)])
    facts = _facts(one)
    shown.draw(theme.heading(f"round {one.step}", text(facts, 400)), f"round {one.step}: {plain(facts, 400)}")
    shown.note(*([f"shares: {one.explanation}"] if one.explanation else []))
    if not one.members:
        shown.note("This round left no trace of its members.")
        return

    def cells(member: MemberTrace) -> tuple[theme.Cell, ...]:
        short = member.peer[:ID_CHARS]
        hue, outcome = "green", "✔ complete"
        if member.dropped:
            hue, outcome = "red", f"✖ {plain(member.dropped.replace(short, names.get(short, short)), 80)}"
        elif not (member.samples or member.share or member.received or member.means):
            hue, outcome = "soft", "– nothing to exchange"
        return (
            plain(names.get(short, short), 24),
            _lane(member, one),
            f"{member.samples:,.0f}",
            f"{member.share:4.0%}" if math.isfinite(member.share) else "   ?",
            (outcome, f'<span class="{hue}">{text(outcome, 90)}</span>'),
        )

    members = sorted(one.members, key=lambda member: not member.dropped)  # the failed ones first
    columns = ("member", f"0 to {_seconds(one.seconds)}", "samples", "reduces", "result")
    shown.table(columns, members, cells, numbers=(2, 3), what="members of the round")
    _draw_legend(shown)


def _draw_legend(shown: theme.Document) -> None:
    swatches = "".join(
        f'<svg width="36" height="9" style="display:inline-block" aria-hidden="true">{_line(0, 36, 4, *look)}</svg> '
        f'<span class="soft">{meaning} &#160; </span>'
        for _, meaning, *look in TRACKS.values()
    )
    key = "  ".join(f"{character} {meaning}" for character, meaning, *_ in TRACKS.values())
    shown.draw(f"<p>{swatches}</p>", f"  {key}")


def _plausible(one: RoundFinished) -> RoundFinished:
    """Return the round with times that can be drawn: a recording may hold anything."""
    seconds = one.seconds if 0 < one.seconds < MAX_S else MIN_S
    averaging_s = one.averaging_s if 0 <= one.averaging_s < seconds else seconds
    return replace(one, seconds=seconds, averaging_s=averaging_s)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _facts(last: RoundFinished) -> str:
    waited_s = last.seconds - last.averaging_s
    facts = [
        f"values of {len(last.contributors)} of {count(last.group_size, 'peer')}",
        f"{last.samples:,.0f} samples",
        f"{_seconds(last.seconds)}, of which {_seconds(waited_s)} for {GROUP}",
        f"{size(last.sent_bytes)} sent, {size(last.received_bytes)} received",
    ]
    if last.predicted_s is not None:
        facts.append(f"averaging took {_seconds(last.averaging_s)}, {_seconds(last.predicted_s)} expected")
    if last.spans_lost:
        facts.append(f"{count(last.spans_lost, 'reducer')} lost")
    if last.kept_local:
        facts.append(f"{last.kept_local:,} values not averaged")
    return ", ".join(facts)


def _lane(member: MemberTrace, finished: RoundFinished) -> theme.Cell:
    slots, labels, waited = [" "] * SLOTS, [], finished.seconds - finished.averaging_s
    lines = ""
    for row, (field, (character, meaning, *look)) in enumerate(TRACKS.items()):
        times = getattr(member, field) if field else (-waited, 0.0)
        if times is None or not all(map(math.isfinite, times)):
            continue
        begin, end = (min(max((waited + second) / finished.seconds, 0.0), 1.0) for second in times)
        first = min(int(begin * SLOTS), SLOTS - 1)
        last = max(first + 1, math.ceil(end * SLOTS))
        slots[first:last] = character * (last - first)
        labels.append(f"{meaning}: {' to '.join(_seconds(part * finished.seconds) for part in (begin, end))}")
        lines += _line(LANE * begin, max(LANE * end, LANE * begin + 4), 5 * max(row - 1, 1) - 2, *look)
    label = "; ".join(labels)
    return "".join(slots), (
        f'<svg viewBox="0 0 {LANE} 16" width="{LANE}" height="16" role="img" aria-label="{label}">'
        f"<title>{label}</title>{lines}</svg>"
    )


def _line(begin: float, end: float, y: float, hue: str, pattern: str) -> str:
    return (
        f'<path class="{hue}" d="M{begin:.1f} {y}H{end:.1f}" fill="none" stroke="currentColor" stroke-width="4" '
        f'stroke-dasharray="{pattern or "none"}"/>'
    )
