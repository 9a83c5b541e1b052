"""The pages of a swarm's panel, as text and HTML: overview, rounds and map. Pure functions.

All texts of peers are escaped and bounded. A peer knows only its own links, so the map shows only these. A round is
drawn with a lane for each member, over time. A lane has three tracks: sending to the member, receiving the member's
contribution to this peer's span, and receiving the average that the member computed. Later tracks cover earlier ones.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from colab_swarm.events import MemberTrace, RoundFinished
from colab_swarm.markup import bandwidth, count, duration, milliseconds, plain, size, text
from colab_swarm.notebook import theme
from colab_swarm.notebook.page import Sample
from colab_swarm.snapshot import ContributionRow, PeerRow, SwarmSnapshot, speed_words, speeds_of

ROLES = ("trainer", "catching up", "paused", "away", "assistant")
RELAYED = "relayed by "
_ID_CHARS = 8
MAX_NAME_CHARS = 40
_REACHABLE = {True: "yes", False: "outgoing only", None: ""}
_OVER = ("left", "finished")
_SOON_S = 1800.0  # the view warns this long before a session's end
RECENT = 20  # number of rounds to choose from
# durations of a round that can be drawn
_MIN_S = 1e-6
_MAX_S = 1e6
SLOTS = 40  # width of a lane, in characters
_PAUSED = "Paused: your work has stopped and the others continue. Press Resume, or call swarm.unpause()."
NONE_YET = "No averaging round has ended yet: peers average once they have a step's samples."
GROUP = "forming the group"
_NOTHING = ContributionRow("", "", 0.0, 0.0, me=False)


def draw(snapshot: SwarmSnapshot) -> theme.Document:
    run = _name(snapshot.run)
    document = theme.Document(run, ", ".join(_progress(snapshot)), label=f"swarm {run}")
    me = f"{_name(snapshot.me)}: {plain(snapshot.reached, 100)}"
    document.note(f"{me}, connected for {duration(snapshot.uptime_s)}")
    _draw_notices(document, snapshot)
    source = "my batches"
    if snapshot.model:
        source = f"{snapshot.model}, median over the trainers"
    document.curve(snapshot.loss_history, label=f"loss of {text(source)}: {_loss(snapshot)}")
    document.figures(_figures(snapshot))
    awaited = _awaited(snapshot)
    if awaited and snapshot.target_batch_size > 0:
        part = snapshot.accumulated / snapshot.target_batch_size
        words = f"{_collected(snapshot)} samples; {_when(snapshot)}; waiting for {awaited}"
        document.bar(part, words, title="next step")
    elif awaited and not snapshot.model:
        document.note(f"waiting for {awaited}")
    _draw_peers(document, snapshot)
    document.note(*reversed(snapshot.log), title="log, newest first")
    return document


def _progress(snapshot: SwarmSnapshot) -> list[str]:
    """Return this peer's state and the progress of the run."""
    parts = [_name(snapshot.state)]
    if not _trains(snapshot):
        return [*parts, count(len(snapshot.peers), "peer")]
    parts.append(f"step {snapshot.step}" if snapshot.step else "before the first round")
    if snapshot.target_batch_size > 0:
        speed = speed_words(snapshot.samples_per_s, snapshot.compute_samples_per_s)
        if speed:
            trainers = [peer for peer in snapshot.peers if peer.computes]
            parts.append(f"{speed} from {len(trainers)} of {count(len(snapshot.peers), 'peer')}")
        if snapshot.state not in _OVER:
            parts.append(f"{_collected(snapshot)} samples for the next step")
        loss = _loss(snapshot)
        if loss:
            parts.append(f"loss {loss}")
    return parts


def _trains(snapshot: SwarmSnapshot) -> bool:
    return snapshot.target_batch_size > 0 or bool(snapshot.model)


def _draw_peers(document: theme.Document, snapshot: SwarmSnapshot) -> None:
    contributions = {row.id: row for row in snapshot.leaderboard}
    peers = list(snapshot.peers)
    present = {peer.id for peer in peers}
    for row in snapshot.leaderboard:
        if row.id not in present:
            peers.append(PeerRow(row.name, row.id, "away", 0, 0.0, 0.0, None, row.me))
    name_counts = Counter(peer.name for peer in peers)
    names = {peer.id[:_ID_CHARS]: peer.name for peer in peers}
    title, speeds = speeds_of(peers)
    columns = ("peer", "role", "step", title, "samples", "averaged for others", "RTT", "link", "reachable")

    def cells(peer: PeerRow) -> tuple[str, ...]:
        contribution = contributions.get(peer.id, _NOTHING)
        name = _name(peer.name)
        if name_counts[peer.name] > 1:
            name += f" {peer.id[:4]}"
        if peer.me:
            name += " (me)"
        return (
            name,
            _name(peer.role),
            _figure(peer.step, ",d"),
            _figure(speeds[peer.id], ",.1f"),
            _figure(peer.samples + contribution.samples, ",.0f"),
            size(contribution.reduced_bytes) if contribution.reduced_bytes else "–",
            milliseconds(peer.rtt_s),
            _way(peer, names),
            _REACHABLE[peer.reachable],
        )

    document.table(columns, peers, cells, numbers=(2, 3, 4, 5, 6), what="peers")


