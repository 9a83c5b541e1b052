"""The pages of a swarm's panel, as text and HTML: overview, rounds and map. Pure functions.

All texts of peers are escaped and bounded. A peer knows only its own links, so the map shows only
these. A round is a waterfall with a lane for each member: what this peer sent it, the member's contribution
to this peer's span, and the average that it returned. Later tracks cover earlier ones.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from colab_swarm.events import MemberTrace, RoundFinished
from colab_swarm.markup import aligned, bandwidth, count, duration, milliseconds, plain, size, text
from colab_swarm.notebook import theme
from colab_swarm.notebook.page import Sample
from colab_swarm.snapshot import ContributionRow, PeerRow, SwarmSnapshot, speed_words, speeds_of

Mark: TypeAlias = tuple[str, str, str]  # hue, symbol and word
Place: TypeAlias = tuple[float, float]
ROLES = ("trainer", "catching up", "paused", "away", "assistant")
MAX_ON_MAP = 32  # peers; the first page counts all
# sizes of the map, in pixels
_MAP_X = 150
_MAP_ROW = 30
RELAYED = "relayed by "
_ID_CHARS = 8
MAX_NAME_CHARS = 40
_REACHABLE = {True: "yes", False: "outgoing only", None: ""}
OVER = ("left", "finished")
_SOON_S = 1800.0  # the view warns this long before a session's end
RECENT = 20  # rounds to choose from
# durations of a round that can be drawn
_MIN_S = 1e-6
_MAX_S = 1e6
SLOTS = 40  # characters of a lane
_PAUSED = "Paused: your work has stopped and the others continue. Press Resume, or call swarm.unpause()."
NONE_YET = "No averaging round has ended yet: peers average once they have a step's samples."
GROUP = "forming the group"


def summary(snapshot: SwarmSnapshot) -> str:
    parts = [_state(snapshot)]
    if snapshot.target_batch_size > 0:
        speed = speed_words(snapshot.samples_per_s, snapshot.compute_samples_per_s)
        if speed:
            trainers = [peer for peer in snapshot.peers if peer.computes]
            peers = count(len(snapshot.peers), "peer")
            parts.append(f"{speed} from {len(trainers)} of {peers}")
        if snapshot.state not in OVER:
            parts.append(f"{_collected(snapshot)} samples for the next step")
        loss = _loss(snapshot)
        if loss:
            parts.append(f"loss {loss}")
    return ", ".join(parts)


def draw(snapshot: SwarmSnapshot) -> theme.Document:
    me = f"{_name(snapshot.me)}: {plain(snapshot.reached, 100)}, connected for {duration(snapshot.uptime_s)}"
    document = theme.Document(_state(snapshot), me, label=f"swarm {plain(snapshot.run)}", line=me)
    document.draw("", plain(summary(snapshot), theme.MAX_CHARS))
    _draw_notices(document, snapshot)
    _draw_loss(document, snapshot)
    document.figures(_figures(snapshot))
    if snapshot.state not in OVER:
        _draw_next_step(document, snapshot)
    _draw_peers(document, snapshot)
    document.note(*reversed(snapshot.log), title="log, newest first")
    return document


def _draw_next_step(document: theme.Document, snapshot: SwarmSnapshot) -> None:
    awaited = _awaited(snapshot)
    if snapshot.target_batch_size > 0:
        part = snapshot.accumulated / snapshot.target_batch_size
        words = f"{_collected(snapshot)} samples; {_when(snapshot)}; waiting for {awaited}"
        document.bar(part, words, title="next step")
    elif awaited and not snapshot.model:
        document.note(f"waiting for {awaited}")


def _draw_loss(document: theme.Document, snapshot: SwarmSnapshot) -> None:
    source = "my batches"
    if snapshot.model:
        source = f"{snapshot.model}, median over the trainers"
    label = f"loss of {text(source)}: {_loss(snapshot)}"
    chart = theme.curve(snapshot.loss_history, label=label, width=830, height=150)
    if chart:
        document.draw(chart)


def _draw_peers(document: theme.Document, snapshot: SwarmSnapshot) -> None:
    contributions = {row.id: row for row in snapshot.leaderboard}
    peers = [*snapshot.peers, *_peers_away(snapshot)]
    name_counts = Counter(peer.name for peer in peers)
    names = {peer.id[:_ID_CHARS]: peer.name for peer in peers}
    title, speeds = speeds_of(peers)
    columns = ("peer", "role", "step", title, "samples", "averaged for others", "RTT", "link", "reachable")

    def cells(peer: PeerRow) -> tuple[str, ...]:
        contribution = contributions.get(peer.id)
        return (
            _distinct_name(peer, name_counts),
            _name(peer.role),
            _figure(peer.step, ",d"),
            _figure(speeds[peer.id], ",.1f"),
            _figure(_samples(peer, contribution), ",.0f"),
            _reduced(contribution),
            milliseconds(peer.rtt_s),
            _way(peer, names),
            _REACHABLE[peer.reachable],
        )

    document.table(columns, peers, cells, numbers=(2, 3, 4, 5, 6), what="peers")


def _peers_away(snapshot: SwarmSnapshot) -> list[PeerRow]:
    """Return a row for each peer that contributed and is not there now."""
    present = {peer.id for peer in snapshot.peers}
    return [
        PeerRow(row.name, row.id, "away", 0, 0.0, 0.0, None, row.me)
        for row in snapshot.leaderboard
        if row.id not in present
    ]


def _distinct_name(peer: PeerRow, name_counts: Mapping[str, int]) -> str:
    """Return a peer's name; with its id if another peer has the same name."""
    name = _name(peer.name)
    if name_counts[peer.name] > 1:
        name += f" {peer.id[:4]}"
    if peer.me:
        name += " (me)"
    return name


