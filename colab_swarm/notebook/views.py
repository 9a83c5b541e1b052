"""A `SwarmSnapshot` as text and as HTML: the first page of a swarm's panel. Pure functions.

Everything from peers is escaped and bounded.
"""

from __future__ import annotations

import math

from colab_swarm.markup import count, milliseconds, plain, size
from colab_swarm.notebook import svg
from colab_swarm.notebook.theme import MAX_CHARS, Document
from colab_swarm.snapshot import ContributionRow, PeerRow, SessionTime, SwarmSnapshot

MAX_CONTRIBUTIONS = 8
MAX_NAME_CHARS = 40
LOSS_WIDTH = 420
COLUMNS = ("peer", "id", "role", "step", "samples/s", "RTT", "link", "reachable")
CREDITS = ("peer", "samples", "averaged for others")
SOON_S = 1800.0  # the view warns this long before a session's end
PAUSED = "Paused: your work has stopped and the others continue. Press Resume, or call swarm.unpause()."
CONTRIBUTIONS = "contributions, as seen by the other peers"


def summary(snapshot: SwarmSnapshot) -> str:
    """Return the state of the swarm in one line."""
    parts = [_state(snapshot)]
    if snapshot.target_batch_size > 0:
        parts += [_speed(snapshot), f"{_collected(snapshot)} samples for the next step"]
        if loss := _loss(snapshot):
            parts.append(f"loss {loss}")
    return ", ".join(parts)


def draw(snapshot: SwarmSnapshot) -> Document:
    """Return the page: figures, progress to the next step, loss, contributions, peers and log."""
    me = f"{_name(snapshot.me)}: {plain(snapshot.reached, 100)}, connected for {_clock(snapshot.uptime_s)}"
    shown = Document(_state(snapshot), me, label=f"swarm {plain(snapshot.run)}", line=me)
    shown.draw("", plain(summary(snapshot), MAX_CHARS))
    shown.warn(PAUSED if snapshot.paused else "", "‖")
    if snapshot.session:
        _draw_session(shown, snapshot.session)
    shown.figures(_figures(snapshot))
    if snapshot.target_batch_size > 0:
        when = "no peer is training"
        if snapshot.eta_s is not None and math.isfinite(snapshot.eta_s):
            soon = "any moment" if snapshot.eta_s < 1 else f"in about {_clock(snapshot.eta_s)}"
            when = f"step {snapshot.step + 1} {soon}"
        part = snapshot.accumulated / snapshot.target_batch_size
        shown.bar(part, f"{_collected(snapshot)} samples; {when}", title="next step")
    if drawn := svg.curve(snapshot.loss_history, width=LOSS_WIDTH):
        shown.draw(f"<h4>loss of my batches: {_loss(snapshot)}</h4>{drawn}")
    best = snapshot.leaderboard[:MAX_CONTRIBUTIONS]
    shown.table(CREDITS, best, _credit, numbers=(1, 2), what="contributors", title=CONTRIBUTIONS)
    shown.table(COLUMNS, snapshot.peers, _cells, numbers=(3, 4, 5), what="peers", title="peers")
    shown.note(*snapshot.log, title="log")
    return shown


def _name(name: str) -> str:
    return plain(name, MAX_NAME_CHARS)


def _state(snapshot: SwarmSnapshot) -> str:
    state = f"{_name(snapshot.run)}: {_name(snapshot.state)}"
    if snapshot.target_batch_size > 0:
        return f"{state}, step {snapshot.step}"
    return f"{state}, {count(len(snapshot.peers), 'peer')}"


def _speed(snapshot: SwarmSnapshot) -> str:
    trainers = sum(peer.samples_per_s > 0 for peer in snapshot.peers)
    return f"{snapshot.samples_per_s:,.1f} samples/s from {trainers} of {count(len(snapshot.peers), 'peer')}"


def _collected(snapshot: SwarmSnapshot) -> str:
    return f"{snapshot.accumulated:,.0f} of {snapshot.target_batch_size:,.0f}"


def _figures(snapshot: SwarmSnapshot) -> dict[str, str]:
    figures = {}
    if snapshot.target_batch_size > 0:
        figures["all peers"] = _speed(snapshot).replace(" ", "\n", 1)
        figures["me"] = f"{snapshot.own_samples_per_s:,.1f}\nsamples/s"
        if snapshot.last_share is not None:
            figures["my share"] = f"{snapshot.last_share:.0%}\nof the last step's samples"
    figures["sent"] = f"{size(snapshot.sent_bytes)}\nnow {size(snapshot.sent_bps / 8)}/s"
    figures["received"] = f"{size(snapshot.received_bytes)}\nnow {size(snapshot.received_bps / 8)}/s"
    return figures


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(int(seconds), 0), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _draw_session(shown: Document, session: SessionTime) -> None:
    ends_s = session.limit_s if session.leaves_s is None else session.leaves_s
    leaves = "" if session.leaves_s is None else f"; leaves at {_clock(ends_s)}"
    words = f"{plain(session.platform)}, {_clock(session.elapsed_s)} of {_clock(session.limit_s)}{leaves}"
    soon = session.elapsed_s > ends_s - SOON_S
    part = session.elapsed_s / session.limit_s if session.limit_s > 0 else 1.0
    shown.bar(part, words, title="session", hue="amber" if soon else "soft")
    shown.warn("the session ends soon" if soon else "")


def _loss(snapshot: SwarmSnapshot) -> str:
    """Return the newest and the first loss that are numbers."""
    first, last = (
        next((loss for _, loss in history if math.isfinite(loss)), None)
        for history in (snapshot.loss_history, snapshot.loss_history[::-1])
    )
    return "" if first is None else f"{last:.3f} (first {first:.3f})"


def _cells(peer: PeerRow) -> tuple[str, ...]:
    return (
        _name(peer.name) + " (me)" * peer.me,
        _name(peer.id),
        _name(peer.role),
        str(peer.step),
        f"{peer.samples_per_s:,.1f}",
        milliseconds(peer.rtt_s),
        _name(peer.connected),
        {True: "yes", False: "outgoing only", None: ""}[peer.reachable],
    )


def _credit(row: ContributionRow) -> tuple[str, ...]:
    return _name(row.name) + " (me)" * row.me, f"{row.samples:,.0f}", size(row.reduced_bytes)
