"""The volunteer's panel: a `VolunteerSnapshot` as text and as static HTML. Pure functions."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from colab_swarm.markup import count, duration, plain, size
from colab_swarm.notebook.theme import Document

if TYPE_CHECKING:
    from colab_swarm.workunits.client import VolunteerSnapshot

MAX_FAULT_CHARACTERS = 4000


def summary(snapshot: VolunteerSnapshot) -> str:
    """Return the volunteer's state in one line."""
    return f"{plain(snapshot.job)}: {_state(snapshot)}"


def draw(snapshot: VolunteerSnapshot) -> Document:
    """Return the volunteer: its state, a bar per unit, its contribution."""
    shown = Document(plain(snapshot.job), _state(snapshot), label=f"volunteer for {plain(snapshot.job)}")
    for unit in snapshot.units:
        if unit.unit:
            batches = f" {unit.done:,} of {unit.batches:,} batches" if unit.batches else ""
            loss = "" if unit.loss is None else f", loss {unit.loss:.3f}"
            words = f"{unit.phase}{batches}{loss}, {duration(unit.seconds)}"
            shown.bar(unit.done / unit.batches if unit.batches else 0.0, words, title=unit.unit)
    lookups = snapshot.cache_hits + snapshot.cache_misses
    figures = {
        "contributed": f"{count(snapshot.samples, 'sample')} in {duration(snapshot.seconds)}",
        "downloaded": size(snapshot.received_bytes),
        "uploaded": size(snapshot.sent_bytes),
        "data found on disk": f"{snapshot.cache_hits} of {lookups} times" if lookups else "–",
    }
    shown.figures(figures)
    shown.warn(f"last refusal: {snapshot.refusal}" if snapshot.refusal else "")
    if fault := snapshot.fault[-MAX_FAULT_CHARACTERS:]:
        shown.draw(f'<pre style="font-size:11px;overflow:auto">{html.escape(fault)}</pre>', fault)
    return shown


def _state(snapshot: VolunteerSnapshot) -> str:
    epoch = ""
    if snapshot.epoch:
        accuracy = "" if snapshot.accuracy is None else f", accuracy {snapshot.accuracy:.3f} after the last"
        epoch = f"epoch {snapshot.epoch}{accuracy}; "
    others = {"refused": snapshot.refused, "given back": snapshot.given_back}
    units = [count(snapshot.accepted, "unit") + " accepted"]
    units += [f"{number:,} {what}" for what, number in others.items() if number]
    return f"{plain(snapshot.state)}; {epoch}{', '.join(units)}"