def _samples(peer: PeerRow, contribution: ContributionRow | None) -> float:
    if contribution is None:
        return peer.samples + 0.0
    return peer.samples + contribution.samples


def _reduced(contribution: ContributionRow | None) -> str:
    if contribution is None or not contribution.reduced_bytes:
        return "–"
    return size(contribution.reduced_bytes)


def _figure(value: float, form: str) -> str:
    return f"{value:{form}}" if value else "–"


def _when(snapshot: SwarmSnapshot) -> str:
    if snapshot.eta_s is None or not math.isfinite(snapshot.eta_s):
        return "no peer is training"
    if snapshot.eta_s < 1:
        return f"step {snapshot.step + 1} any moment"
    return f"step {snapshot.step + 1} in about {duration(snapshot.eta_s)}"


def _awaited(snapshot: SwarmSnapshot) -> str:
    """Return what the run waits for, in words; empty if this peer sees none of it."""
    if snapshot.silent:
        return snapshot.silent
    if any(peer.me and peer.role == "catching up" for peer in snapshot.peers):
        return "the run's state from another peer"
    if snapshot.target_batch_size > 0:
        full = snapshot.accumulated >= snapshot.target_batch_size
        awaited = "the averaging" if full else "samples"
        if snapshot.step == 0:
            awaited += " of the first round"
        return awaited
    if len(snapshot.peers) < 2:
        return "the first other peer"
    if any(peer.computes for peer in snapshot.peers):
        return ""
    return "a peer that trains"


def _name(name: str) -> str:
    return plain(name, MAX_NAME_CHARS)


def _state(snapshot: SwarmSnapshot) -> str:
    state = f"{_name(snapshot.run)}: {_name(snapshot.state)}"
    trains = snapshot.target_batch_size > 0 or snapshot.model
    if not trains:
        return f"{state}, {count(len(snapshot.peers), 'peer')}"
    if snapshot.step:
        return f"{state}, step {snapshot.step}"
    return f"{state}, before the first round"


def _collected(snapshot: SwarmSnapshot) -> str:
    return f"{snapshot.accumulated:,.0f} of {snapshot.target_batch_size:,.0f}"


