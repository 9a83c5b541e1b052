"""The volunteer's panel: a `VolunteerSnapshot` as text and as static HTML. Pure functions."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from colab_swarm.markup import count, duration, plain, size, text
from colab_swarm.notebook import theme

if TYPE_CHECKING:
    from colab_swarm.workunits.resume import UnitProgress, VolunteerSnapshot

BAR_CHARACTERS = 20
MAX_FAULT_CHARACTERS = 4000


def summary(snapshot: VolunteerSnapshot) -> str:
    """Return the volunteer's state in one line."""
    return f"{plain(snapshot.job)}: {_state(snapshot)}"


def render_text(snapshot: VolunteerSnapshot) -> str:
    """Draw the volunteer as lines, for terminals and for outputs without HTML."""
    lines = [summary(snapshot)]
    for unit in snapshot.units:
        if unit.unit:
            full = int(_share(unit) * BAR_CHARACTERS)
            lines.append(f"  [{'#' * full}{'.' * (BAR_CHARACTERS - full)}] {_progress(unit)}")
    lines.append("  " + "; ".join(f"{name}: {value}" for name, value in _figures(snapshot).items()))
    if snapshot.refusal:
        lines.append(f"  last refusal: {plain(snapshot.refusal)}")
    return "\n".join(lines) + (f"\n{snapshot.fault[-MAX_FAULT_CHARACTERS:]}" if snapshot.fault else "")


def render_html(snapshot: VolunteerSnapshot) -> str:
    """Draw the volunteer as one ``div``: its state, a bar per unit, its contribution."""
    refusal = f'<p class="warn">last refusal: {text(snapshot.refusal)}</p>' if snapshot.refusal else ""
    fault = html.escape(snapshot.fault[-MAX_FAULT_CHARACTERS:])
    units = "".join(
        f"<p>{html.escape(_progress(unit))}{theme.bar(_share(unit), html.escape(_progress(unit)))}</p>"
        for unit in snapshot.units
        if unit.unit
    )
    return theme.wrap(
        f"{theme.heading(text(snapshot.job), html.escape(_state(snapshot)))}{units}"
        f"{theme.cards(_figures(snapshot))}{refusal}"
        + (f'<pre style="font-size:11px;overflow:auto">{fault}</pre>' if fault else ""),
        f"volunteer for {plain(snapshot.job)}",
    )


def _figures(snapshot: VolunteerSnapshot) -> dict[str, str]:
    uploads = sum(unit.phase == "uploading" for unit in snapshot.units)
    lookups = snapshot.cache_hits + snapshot.cache_misses
    return {
        "contributed": f"{count(snapshot.samples, 'sample')} in {duration(snapshot.seconds)}",
        "downloaded": size(snapshot.received_bytes),
        "uploaded": size(snapshot.sent_bytes),
        "data found on disk": f"{snapshot.cache_hits} of {lookups} times" if lookups else "–",
        "running uploads": f"{uploads}",
    }


def _state(snapshot: VolunteerSnapshot) -> str:
    epoch = ""
    if snapshot.epoch:
        accuracy = "" if snapshot.accuracy is None else f", accuracy {snapshot.accuracy:.3f} after the last"
        epoch = f"epoch {snapshot.epoch}{accuracy}; "
    others = {"refused": snapshot.refused, "given back": snapshot.given_back}
    units = [count(snapshot.accepted, "unit") + " accepted"]
    units += [f"{number:,} {what}" for what, number in others.items() if number]
    return f"{plain(snapshot.state)}; {epoch}{', '.join(units)}"


def _progress(unit: UnitProgress) -> str:
    batches = f" {unit.done:,} of {unit.batches:,} batches" if unit.batches else ""
    loss = "" if unit.loss is None else f", loss {unit.loss:.3f}"
    return f"{unit.unit}: {unit.phase}{batches}{loss}, {duration(unit.seconds)}"


def _share(unit: UnitProgress) -> float:
    return unit.done / unit.batches if unit.batches else 0.0