def _figure(value: float, form: str) -> str:
    return f"{value:{form}}" if value else "–"


def _when(snapshot: SwarmSnapshot) -> str:
    if snapshot.eta_s is None or not math.isfinite(snapshot.eta_s):
        trains = any(peer.computes for peer in snapshot.peers)
        return "its time is not known yet" if trains else "no peer is training"
    if snapshot.eta_s < 1:
        return f"step {snapshot.step + 1} any moment"
    return f"step {snapshot.step + 1} in about {duration(snapshot.eta_s)}"


def _awaited(snapshot: SwarmSnapshot) -> str:
    """Return what the run waits for, in words; empty if this peer does not know."""
    if snapshot.state in _OVER:
        return ""
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


def _collected(snapshot: SwarmSnapshot) -> str:
    return f"{snapshot.accumulated:,.0f} of {snapshot.target_batch_size:,.0f}"


def _figures(snapshot: SwarmSnapshot) -> dict[str, str]:
    figures = {}
    if snapshot.samples_per_s and _trains(snapshot):
        figures["all peers"] = f"{snapshot.samples_per_s:,.1f}\nsamples/s"
    elif snapshot.compute_samples_per_s and _trains(snapshot):
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
    """Return the figures for Prometheus; figures of a model have the model's name as a label."""
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
    # A backbone trains nothing, so it knows only the compute rates that peers report.
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
    part = session.elapsed_s / session.limit_s if session.limit_s > 0 else 1.0
    document.bar(part, words, title="session", hue="amber" if soon else "soft")
    if soon:
        document.warn("the session ends soon")


def _loss(snapshot: SwarmSnapshot) -> str:
    losses = [loss for _, loss in snapshot.loss_history if math.isfinite(loss)]
    if not losses:
        return ""
    return f"{losses[-1]:.3f} (first {losses[0]:.3f})"


def draw_map(snapshot: SwarmSnapshot) -> theme.Document:
    """List this peer and the others, with a line for each link: wider if it is faster, dashed if it uses a relay."""
    others = [peer for peer in snapshot.peers if not peer.me]
    links = [peer for peer in others if peer.connected]
    relayed = [peer for peer in links if peer.connected.startswith(RELAYED)]
    state = f"{count(len(links), 'link')}, {len(relayed)} of them relayed"
    document = theme.Document(f"links of {_name(snapshot.run)}", state, label="map of the swarm")
    names = {peer.id[:_ID_CHARS]: peer.name for peer in others}
    own_mark = theme.mark("blue", "◉", plain(snapshot.state, 24))
    if snapshot.paused:
        own_mark = theme.mark("amber", "‖", "paused")
    own_cells = (f"{plain(snapshot.me, 24)} (me)", own_mark, "", "", "")

    def cells(peer: PeerRow | None) -> tuple[theme.Cell, ...]:
        if peer is None:
            return own_cells
        known_bps = [bps for bps in (peer.upload_bps, peer.download_bps) if bps and math.isfinite(bps)]
        bps = min(known_bps, default=0.0)
        # 1 pixel for 1 Mbit/s or less, 1.3 more for each factor of ten
        width = min(1 + 1.3 * math.log10(max(bps / 1e6, 1.0)), 6.0)
        dashes = "5 4" if peer.connected.startswith(RELAYED) else "none"
        line = theme.drawing(60, 8, theme.stroke(0, 60, 4, hue="soft", dashes=dashes, width=width))
        way = _way(peer, names)
        link: theme.Cell = (way, f"{line} {text(way)}") if way else "no link"
        speed = bandwidth(bps) if bps else ""
        return plain(peer.name, 24), _mark_of(peer), milliseconds(peer.rtt_s), link, speed

    connected_first = sorted(others, key=lambda peer: not peer.connected)
    columns = ("peer", "state", "RTT", "link", "speed")
    document.table(columns, [None, *connected_first], cells, numbers=(2,), what="peers")
    document.draw('<p class="soft">line: a link, wider if faster; dashed: through a relay</p>')
    return document