def _figures(snapshot: SwarmSnapshot) -> dict[str, str]:
    figures = {}
    trains = snapshot.target_batch_size > 0 or snapshot.model
    if snapshot.samples_per_s and trains:
        figures["all peers"] = f"{snapshot.samples_per_s:,.1f}\nsamples/s"
    elif snapshot.compute_samples_per_s and trains:
        figures["compute rate"] = f"{snapshot.compute_samples_per_s:,.1f}\nsamples/s"
    if snapshot.kept is not None and snapshot.kept.checkpoints:
        saved = snapshot.kept.checkpoints[-1]
        figures["last saved"] = f"step {saved.step:,}\n{duration(snapshot.at - saved.at)} ago"
    if snapshot.target_batch_size > 0:
        if snapshot.own_samples_per_s:
            figures["me"] = f"{snapshot.own_samples_per_s:,.1f}\nsamples/s"
        if snapshot.computing:
            figures["I compute"] = f"{snapshot.computing:.0%}\nof the time"
        if snapshot.last_share is not None:
            figures["my share"] = f"{snapshot.last_share:.0%}\nof the last step"
        if snapshot.forecast:
            figures["a round sends"] = snapshot.forecast
    figures["sent"] = size(snapshot.sent_bytes)
    figures["received"] = size(snapshot.received_bytes)
    return figures


def metrics(snapshot: SwarmSnapshot) -> list[Sample]:
    """Return the figures for Prometheus; those of a model carry its name."""
    run = {"run": snapshot.run}
    model = {**run, "collaboration": snapshot.model}
    links = [peer for peer in snapshot.peers if peer.connected]
    samples: list[Sample] = [
        ("uptime_seconds", run, snapshot.uptime_s),
        ("linked_peers", run, len(links)),
        ("sent_bytes_total", run, snapshot.sent_bytes),
        ("received_bytes_total", run, snapshot.received_bytes),
        ("step", model, snapshot.step),
        ("compute_samples_per_second", model, snapshot.compute_samples_per_s),
    ]
    # A backbone trains nothing, so it knows only what peers say of their computing.
    if snapshot.samples_per_s:
        samples.append(("samples_per_second", model, snapshot.samples_per_s))
    if snapshot.loss_history:
        samples.append(("loss", model, snapshot.loss_history[-1][1]))
    role_counts = Counter(peer.role for peer in snapshot.peers)
    for role in ROLES:
        samples.append(("peers", {**model, "role": role}, role_counts[role]))
    kept = snapshot.kept
    if kept is None:
        return samples
    for saved in kept.checkpoints[-1:]:
        samples.append(("checkpoint_step", model, saved.step))
        samples.append(("checkpoint_timestamp_seconds", model, saved.at))
    samples.append(("hub_failures_total", model, kept.hub_failures))
    return samples


def _draw_notices(document: theme.Document, snapshot: SwarmSnapshot) -> None:
    if snapshot.paused:
        document.warn(_PAUSED, "‖")
    kept = snapshot.kept
    if kept is not None:
        if kept.standing_in is not None:
            source = f"New trainers continue from the checkpoint of step {kept.standing_in:,}."
            document.warn(f"There are no trainers now. {source}")
        if kept.hub:
            document.note(kept.hub)
    session = snapshot.session
    if session is None:
        return
    words = f"{plain(session.platform)}, {duration(session.elapsed_s)} of {duration(session.limit_s)}"
    words += f"; leaves at {duration(session.leaves_s)}"
    soon = session.elapsed_s > session.leaves_s - _SOON_S
    part = 1.0
    if session.limit_s > 0:
        part = session.elapsed_s / session.limit_s
    if soon:
        document.bar(part, words, title="session", hue="amber")
        document.warn("the session ends soon")
    else:
        document.bar(part, words, title="session", hue="soft")


def _loss(snapshot: SwarmSnapshot) -> str:
    first = _first_finite(loss for _, loss in snapshot.loss_history)
    last = _first_finite(loss for _, loss in reversed(snapshot.loss_history))
    if first is None:
        return ""
    return f"{last:.3f} (first {first:.3f})"


