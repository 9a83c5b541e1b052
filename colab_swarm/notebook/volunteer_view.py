"""The volunteer's panel: a `VolunteerSnapshot` as text and as static HTML. Pure functions."""

from __future__ import annotations

import html

from colab_swarm.markup import count, duration, plain, size, text
from colab_swarm.notebook import theme
from colab_swarm.workunits.resume import UnitProgress, VolunteerSnapshot

BAR_CHARACTERS = 20
MAX_FAULT_CHARACTERS = 4000


def summary(snapshot: VolunteerSnapshot) -> str:
    """What goes on, in one line."""
    return f"{plain(snapshot.job)}: {_now(snapshot)}"


def render_text(snapshot: VolunteerSnapshot) -> str:
    """As lines, for terminals and for outputs without HTML."""
    lines = [summary(snapshot), *(f"  {_bar(unit)} {_told(unit)}" for unit in snapshot.units if unit.unit)]
    lines.append("  " + "; ".join(f"{name}: {value}" for name, value in figures(snapshot).items()))
    if snapshot.refusal:
        lines.append(f"  last refusal: {plain(snapshot.refusal)}")
    return "\n".join(lines) + (f"\n{snapshot.fault[-MAX_FAULT_CHARACTERS:]}" if snapshot.fault else "")


def render_html(snapshot: VolunteerSnapshot) -> str:
    """As one ``div``: what goes on, a bar per unit, the whole contribution."""
    refusal = f'<p class="warn">last refusal: {text(snapshot.refusal)}</p>' if snapshot.refusal else ""
    fault = html.escape(snapshot.fault[-MAX_FAULT_CHARACTERS:])
    units = "".join(
        f"<p>{html.escape(_told(unit))}{theme.bar(_share(unit), html.escape(_told(unit)))}</p>"
        for unit in snapshot.units
        if unit.unit
    )
    return theme.wrap(
        f"{theme.heading(text(snapshot.job), html.escape(_now(snapshot)))}{units}"
        f"{theme.cards(figures(snapshot))}{refusal}"
        + (f'<pre style="font-size:11px;overflow:auto">{fault}</pre>' if fault else ""),
        f"volunteer for {plain(snapshot.job)}",
    )


def figures(snapshot: VolunteerSnapshot) -> dict[str, str]:
    """What came of it so far, by its name."""
    uploads = sum(unit.phase == "uploading" for unit in snapshot.units)
    looked_up = snapshot.cache_hits + snapshot.cache_misses
    return {
        "you gave": f"{count(snapshot.samples, 'sample')} in {duration(snapshot.seconds)}",
        "fetched": size(snapshot.received_bytes),
        "brought": size(snapshot.sent_bytes),
        "data found on disk": f"{snapshot.cache_hits} of {looked_up} times" if looked_up else "–",
        "uploads under way": f"{uploads}",
    }


def _now(snapshot: VolunteerSnapshot) -> str:
    return f"{plain(snapshot.state)}; {_job(snapshot)}{_units(snapshot)}"


def _job(snapshot: VolunteerSnapshot) -> str:
    if not snapshot.epoch:
        return ""
    accuracy = "" if snapshot.accuracy is None else f", accuracy {snapshot.accuracy:.3f} after the last"
    return f"epoch {snapshot.epoch}{accuracy}; "


def _units(snapshot: VolunteerSnapshot) -> str:
    others = {"refused": snapshot.refused, "given back": snapshot.given_back}
    told = [count(snapshot.accepted, "unit") + " accepted"]
    return ", ".join(told + [f"{number:,} {what}" for what, number in others.items() if number])


def _told(unit: UnitProgress) -> str:
    batches = f" {unit.done:,} of {unit.batches:,} batches" if unit.batches else ""
    loss = "" if unit.loss is None else f", loss {unit.loss:.3f}"
    return f"{unit.unit}: {unit.phase}{batches}{loss}, {duration(unit.seconds)}"


def _share(unit: UnitProgress) -> float:
    return unit.done / unit.batches if unit.batches else 0.0


def _bar(unit: UnitProgress) -> str:
    full = int(_share(unit) * BAR_CHARACTERS)
    return f"[{'#' * full}{'.' * (BAR_CHARACTERS - full)}]"