def _mark_of(peer: PeerRow) -> theme.Cell:
    role = plain(peer.role, 24) or "idle"
    marks = {"paused": ("amber", "‖"), "catching": ("purple", "◔"), "left": ("red", "✖")}
    for word, (hue, symbol) in marks.items():
        if word in role:
            return theme.mark(hue, symbol, role)
    if peer.computes:
        return theme.mark("green", "●", "training")
    return theme.mark("soft", "○", role)


def _way(peer: PeerRow, names: Mapping[str, str]) -> str:
    way = peer.connected
    if way.startswith(RELAYED):
        relay = way.removeprefix(RELAYED)[:_ID_CHARS]
        way = f"via {names.get(relay, relay)}"
    return plain(way, 17)


class _Track(NamedTuple):
    """How one part of a member's round is drawn."""

    character: str
    meaning: str
    hue: str
    dashes: str  # dashes of the line, in pixels


_TRACKS = {
    "": _Track("·", GROUP, "soft", "1 4"),
    "sent": _Track("░", "sent to it", "blue", "none"),
    "received": _Track("▒", "received from it", "amber", "7 3"),
    "means": _Track("▓", "average received", "green", "2 2"),
}
"""How to draw the fields of `MemberTrace`; the empty name stands for the time before the averaging."""
_LANE = 320  # width of a lane, pixels


def draw_rounds(snapshot: SwarmSnapshot, back: int = 0) -> theme.Document:
    document = theme.Document(label="averaging rounds")
    names = dict(snapshot.names)
    for peer in snapshot.peers:
        name = peer.name
        if peer.me:
            name += " (me)"
        names[peer.id[:_ID_CHARS]] = name
    finished = None
    if snapshot.rounds:
        finished = snapshot.rounds[max(len(snapshot.rounds) - 1 - back, 0)]
    draw_waterfall(document, finished, names)
    return document


def draw_waterfall(
    document: theme.Document, finished: RoundFinished | None, names: Mapping[str, str]
) -> None:
    """Draw a round, or nothing if ``finished`` is None; ``names`` are by the peers' short ids."""
    if finished is None:
        document.note(NONE_YET)
        return
    finished = _plausible(finished)
    document.heading(f"round {finished.step}", _facts(finished))
    if finished.explanation:
        document.note(f"shares: {finished.explanation}")
    if not finished.members:
        document.note("This round left no trace of its members.")
        return

    def cells(member: MemberTrace) -> tuple[theme.Cell, ...]:
        short_id = member.peer[:_ID_CHARS]
        share = "   ?"
        if math.isfinite(member.share):
            share = f"{member.share:4.0%}"
        return (
            plain(names.get(short_id, short_id), 24),
            _lane(member, finished),
            f"{member.samples:,.0f}",
            share,
            _outcome(member, names),
        )

    failed_first = sorted(finished.members, key=lambda member: not member.dropped)
    columns = ("member", f"0 to {_seconds(finished.seconds)}", "samples", "reduces", "result")
    document.table(columns, failed_first, cells, numbers=(2, 3), what="members of the round")
    swatches = ""
    for track in _TRACKS.values():
        line = theme.stroke(0, 36, 4, hue=track.hue, dashes=track.dashes)
        swatches += f'{theme.drawing(36, 9, line)} <span class="soft">{track.meaning} &#160; </span>'
    meanings = [f"{track.character} {track.meaning}" for track in _TRACKS.values()]
    document.draw(f"<p>{swatches}</p>", f"  {'  '.join(meanings)}")


def _outcome(member: MemberTrace, names: Mapping[str, str]) -> theme.Cell:
    if member.dropped:
        short_id = member.peer[:_ID_CHARS]
        reason = member.dropped.replace(short_id, names.get(short_id, short_id))
        return theme.mark("red", "✖", plain(reason, 80))
    exchanged = member.samples or member.share or member.received or member.means
    if not exchanged:
        return theme.mark("soft", "–", "nothing to exchange")
    return theme.mark("green", "✔", "complete")


def _plausible(finished: RoundFinished) -> RoundFinished:
    """Return the round with times that can be drawn, because a recording may contain any numbers."""
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
        begin, end = (theme.bounded((waited_s + second) / finished.seconds) for second in times_s)
        first = min(int(begin * SLOTS), SLOTS - 1)
        last = max(first + 1, math.ceil(end * SLOTS))
        slots[first:last] = track.character * (last - first)
        span = f"{_seconds(begin * finished.seconds)} to {_seconds(end * finished.seconds)}"
        labels.append(f"{track.meaning}: {span}")
        # the first two tracks share a row, because sending begins when the group is formed
        y = 5 * max(row - 1, 1) - 2
        end_px = max(_LANE * end, _LANE * begin + 4)
        lines += theme.stroke(_LANE * begin, end_px, y, hue=track.hue, dashes=track.dashes)
    return "".join(slots), theme.drawing(_LANE, 16, lines, "; ".join(labels))
