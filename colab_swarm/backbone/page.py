"""The dashboard's page: a `View` as HTML with inline SVG. Pure functions; every text from a peer is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from colab_swarm.backbone.observer import RoundRow
from colab_swarm.backbone.roster import PeerLine
from colab_swarm.backbone.view import CollaborationView, View
from colab_swarm.markup import card, count, duration, legend, page, size, table, text, tiles
from colab_swarm.widgets.loss_band import judge, render_svg, sahajbert, ticks

STYLE = """
svg polyline { stroke: var(--trainer); }
.trainer { fill: var(--trainer); background: var(--trainer); }
.catching { fill: var(--catching); background: var(--catching); }
.assistant { fill: var(--assistant); background: var(--assistant); }
.forming { fill: var(--forming); background: var(--forming); }
.lost { fill: var(--lost); background: var(--lost); } svg .name { fill: var(--text); } svg .away { opacity: .55; }
"""
WIDTH = 760
ROW = 20
NAMES = 140
"""Width of the names before a timeline."""
SPEEDS = 75
"""Width of what stands behind it."""
FIGURES = 285
"""Width of what stands behind a round."""
MAX_ROWS = 40
MAX_SHOWN_S = 6 * 3600.0
SHOWN_ROUNDS = 15
CLASSES = {"trainer": "trainer", "catching up": "catching", "assistant": "assistant"}


def render_page(view: View) -> str:
    """The whole page."""
    lost = "The backbone does not answer; this is what it said last."
    return page(text(view.run), render_live(view), lost=lost, style=STYLE)


def render_live(view: View) -> str:
    """The part of the page that changes."""
    traffic = f"{size(view.sent_bytes)} sent, {size(view.received_bytes)} received"
    return (
        f"<h1>{text(view.run)}</h1>"
        f'<p class="soft">{text(view.backbone)}: {text(view.reached)}; {count(view.linked, "peer")} linked; '
        f"up {duration(view.at - view.since)}; {traffic}</p>"
        + "".join(
            _collaboration(one, view.at, alone=len(view.collaborations) == 1) for one in view.collaborations
        )
        + _contributions(view)
    )


def _collaboration(one: CollaborationView, now: float, *, alone: bool) -> str:
    head = "" if alone else f"<h2>{text(one.name)}</h2>"
    return (
        f"{head}{_standing_in(one)}{_tiles(one, now)}{_loss(one)}"
        f'<div class="two">{_rate(one)}{_checkpoints(one, now)}</div>'
        f"{_timeline(one.peers, now)}{_waterfall(one.rounds)}"
    )


def _standing_in(one: CollaborationView) -> str:
    if one.standing_in is None:
        return ""
    return (
        f'<p class="warning">Nobody trains now. Whoever joins goes on from the checkpoint of step '
        f"{one.standing_in:,}.</p>"
    )


def _tiles(one: CollaborationView, now: float) -> str:
    last = one.checkpoints[-1] if one.checkpoints else None
    rates = one.rates
    shown = {
        "global step": f"{one.step:,}",
        "loss": "–" if one.loss is None else f"{one.loss:.3f}",
        "samples/s": f"{one.samples_per_s:,.1f}",
        "steps/min": f"{rates[-1][1]:,.1f}" if rates and one.trainers else "–",
        "trainers": f"{one.trainers}" + (f" (+{one.catching_up})" if one.catching_up else ""),
        "last saved": "–" if last is None else f"{duration(now - last.at)} ago",
    }
    return tiles(shown)


def _loss(one: CollaborationView) -> str:
    history = [(point.step, point.loss) for point in one.points]
    spread = [(point.step, point.low, point.high) for point in one.points]
    reference = sahajbert() if one.reference == "sahajbert" else None
    chart = render_svg(history, reference, spread=spread, width=WIDTH, height=260)
    title = "Loss: median of the trainers" + (f", over the band of {reference.name}" if reference else "")
    verdict = judge(history, reference) if reference else None
    said = (
        f'<p class="{"warning" if verdict.warning else "good"}">{text(verdict.text)}</p>' if verdict else ""
    )
    return card(title, (chart or '<p class="soft">No two losses were told yet.</p>') + said)


def _rate(one: CollaborationView) -> str:
    chart = render_svg(one.rates, label="steps per minute", from_zero=True, width=WIDTH // 2, height=190)
    return card("Steps per minute", chart or '<p class="soft">Not known yet.</p>')


def _checkpoints(one: CollaborationView, now: float) -> str:
    rows = [
        (
            f"step {kept.step:,}",
            "" if kept.loss is None else f"{kept.loss:.3f}",
            size(kept.size_bytes),
            f"{duration(now - kept.at)} ago",
        )
        for kept in reversed(one.checkpoints[-5:])
    ]
    hub = f'<p class="soft">{text(one.hub)}</p>' if one.hub else ""
    return card("Checkpoints", table(("", "loss", "size", "saved"), rows) + hub)


def _timeline(peers: Sequence[PeerLine], now: float) -> str:
    shown = [line for line in peers if now - line.spans[-1].until < MAX_SHOWN_S][:MAX_ROWS]
    if not shown:
        return ""
    begin = max(min(line.spans[0].since for line in shown), now - MAX_SHOWN_S)
    begin = min(begin, now - 60.0)
    scale = (WIDTH - NAMES - SPEEDS) / (now - begin)
    rows = [_line(line, y * ROW, begin, scale) for y, line in enumerate(shown)]
    bottom = ROW * len(shown)
    axis = [
        f'<text x="{WIDTH - SPEEDS - minutes * 60 * scale:.0f}" y="{bottom + 15}" text-anchor="middle">'
        f"{'now' if not minutes else f'−{minutes:g} min'}</text>"
        for minutes in ticks(0, (now - begin) / 60, 6)
    ]
    more = f'<p class="soft">and {len(peers) - len(shown)} more</p>' if len(peers) > len(shown) else ""
    svg = _svg(bottom + 20, [*rows, *axis], "peers over time")
    return card(f"Peers {legend(CLASSES.items())}", svg + more)


def _line(line: PeerLine, y: int, begin: float, scale: float) -> str:
    bars = []
    for span in line.spans:
        start = max(span.since, begin)
        width = max((span.until - start) * scale, 2.0)
        if span.until >= begin:
            bars.append(
                f'<rect class="{CLASSES.get(span.role, "forming")}" x="{NAMES + (start - begin) * scale:.1f}" '
                f'y="{y + 4}" width="{width:.1f}" height="{ROW - 8}" rx="2"><title>{text(span.role)}, '
                f"{duration(span.until - span.since)}</title></rect>"
            )
    speed = f"{line.samples_per_s:,.1f}/s" if line.samples_per_s else "" if line.here else "gone"
    return (
        f'<g class="{"here" if line.here else "away"}"><text class="name" x="0" y="{y + 14}">{text(line.name, 20)}'
        f"<title>{text(line.id)}</title></text>{''.join(bars)}"
        f'<text x="{WIDTH}" y="{y + 14}" text-anchor="end">{speed}</text></g>'
    )


def _waterfall(rounds: Sequence[RoundRow]) -> str:
    """The last rounds, newest first: forming the group, exchange with the reducers, recovery of what was lost."""
    shown = list(reversed(rounds[-SHOWN_ROUNDS:]))
    if not shown:
        return ""
    longest = max(one.forming_s + one.exchange_s + one.recovery_s for one in shown) or 1.0
    rows, wide = [], WIDTH - NAMES - FIGURES
    for y, one in enumerate(shown):
        at, bars = float(NAMES), []
        phases = {"forming": one.forming_s, "trainer": one.exchange_s, "lost": one.recovery_s}
        for phase, seconds in phases.items():
            width = wide * seconds / longest
            bars.append(
                f'<rect class="{phase}" x="{at:.1f}" y="{y * ROW + 4}" width="{width:.1f}" height="{ROW - 8}"/>'
            )
            at += width
        lost = f", {count(one.spans_lost, 'span')} lost" if one.spans_lost else ""
        total = one.forming_s + one.exchange_s + one.recovery_s
        rows.append(
            f'<text class="name" x="0" y="{y * ROW + 14}">step {one.step:,}: {count(one.peers, "peer")}</text>'
            f'{"".join(bars)}<text x="{at + 8:.0f}" y="{y * ROW + 14}">{total:.2f} s, {one.samples:,.0f} samples, '
            f"{size(one.moved_bytes)}{lost}</text>"
        )
    names = legend((("forming", "forming"), ("exchange", "trainer"), ("recovery", "lost")))
    return card(f"Rounds that this peer took part in {names}", _svg(ROW * len(shown), rows, "last rounds"))


def _contributions(view: View) -> str:
    rows = [
        (
            text(f"{one.name} ({one.id[:8]})"),
            f"{one.samples:,.0f}",
            size(one.reduced_bytes),
            size(one.relayed_bytes),
        )
        for one in view.contributions[:MAX_ROWS]
    ]
    if not rows:
        return ""
    return card("Contributions", table(("peer", "samples", "reduced", "relayed"), rows))


def _svg(height: int, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="{label}" font-size="12">'
        f"{''.join(parts)}</svg>"
    )
