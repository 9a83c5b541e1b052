"""A recorded run, drawn offline: the loss, the rounds, and any one of them in full, chosen with a slider."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

from colab_swarm.events import Event, RoundFinished, StepFinished
from colab_swarm.flight import Flight, read
from colab_swarm.markup import count, duration, plain, text
from colab_swarm.widgets import loss_band, theme
from colab_swarm.widgets.environment import has_frontend
from colab_swarm.widgets.rounds import waterfall_html, waterfall_text


class Replay:
    """A flight, to look at: as the last value of a cell it shows itself, ``print`` shows it as text.

    Args:
        flight: the recording.
        live: whether to use widgets; None to find out.
    """

    def __init__(self, flight: Flight, *, live: bool | None = None) -> None:
        self.flight = flight
        self._live = has_frontend() if live is None else live

    @property
    def events(self) -> tuple[Event, ...]:
        """All of them, in order."""
        return self.flight.events

    @cached_property
    def rounds(self) -> tuple[RoundFinished, ...]:
        """The averaging rounds, in order."""
        return tuple(event for event in self.events if isinstance(event, RoundFinished))

    @cached_property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) by step; where a step was taken again, the last one."""
        told = (event for event in self.events if isinstance(event, StepFinished))
        by_step = {one.step: one.loss for one in told if one.loss is not None and math.isfinite(one.loss)}
        return tuple(sorted(by_step.items()))

    def __len__(self) -> int:
        """How many events there are."""
        return len(self.events)

    # --- how it looks -------------------------------------------------------------------------------------------

    def html(self, chosen: int = -1) -> str:
        """All of it, with the round at ``chosen`` in full; the last one by default."""
        notes = "".join(f'<p class="warn">{text(note)}</p>' for note in self.flight.notes)
        loss = loss_band.render_html(self.losses) or loss_band.render_svg(self.losses)
        drawn = f"<h4>loss</h4>{loss}" if loss else ""
        rounds = waterfall_html(self.rounds, self._back(chosen), self.flight.names)
        inside = theme.heading("recorded", text(self._summary(), 400)) + notes + drawn + rounds
        return theme.wrap(inside, "a recorded run")

    def text(self, chosen: int = -1) -> str:
        """The same as lines."""
        lines = [self._summary(), *self.flight.notes]
        if self.losses:
            lines.append("  ".join(f"step {step}: {loss:.3f}" for step, loss in _few(self.losses)))
        return "\n".join([*lines, waterfall_text(self.rounds, self._back(chosen), self.flight.names)])

    def _back(self, chosen: int) -> int:
        """So many rounds before the last one."""
        return 0 if chosen < 0 else max(len(self.rounds) - 1 - chosen, 0)

    def _summary(self) -> str:
        header = self.flight.headers[-1]
        spans = [event.at for event in self.events if math.isfinite(event.at)]
        facts = [
            f"{plain(header.run, 40)}, seen by {plain(header.name, 40)}",
            count(len(self.rounds), "round"),
        ]
        if len(self.flight.headers) > 1:
            facts.append(count(len(self.flight.headers), "sitting"))
        elif spans:
            facts.append(duration(max(spans) - min(spans)))
        if self.losses:
            facts.append(f"loss {self.losses[0][1]:.3f} to {self.losses[-1][1]:.3f}")
        return ", ".join(facts)

    def __repr__(self) -> str:
        return f"Replay({self.flight.path.name}: {self._summary()})"

    def __str__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.text(), "text/html": self.html()}
        if self._live and len(self.rounds) > 1:
            view = {"model_id": self._widget.model_id, "version_major": 2, "version_minor": 0}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle

    @cached_property
    def _widget(self) -> Any:
        import ipywidgets

        last = len(self.rounds) - 1
        view = ipywidgets.HTML(self.html())
        slider = ipywidgets.IntSlider(last, 0, last, description="round", continuous_update=False)
        slider.tooltip = "choose the round that is shown in full"  # no trait in ipywidgets 7

        def choose(change: Any) -> None:
            view.value = self.html(change["new"])

        slider.observe(choose, names="value")
        return ipywidgets.VBox([slider, view])


def _few(losses: tuple[tuple[int, float], ...], most: int = 8) -> list[tuple[int, float]]:
    """Some of them, the last among them."""
    return [*losses[: -1 : math.ceil(len(losses) / most)], losses[-1]]


def replay(path: str | Path) -> Replay:
    """Look at a run that ``swarm.record(path)`` recorded; needs no swarm.

    Raises:
        ValueError: the file is no recording, or damaged; names the line.
        OSError: it cannot be read.
    """
    return Replay(read(path))
