"""A live view of any object that provides snapshots: widgets if there is a front-end, otherwise text.

Only the user's thread changes a widget, because Colab does not repaint a widget that another thread changes. The
callback of a button blocks the kernel, so it gives its work to another thread.
"""

import _thread
import asyncio
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from colab_swarm.notebook import views
from colab_swarm.notebook.platforms import has_frontend
from colab_swarm.notebook.theme import Document
from colab_swarm.snapshot import SwarmSnapshot

logger = logging.getLogger(__name__)
SHOW_EVERY_S = 0.25
_TEXT_EVERY_S = 10.0  # interval between printed lines if there is no front-end
RETRY_S = 60.0  # pause in a training loop after a view could not be drawn
CONFIRM_S = 5.0  # how long the leave button waits for the second click
BEAT_S = 2.0  # how often the kernel checks whether the browser's clock runs
_HEIGHT = (
    "520px"  # of the view, which scrolls if it needs more; with its controls a panel has at most 600 pixels
)
_ASCII = str.maketrans("█▓▒░·→‖●○◔…✔✖▲⚠×–", "##+-.>=*o%~+x!!x-")
# Show the play widget as one switch with a name: only its first button, or in ipywidgets 7, while it plays, its second.
PLAY_STYLE = """<style>.cs-live,.cs-live button{width:auto!important;flex:none!important}
.cs-live button:nth-child(n+2),.cs-live .mod-active{display:none!important}
.cs-live button:first-child.mod-active+button{display:inline-block!important}
.cs-live button::after{content:"Auto-refresh";margin-left:6px} .cs-live i.fa-pause{color:#1a9c74}
.cs-live i.fa-play::before{content:"\\f204";content:"\\f204"/"off"}
.cs-live i.fa-pause::before{content:"\\f205";content:"\\f205"/"on"}</style>"""
WRAPPING = {"flex_flow": "row wrap"}


class PanelSnapshot(Protocol):
    """A snapshot that a panel shows. If the view can pause, the snapshot also has ``paused``."""

    @property
    def over(self) -> bool:
        """True if nothing will change any more."""


S = TypeVar("S", bound=PanelSnapshot)


@dataclass(frozen=True)
class Page(Generic[S]):
    draw: Callable[..., Document]  # takes a snapshot, and the value of the slider if there is one
    slider: tuple[str, int] | None = None  # its name and its largest value; the smallest is 0


@dataclass(frozen=True)
class Views(Generic[S]):
    draw: Callable[[S], Document]  # returns the first page; its first line is a summary
    who: str = "peer"  # the name of the thing that continues when the user stops watching
    leave: tuple[str, str] = ("Leave swarm", "Left")  # text of the last button, before and after the click
    pages: Mapping[str, Page[S]] = field(default_factory=dict)  # pages after the first by name
    stops: bool = False  # whether to offer a button that interrupts the running cell


SWARM: Views[SwarmSnapshot] = Views(
    views.draw,
    pages={"rounds": Page(views.draw_rounds, ("rounds back", views.RECENT - 1)), "map": Page(views.draw_map)},
    stops=True,
)