def _first_finite(values: Iterable[float]) -> float | None:
    return next((value for value in values if math.isfinite(value)), None)


def draw_map(snapshot: SwarmSnapshot) -> theme.Document:
    """Draw this peer at the left and a line for each link; the text lists the links."""
    others = sorted((peer for peer in snapshot.peers if not peer.me), key=lambda peer: not peer.connected)
    drawn = others[:MAX_ON_MAP]
    names = {peer.id[:_ID_CHARS]: peer.name for peer in drawn}
    own_mark = ("blue", "◉", plain(snapshot.state, 24))
    if snapshot.paused:
        own_mark = ("amber", "‖", "paused")
    own_name = f"{plain(snapshot.me, 24)} (me)"
    height = _MAP_ROW * max(len(drawn), 3)
    own_place = (_MAP_X, height / 2)
    lines = ""
    nodes = _node(own_place, own_mark, own_name, ())
    marks = {own_mark}
    rows = [(f"{own_mark[1]} {own_name}", own_mark[2], "", "", "")]
    for index, peer in enumerate(drawn):
        mark = _mark_of(peer)
        link = _link_words(peer, names)
        place = (2 * _MAP_X, _MAP_ROW * (index + 0.5))
        if peer.connected:
            lines += _link_line(peer, own_place, place)
        nodes += _node(place, mark, peer.name, link)
        marks.add(mark)
        rows.append((f"{mark[1]} {plain(peer.name, 24)}", mark[2], *link))
    links = [peer for peer in others if peer.connected]
    relayed = [peer for peer in links if peer.connected.startswith(RELAYED)]
    state = f"{count(len(links), 'link')}, {len(relayed)} of them relayed"
    run = plain(snapshot.run, 40)
    document = theme.Document(run, state, label="map of the swarm", line=f"links of {run}: {state}")
    document.draw(
        f'<svg viewBox="0 0 {4 * _MAP_X} {height}" width="100%" style="max-width:720px" role="img" '
        f'aria-label="map of {count(len(drawn) + 1, "peer")}">{lines}{nodes}</svg>'
        f'<p>{_map_key(marks)}</p><p class="soft">'
        "line: a link, wider if faster; dashed: through a relay; no line: no link</p>",
        *aligned(rows),
    )
    if len(others) > MAX_ON_MAP:
        document.note(f"… and {len(others) - MAX_ON_MAP} more peers")
    return document


def _map_key(marks: Iterable[Mark]) -> str:
    key = ""
    for hue, symbol, word in sorted(marks):
        key += f"{theme.mark(hue, symbol, text(word))} &#160; "
    return key


def _mark_of(peer: PeerRow) -> Mark:
    role = plain(peer.role, 24) or "idle"
    marks = {"paused": ("amber", "‖"), "catching": ("purple", "◔"), "left": ("red", "✖")}
    for word, (hue, symbol) in marks.items():
        if word in role:
            return hue, symbol, role
    if peer.computes:
        return "green", "●", "training"
    return "soft", "○", role


def _link_words(peer: PeerRow, names: Mapping[str, str]) -> tuple[str, str, str]:
    bps = _bandwidth_bps(peer)
    speed = bandwidth(bps) if bps else ""
    return milliseconds(peer.rtt_s), _way(peer, names) or "no link", speed


def _way(peer: PeerRow, names: Mapping[str, str]) -> str:
    way = peer.connected
    if way.startswith(RELAYED):
        relay = way.removeprefix(RELAYED)[:_ID_CHARS]
        way = f"via {names.get(relay, relay)}"
    return plain(way, 17)


def _bandwidth_bps(peer: PeerRow) -> float:
    """Return the slower direction of a peer's line; 0 if none is known."""
    directions = (peer.upload_bps, peer.download_bps)
    return min((bps for bps in directions if bps is not None and math.isfinite(bps)), default=0.0)


