"""A `VolunteerSnapshot` as text and as static HTML. Pure functions; every text of the coordinator's is escaped.

The HTML needs no script, style sheet or font, and takes its colours from the page, light or dark.
"""

from __future__ import annotations

import html

from colab_swarm.markup import count, duration, plain, size, text
from colab_swarm.workunits.volunteer_snapshot import UnitProgress, VolunteerSnapshot

BAR_CHARACTERS = 20
MAX_FAULT_CHARACTERS = 4000


def summary(snapshot: VolunteerSnapshot) -> str:
    """What goes on, in one line."""
    return f"{plain(snapshot.job)}: {plain(snapshot.state)}; {_job(snapshot)}{_units(snapshot)}"


def render_text(snapshot: VolunteerSnapshot) -> str:
    """As lines, for terminals and for outputs without HTML."""
    lines = [summary(snapshot), *(f"  {_bar(unit)} {_told(unit)}" for unit in snapshot.units if unit.unit)]
    lines.append(f"  {_total(snapshot)}")
    if snapshot.refusal:
        lines.append(f"  last refusal: {plain(snapshot.refusal)}")
    return "\n".join(lines) + (f"\n{snapshot.fault[-MAX_FAULT_CHARACTERS:]}" if snapshot.fault else "")


def render_html(snapshot: VolunteerSnapshot) -> str:
    """As one ``div``: what goes on, a bar per unit, the whole contribution."""
    refusal = f"<br>last refusal: {text(snapshot.refusal)}" if snapshot.refusal else ""
    fault = snapshot.fault[-MAX_FAULT_CHARACTERS:]
    return (
        '<div style="font-family:sans-serif;font-size:13px;line-height:1.5">'
        f"<p><b>{text(snapshot.job)}</b>: {text(snapshot.state)}<br>{_job(snapshot)}{_units(snapshot)}</p>"
        f"{''.join(_html_bar(unit) for unit in snapshot.units if unit.unit)}"
        f"<p>{html.escape(_total(snapshot))}{refusal}</p>"
        + (f'<pre style="font-size:11px;overflow:auto">{html.escape(fault)}</pre>' if fault else "")
        + "</div>"
    )


def _job(snapshot: VolunteerSnapshot) -> str:
    if not snapshot.epoch:
        return ""
    accuracy = "" if snapshot.accuracy is None else f", accuracy {snapshot.accuracy:.3f} after the last"
    return f"epoch {snapshot.epoch}{accuracy}; "


def _units(snapshot: VolunteerSnapshot) -> str:
    others = {"refused": snapshot.refused, "given back": snapshot.given_back}
    told = [count(snapshot.accepted, "unit") + " accepted"]
    return ", ".join(told + [f"{number:,} {what}" for what, number in others.items() if number])


def _total(snapshot: VolunteerSnapshot) -> str:
    return (
        f"you gave {count(snapshot.samples, 'sample')} of training in {duration(snapshot.seconds)}; "
        f"{size(snapshot.received_bytes)} fetched, {size(snapshot.sent_bytes)} brought"
    )


def _told(unit: UnitProgress) -> str:
    batches = f" {unit.done:,} of {unit.batches:,} batches" if unit.batches else ""
    loss = "" if unit.loss is None else f", loss {unit.loss:.3f}"
    return f"{unit.unit}: {unit.phase}{batches}{loss}, {duration(unit.seconds)}"


def _share(unit: UnitProgress) -> float:
    return unit.done / unit.batches if unit.batches else 0.0


def _bar(unit: UnitProgress) -> str:
    full = int(_share(unit) * BAR_CHARACTERS)
    return f"[{'#' * full}{'.' * (BAR_CHARACTERS - full)}]"


def _html_bar(unit: UnitProgress) -> str:
    percent, told = f"{100 * _share(unit):.0f}", html.escape(_told(unit))
    return (
        f'<div role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}" '
        f'aria-label="{told}" style="position:relative;max-width:480px;height:12px;border-radius:6px;'
        'border:1px solid currentColor;overflow:hidden">'
        f'<div style="width:{percent}%;height:100%;background:#2a7fbf"></div></div>'
        f'<div style="margin-bottom:6px">{told}</div>'
    )
