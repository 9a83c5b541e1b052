"""A live view of a swarm, or of anything that tells of itself by snapshots: widgets where a front-end is, else text.

Only the thread that the user works in touches a widget: Colab does not repaint what other threads change.
There are three ways to stay live: `Panel.watch`, which keeps the cell busy, `Panel.tick` in a training loop, and the
play button, by which the browser asks for a refresh each second while no cell runs.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from colab_swarm.notebook import buttons, rounds, swarm_map
from colab_swarm.notebook import views as render
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.snapshot import SwarmSnapshot

logger = logging.getLogger(__name__)

SHOW_EVERY_S = 0.25
TEXT_EVERY_S = 10.0
"""How often a line is printed where there is no front-end."""
AGAIN_S = 60.0
"""How long a training loop is spared a view that could not be drawn."""
ASCII = str.maketrans("█▓▒░·→‖●○◔…✔✖▲⚠×–", "##+-.>=*o%~+x!!x-")

S = TypeVar("S")


@dataclass(frozen=True)
class Page(Generic[S]):
    """A further page of a panel.

    Attributes:
        html, text: all of it, in the two ways; where there is a slider, they take its value too.
        slider: what it chooses, and its largest value; the least is 0.
    """

    html: Callable[..., str]
    text: Callable[..., str]
    slider: tuple[str, int] | None = None


@dataclass(frozen=True)
class Views(Generic[S]):
    """How snapshots of one kind look.

    Attributes:
        html, text: all of it.
        line: in a line.
        over: whether nothing will change any more.
        who: goes on when nobody watches.
        leave: the button that ends it, and what it says once clicked.
        first: name of the page that ``html`` and ``text`` make.
        pages: further ones by name.
        paused: whether it stands still; wanted by panels that can pause.
        stops: whether there is a button that interrupts the running cell.
    """

    html: Callable[[S], str]
    text: Callable[[S], str]
    line: Callable[[S], str]
    over: Callable[[S], bool]
    who: str = "peer"
    leave: tuple[str, str] = ("Leave", "Left")
    first: str = "overview"
    pages: Mapping[str, Page[S]] = field(default_factory=dict)
    paused: Callable[[S], bool] = lambda snapshot: False
    stops: bool = False


SWARM: Views[SwarmSnapshot] = Views(
    render.render_html,
    render.render_text,
    render.summary,
    lambda snapshot: snapshot.state == "left",
    first="swarm",
    pages={
        "rounds": Page(rounds.render_html, rounds.render_text, slider=("rounds back", rounds.RECENT - 1)),
        "map": Page(swarm_map.render_html, swarm_map.render_text),
    },
    paused=lambda snapshot: snapshot.paused,
    stops=True,
)


class Panel(Generic[S]):
    """Shows the swarm under the cell that it is the last value of.

    Args:
        read: takes a snapshot; called from the user's thread.
        stop: leaves the swarm; called from a thread of its own when the leave button has been clicked twice.
        views: of the snapshots.
        pause: lets the work stand still (True) and go on (False), on a thread of its own; None: it cannot.
        controls: makes further widgets, shown under the view; called where there is a front-end only.
        live: whether to use widgets; None to find out.
    """

    def __init__(
        self,
        read: Callable[[], S],
        stop: Callable[[], None],
        *,
        views: Views[S] = SWARM,  # type: ignore[assignment]
        pause: Callable[[bool], None] | None = None,
        controls: Callable[[], Sequence[Any]] = tuple,
        live: bool | None = None,
    ) -> None:
        self._read = read
        self._views = views
        self._pages = {views.first: Page(views.html, views.text), **views.pages}
        self._page, self._chosen = views.first, 0
        self._lock = threading.RLock()  # some kernels call back on a thread beside the busy cell
        self._box: Any = None
        self._shown_at = self._told_at = float("-inf")
        if has_frontend() if live is None else live:
            self._build(stop, pause, controls())

    def _build(
        self, stop: Callable[[], None], pause: Callable[[bool], None] | None, controls: Sequence[Any]
    ) -> None:
        import ipywidgets

        self._view = ipywidgets.HTML()
        self._slider = ipywidgets.IntSlider(
            layout={"display": "none"}, style={"description_width": "initial"}
        )
        self._slider.observe(self._choose, names="value")
        self._chooser = ipywidgets.ToggleButtons(
            options=list(self._pages), tooltips=[f"show the page: {name}" for name in self._pages]
        )
        self._chooser.style.button_width = "auto"
        self._chooser.observe(self._turn, names="value")
        live = buttons.play(self.tick)  # what it asked while a cell ran may come all at once
        self._pause = buttons.Pause(pause) if pause else None
        self._leave = buttons.Leave(self._views.leave, self._views.who, stop)
        row = [*live]
        row += [self._pause.widget] if self._pause else []
        row += [buttons.stop()] if self._views.stops else []
        pages = [self._chooser] if len(self._pages) > 1 else []
        wrapping = {"flex_flow": "row wrap"}
        bottom = ipywidgets.HBox([*row, self._leave.widget], layout=wrapping)
        self._box = ipywidgets.VBox([*pages, self._slider, self._view, *controls, bottom])
        self.refresh()
        for control in (self._chooser, self._slider):
            buttons.listen(control)

    def _turn(self, change: Any) -> None:
        """Show another page, from its newest state on."""
        self._page = change["new"]
        if slider := self._pages[self._page].slider:
            self._slider.description, self._slider.max = slider
        self._slider.layout.display = "" if slider else "none"
        buttons.listen(self._slider)
        self.refresh()

    def _choose(self, change: Any) -> None:
        self._chosen = change["new"]
        self.refresh()

    def _drawn(self, page: Page[S], snapshot: S, *, text: bool = False) -> str:
        draw = page.text if text else page.html
        return draw(snapshot, self._chosen) if page.slider else draw(snapshot)

    def refresh(self) -> S:
        """Take a snapshot, show it in the widget if there is one, and return it."""
        with self._lock:
            self._shown_at = time.monotonic()
            snapshot = self._read()
            if self._box is not None:
                over = self._views.over(snapshot)
                self._view.value = self._drawn(self._pages[self._page], snapshot)
                self._leave.settle(over)
                if self._pause:
                    self._pause.settle(self._views.paused(snapshot), over)
        return snapshot

    def tick(self) -> None:
        """Stay live from a training loop: call it after each batch, it takes time four times a second at most.

        Without a front-end it prints a line every `TEXT_EVERY_S`. A view that cannot be drawn does not end the
        training: the reason is logged.
        """
        now = time.monotonic()
        if now - self._shown_at < SHOW_EVERY_S:
            return
        try:
            snapshot = self.refresh()
            if self._box is None and now - self._told_at >= TEXT_EVERY_S:
                self._told_at = now
                _tell(self._views.line(snapshot))
        except Exception:
            logger.exception("the panel cannot be drawn, which does not matter to the training")
            self._shown_at = now + AGAIN_S

    def watch(self, seconds: float | None = None, every_s: float = 0.5) -> None:
        """Keep the view live for ``seconds``, or until the swarm is left or the user interrupts.

        An interrupt stops the watching, not the peer. Without a front-end a line is printed every
        `TEXT_EVERY_S`, and all pages at the end.
        """
        if self._box is not None:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]
        try:
            self._watch(seconds, every_s)
        except KeyboardInterrupt:
            _tell(
                f"Stopped watching; the {self._views.who} goes on. {self._views.leave[0].lower()}() stops it."
            )
        if self._box is None:
            snapshot = self._read()
            pages = (self._drawn(page, snapshot, text=True) for page in self._pages.values())
            _tell("\n\n".join(filter(None, pages)))

    def _watch(self, seconds: float | None, every_s: float) -> None:
        began = time.monotonic()
        lines = 0
        while not self._views.over(snapshot := self.refresh()):
            watched_s = time.monotonic() - began
            if seconds is not None and watched_s >= seconds:
                return
            if self._box is None and watched_s >= lines * TEXT_EVERY_S:
                _tell(self._views.line(snapshot))
                lines += 1
            time.sleep(every_s if seconds is None else min(every_s, seconds - watched_s))

    def __repr__(self) -> str:
        return f"Panel({self._views.line(self._read())})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """By hand, for ipywidgets 7 and 8 differ; files show the HTML, front-ends prefer the widget."""
        snapshot, page = self.refresh(), self._pages[self._page]
        bundle: dict[str, Any] = {
            "text/plain": self._drawn(page, snapshot, text=True),
            "text/html": self._drawn(page, snapshot),
        }
        if self._box is not None:
            view = {"model_id": self._box.model_id, "version_major": 2, "version_minor": 0}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle


def _tell(text: str) -> None:
    """Print, in ASCII where the terminal knows no more."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(ASCII).encode(encoding, "replace").decode(encoding)
    print(text, flush=True)