def _link_line(peer: PeerRow, me: Place, place: Place) -> str:
    dashed = ' stroke-dasharray="5 4"' if peer.connected.startswith(RELAYED) else ""
    # 1 pixel for 1 Mbit/s or less, 1.3 more for each factor of ten
    width = min(1 + 1.3 * math.log10(max(_bandwidth_bps(peer) / 1e6, 1.0)), 6.0)
    return (
        f'<path class="soft" d="M{me[0]} {me[1]}L{place[0]} {place[1]}" fill="none" '
        f'stroke="currentColor" stroke-width="{width:.1f}"{dashed}/>'
    )


def _node(place: Place, mark: Mark, name: str, link: Sequence[str]) -> str:
    """Draw a peer with its name and link; this peer has no link, and its name below it."""
    x, y = place
    hue, symbol, word = mark
    name_x = x - 40
    name_y = y + 29
    if link:
        name_x = x + 15
        name_y = y - 2
    short = text(", ".join(filter(None, link[:2])))
    full = text(", ".join(filter(None, link)))
    return (
        f'<g class="{hue}"><title>{text(word)}</title><circle cx="{x}" cy="{y}" r="10" '
        f'style="fill:var(--card)" stroke="currentColor" stroke-width="2"/>'
        f'<text x="{x}" y="{y + 4}" text-anchor="middle" style="fill:currentColor">{symbol}</text></g>'
        f'<text x="{name_x}" y="{name_y}" style="fill:var(--ink)">{text(name, 32)}</text>'
        f'<text x="{name_x}" y="{y + 11}">{short}<title>{full}</title></text>'
    )


class _Track(NamedTuple):
    """How one part of a member's round is drawn."""

    character: str
    meaning: str
    hue: str
    pattern: str  # of its line, in pixels; empty: solid


_TRACKS = {
    "": _Track("·", GROUP, "soft", "1 4"),
    "sent": _Track("░", "sent to it", "blue", ""),
    "received": _Track("▒", "received from it", "amber", "7 3"),
    "means": _Track("▓", "average received", "green", "2 2"),
}
"""By the field of `MemberTrace`; empty for the time before the averaging."""
_LANE = 320  # width of a lane, pixels


def draw_rounds(snapshot: SwarmSnapshot, back: int = 0) -> theme.Document:
    document = theme.Document("", label="averaging rounds")
    names = dict(snapshot.names)
    for peer in snapshot.peers:
        name = peer.name
        if peer.me:
            name += " (me)"
        names[peer.id[:_ID_CHARS]] = name
    draw_waterfall(document, snapshot.rounds, back, names)
    return document


def draw_waterfall(
    document: theme.Document, rounds: Sequence[RoundFinished], back: int, names: Mapping[str, str]
) -> None:
    """Draw the round ``back`` before the last; ``names`` are by the peers' short ids."""
    if not rounds:
        document.draw(f'<p class="soft">{NONE_YET}</p>', NONE_YET)
        return
    finished = _plausible(rounds[max(len(rounds) - 1 - back, 0)])
    facts = _facts(finished)
    title = f"round {finished.step}"
    document.draw(theme.heading(title, text(facts, 400)), f"{title}: {plain(facts, 400)}")
    if finished.explanation:
        document.note(f"shares: {finished.explanation}")
    if not finished.members:
        document.note("This round left no trace of its members.")
        return

    def cells(member: MemberTrace) -> tuple[theme.Cell, ...]:
        short_id = member.peer[:_ID_CHARS]
        hue, outcome = _outcome(member, names)
        share = "   ?"
        if math.isfinite(member.share):
            share = f"{member.share:4.0%}"
        return (
            plain(names.get(short_id, short_id), 24),
            _lane(member, finished),
            f"{member.samples:,.0f}",
            share,
            (outcome, f'<span class="{hue}">{text(outcome, 90)}</span>'),
        )

    failed_first = sorted(finished.members, key=lambda member: not member.dropped)
    columns = ("member", f"0 to {_seconds(finished.seconds)}", "samples", "reduces", "result")
    document.table(columns, failed_first, cells, numbers=(2, 3), what="members of the round")
    _draw_legend(document)