class Panel(Generic[S]):
    """A live view under the cell that has it as its last value; ``live=None`` detects whether there is a front-end.

    ``read`` takes a snapshot, on the user's thread. ``stop`` is called after two clicks, and ``pause`` with
    True to pause and False to resume; each call has a separate thread. ``controls`` makes further widgets.
    """

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("a Panel cannot be copied or pickled, as it is live: keep swarm.snapshot() instead")

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
        self._stop = stop
        self._pause = pause
        self._views = views
        # the name of the first page is visible only if there are other pages, and only a swarm's panel has these
        self._pages = {"swarm": Page(views.draw), **views.pages}
        self._page = "swarm"
        self._chosen = 0
        # while a cell runs, some kernels call back on another thread
        self._lock = threading.RLock()
        self._box: Any = None
        self.form: Any = None  # the box that contains this panel, until a training cell shows it
        self._beat: asyncio.TimerHandle | None = None
        self._clock_was = 0
        self._paused = False
        self._left = False
        self._shown_at = -math.inf
        self._printed_at = -math.inf
        self._clicked_at = -math.inf
        if live is None:
            live = has_frontend()
        if live:
            self._build(controls())

    def _build(self, controls: Sequence[Any]) -> None:
        import ipywidgets

        self._view = ipywidgets.HTML(layout={"max_height": _HEIGHT, "overflow": "auto"})
        self._slider = ipywidgets.IntSlider(layout={"display": "none"})
        self._slider.style.description_width = "initial"
        tooltips = [f"show the page: {name}" for name in self._pages]
        self._chooser = ipywidgets.ToggleButtons(options=list(self._pages), tooltips=tooltips)
        self._chooser.style.button_width = "auto"
        for control in (self._chooser, self._slider):
            control.observe(self._on_choice, names="value")
        name = self._views.leave[0]
        who = self._views.who
        tooltip = f"{name}: end this {who}'s part for good, after a second click"
        self._leave_button = make_button(name, "sign-out", tooltip, self._on_leave)
        tooltip = "Pause: your work stops, the others continue; some kernels react when no cell runs"
        self._pause_button = make_button(f"Pause {who}", "pause", tooltip, self._on_pause)
        self._clock = ipywidgets.Play(interval=1000, max=1_000_000, show_repeat=False)
        # ipywidgets 7 has another name for this trait, and none for the tooltip
        self._playing = "playing" if self._clock.has_trait("playing") else "_playing"
        setattr(self._clock, self._playing, True)
        self._clock.tooltip = "Auto-refresh: keep this view up to date while no cell runs"
        self._clock.add_class("cs-live")
        # many ticks may come together
        self._clock.observe(lambda change: self.tick(), names="value")
        row = []
        if len(self._pages) > 1:
            row.append(self._chooser)
        row += [self._clock, ipywidgets.HTML(PLAY_STYLE)]
        if self._pause:
            row.append(self._pause_button)
        if self._views.stops:
            tooltip = "Stop: interrupt the cell that trains; if nothing happens, press ■ in the toolbar"
            row.append(make_button("Stop cell", "stop", tooltip, _interrupt_cell))
        row.append(self._leave_button)
        top = ipywidgets.HBox(row, layout=WRAPPING)
        self._box = ipywidgets.VBox([top, *controls, self._slider, self._view])
        self.refresh()
        for control in (self._clock, self._chooser, self._slider):
            _keep_listening(control)

    def widget(self) -> Any:
        """Return the widget, for display or as a part of another, and start its clock; None without a front-end."""
        if self._box is not None and self._beat is None:
            # outside of a kernel no loop runs
            with suppress(RuntimeError):
                self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._keep_clock)
        return self._box

    def show_here(self) -> None:
        """Display the panel under the running cell, and no longer in the form of `cs.connect`."""
        from IPython.display import display

        if self.form is not None:
            self.form.children = tuple(child for child in self.form.children if child is not self._box)
            self.form = None
        display(self)  # type: ignore[no-untyped-call]

    def _keep_clock(self) -> None:
        """Start the browser's clock if it is switched on but does not run, as after a page was loaded.

        In ipywidgets 7 only a click can start the clock. Until then the kernel refreshes the view.
        """
        if self._clock.value == self._clock_was and getattr(self._clock, self._playing):
            for playing in (False, True):
                setattr(self._clock, self._playing, playing)
            _keep_listening(self._clock)
            if self._playing == "_playing":
                self.tick()
        self._clock_was = self._clock.value
        self._beat = None
        if not self._left:
            self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._keep_clock)

    def _on_choice(self, change: Any) -> None:
        self._page = self._chooser.value
        self._chosen = self._slider.value
        slider = self._pages[self._page].slider
        if slider:
            self._slider.description, self._slider.max = slider
        self._slider.layout.display = "" if slider else "none"
        _keep_listening(self._slider)
        self.refresh()

    def _on_leave(self) -> None:
        if time.monotonic() - self._clicked_at > CONFIRM_S:
            self._clicked_at = time.monotonic()
            again = f"{self._views.leave[0]}? Click again"
            update_button(self._leave_button, description=again, button_style="warning")
            return
        self._left = True
        self._show_buttons()
        threading.Thread(target=self._stop, daemon=True).start()

    def _on_pause(self) -> None:
        self._paused = not self._paused
        threading.Thread(target=self._pause, args=(self._paused,), daemon=True).start()
        self._show_buttons()

    def _show_buttons(self) -> None:
        before, after = self._views.leave
        if self._left:
            update_button(self._leave_button, description=after, disabled=True, button_style="")
        elif time.monotonic() - self._clicked_at > CONFIRM_S:
            # there was no second click
            update_button(self._leave_button, description=before, button_style="")
        verb = "Resume" if self._paused else "Pause"
        icon = "play" if self._paused else "pause"
        description = f"{verb} {self._views.who}"
        update_button(self._pause_button, description=description, icon=icon, disabled=self._left)

    def _draw(self, page: Page[S], snapshot: S) -> Document:
        if page.slider:
            return page.draw(snapshot, self._chosen)
        return page.draw(snapshot)

    def refresh(self) -> S:
        with self._lock:
            self._shown_at = time.monotonic()
            snapshot = self._read()
            if self._box is not None:
                self._view.value = self._draw(self._pages[self._page], snapshot).html()
                self._left = self._left or snapshot.over
                self._paused = getattr(snapshot, "paused", False)
                self._show_buttons()
        return snapshot

    def tick(self) -> None:
        """Update the view from a training loop: call this after each batch. It draws at most four times a second.

        Without a front-end it prints a line every 10 s. If a view fails, the error is logged.
        """
        now = time.monotonic()
        if now - self._shown_at < SHOW_EVERY_S:
            return
        try:
            self._print_line(self.refresh())
        except Exception:  # a view that fails must not end the training
            logger.exception("cannot draw the panel; training continues")
            self._shown_at = now + RETRY_S

    def watch(self, seconds: float | None = None, every_s: float = 0.5) -> None:
        """Update the view for ``seconds``, or until this peer leaves or you interrupt the cell.

        Without a front-end, a line is printed every 10 s, and all pages at the end.
        """
        if self._box is not None:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]
        end = math.inf if seconds is None else time.monotonic() + seconds
        try:
            while not (snapshot := self.refresh()).over and time.monotonic() < end:
                self._print_line(snapshot)
                time.sleep(min(every_s, max(0.0, end - time.monotonic())))
        except KeyboardInterrupt:
            method = "leave" if self._views.leave[0].startswith("Leave") else "close"
            _print(f"Stopped watching; the {self._views.who} continues. {method}() ends it.")
        if self._box is None:
            snapshot = self._read()
            pages = [self._draw(page, snapshot).text() for page in self._pages.values()]
            _print("\n\n".join(filter(None, pages)))

    def _print_line(self, snapshot: S) -> None:
        now = time.monotonic()
        if self._box is None and now - self._printed_at >= _TEXT_EVERY_S:
            self._printed_at = now
            _print(self._views.draw(snapshot).line)

    def __repr__(self) -> str:
        return f"Panel({self._views.draw(self._read()).line})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self._draw(self._pages[self._page], self.refresh()).bundle(self.widget())


def make_button(description: str, icon: str, tooltip: str, clicked: Callable[[], None]) -> Any:
    """Return a button; ``clicked`` must return immediately."""
    import ipywidgets

    button = ipywidgets.Button(description=description, icon=icon, tooltip=tooltip)
    button.layout.width = "auto"
    button.on_click(lambda _: clicked())
    _keep_listening(button)
    return button


def update_button(button: Any, **traits: object) -> None:
    # if a trait has the new value already, nothing is sent
    for name, value in traits.items():
        setattr(button, name, value)
    _keep_listening(button)


def _keep_listening(control: Any) -> None:
    """Make a control work while a cell runs, if the kernel supports that.

    ipykernel 7.4 handles a click during a cell only if no cell has updated the widget, so delete its note of updates.
    """
    if control.comm is not None:
        vars(control.comm).pop("_reply_subshell_id", None)


def _interrupt_cell() -> None:
    """Interrupt the running cell, as ■ does. If this runs on the main thread, the cell has ended already."""
    if threading.current_thread() is threading.main_thread():
        return
    # a signal also interrupts a cell that waits
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def _print(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    print(text, flush=True)