def _outcome(member: MemberTrace, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the hue and the words of a member's result."""
    if member.dropped:
        short_id = member.peer[:_ID_CHARS]
        reason = member.dropped.replace(short_id, names.get(short_id, short_id))
        return "red", f"✖ {plain(reason, 80)}"
    exchanged = member.samples or member.share or member.received or member.means
    if not exchanged:
        return "soft", "– nothing to exchange"
    return "green", "✔ complete"


def _draw_legend(document: theme.Document) -> None:
    swatches = ""
    meanings = []
    for track in _TRACKS.values():
        line = _line(0, 36, 4, track)
        swatches += (
            f'<svg width="36" height="9" style="display:inline-block" aria-hidden="true">{line}</svg> '
            f'<span class="soft">{track.meaning} &#160; </span>'
        )
        meanings.append(f"{track.character} {track.meaning}")
    document.draw(f"<p>{swatches}</p>", f"  {'  '.join(meanings)}")


def _plausible(finished: RoundFinished) -> RoundFinished:
    """Return the round with times that can be drawn: a recording may hold anything."""
    seconds = _MIN_S
    if 0 < finished.seconds < _MAX_S:
        seconds = finished.seconds
    averaging_s = seconds
    if 0 <= finished.averaging_s < seconds:
        averaging_s = finished.averaging_s
    return replace(finished, seconds=seconds, averaging_s=averaging_s)


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.3g} ms"


def _facts(finished: RoundFinished) -> str:
    waited_s = finished.seconds - finished.averaging_s
    facts = [
        f"values of {len(finished.contributors)} of {count(finished.group_size, 'peer')}",
        f"{finished.samples:,.0f} samples",
        f"{_seconds(finished.seconds)}, of which {_seconds(waited_s)} for {GROUP}",
        f"{size(finished.sent_bytes)} sent, {size(finished.received_bytes)} received",
    ]
    if finished.predicted_s is not None:
        measured = _seconds(finished.averaging_s)
        facts.append(f"averaging took {measured}, {_seconds(finished.predicted_s)} expected")
    if finished.spans_lost:
        facts.append(f"{count(finished.spans_lost, 'reducer')} lost")
    if finished.kept_local:
        facts.append(f"{finished.kept_local:,} values not averaged")
    return ", ".join(facts)


def _lane(member: MemberTrace, finished: RoundFinished) -> theme.Cell:
    """Draw the tracks of a member on the time axis of its round, as characters and as lines."""
    waited_s = finished.seconds - finished.averaging_s
    slots = [" "] * SLOTS
    labels = []
    lines = ""
    for row, (field, track) in enumerate(_TRACKS.items()):
        times_s = getattr(member, field) if field else (-waited_s, 0.0)
        if times_s is None or not all(map(math.isfinite, times_s)):
            continue
        begin, end = (_bounded((waited_s + second) / finished.seconds) for second in times_s)
        first = min(int(begin * SLOTS), SLOTS - 1)
        last = max(first + 1, math.ceil(end * SLOTS))
        slots[first:last] = track.character * (last - first)
        span = f"{_seconds(begin * finished.seconds)} to {_seconds(end * finished.seconds)}"
        labels.append(f"{track.meaning}: {span}")
        # the first two tracks share a row, as sending begins when the group is formed
        y = 5 * max(row - 1, 1) - 2
        lines += _line(_LANE * begin, max(_LANE * end, _LANE * begin + 4), y, track)
    label = "; ".join(labels)
    svg = (
        f'<svg viewBox="0 0 {_LANE} 16" width="{_LANE}" height="16" role="img" aria-label="{label}">'
        f"<title>{label}</title>{lines}</svg>"
    )
    return "".join(slots), svg


def _bounded(part: float) -> float:
    return min(max(part, 0.0), 1.0)


def _line(begin: float, end: float, y: float, track: _Track) -> str:
    return (
        f'<path class="{track.hue}" d="M{begin:.1f} {y}H{end:.1f}" fill="none" stroke="currentColor" '
        f'stroke-width="4" stroke-dasharray="{track.pattern or "none"}"/>'
    )
