"""A live view of a swarm, or of anything that tells of itself by snapshots: widgets where a front-end is, else text.

Only the thread that the user works in touches a widget: Colab does not repaint what other threads change.
There are three ways to stay live: `Panel.watch`, which keeps the cell busy, `Panel.tick` in a training loop, and the
play button, by which the browser asks for a refresh each second while no cell runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from colab_swarm.widgets.environment import has_frontend
from colab_swarm.widgets.render import render_html, render_text, summary

SHOW_EVERY_S = 0.5
TEXT_EVERY_S = 10.0
"""How often a line is printed where there is no front-end."""


S = TypeVar("S")


@dataclass(frozen=True)
class Views(Generic[S]):
    """How snapshots of one kind look.

    Attributes:
        html, text: all of it.
        line: in a line.
        over: whether nothing will change any more.
        who: goes on when nobody watches.
        leave: the button that ends it, and what it says once clicked.
    """

    html: Callable[[S], str]
    text: Callable[[S], str]
    line: Callable[[S], str]
    over: Callable[[S], bool]
    who: str = "peer"
    leave: tuple[str, str] = ("Leave", "Left")


SWARM: Views[Any] = Views(render_html, render_text, summary, lambda snapshot: snapshot.state == "left")


class Panel(Generic[S]):
    """Shows the swarm under the cell that it is the last value of.

    Args:
        read: takes a snapshot; called from the user's thread.
        stop: leaves the swarm; called from a thread of its own when the stop button is clicked.
        views: of the snapshots.
        live: whether to use widgets; None to find out.
    """

    def __init__(
        self,
        read: Callable[[], S],
        stop: Callable[[], None],
        *,
        views: Views[S] = SWARM,
        live: bool | None = None,
    ) -> None:
        self._read = read
        self._stop = stop
        self._views = views
        self._view: Any = None
        self._box: Any = None
        self._shown_at = self._told_at = float("-inf")
        if has_frontend() if live is None else live:
            self._build()

    def _build(self) -> None:
        import ipywidgets

        self._view = ipywidgets.HTML(self._views.html(self._read()))
        live = ipywidgets.Play(interval=1000, max=1_000_000, show_repeat=False)
        live.observe(lambda change: self.refresh(), names="value")
        leave = ipywidgets.Button(description=self._views.leave[0], icon="sign-out")
        leave.on_click(self._leave)
        self._box = ipywidgets.VBox([self._view, ipywidgets.HBox([live, ipywidgets.Label("live"), leave])])

    def _leave(self, button: Any) -> None:
        """A callback must return at once: it holds up the kernel."""
        button.disabled, button.description = True, self._views.leave[1]
        threading.Thread(target=self._stop, name="colab-swarm-leave", daemon=True).start()

    def refresh(self) -> S:
        """Take a snapshot, show it in the widget if there is one, and return it."""
        snapshot = self._read()
        if self._view is not None:
            self._view.value = self._views.html(snapshot)
        return snapshot

    def tick(self) -> None:
        """Stay live from a training loop: call it after each batch, it takes time twice a second only.

        Without a front-end it prints a line every `TEXT_EVERY_S`.
        """
        now = time.monotonic()
        if now - self._shown_at < SHOW_EVERY_S:
            return
        self._shown_at = now
        snapshot = self.refresh()
        if self._box is None and now - self._told_at >= TEXT_EVERY_S:
            self._told_at = now
            print(self._views.line(snapshot), flush=True)

    def watch(self, seconds: float | None = None, every_s: float = 0.5) -> None:
        """Keep the view live for ``seconds``, or until the swarm is left or the user interrupts.

        An interrupt stops the watching, not the peer. Without a front-end a line is printed every
        `TEXT_EVERY_S`, and the whole view at the end.
        """
        if self._box is not None:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]
        try:
            self._watch(seconds, every_s)
        except KeyboardInterrupt:
            print(
                f"Stopped watching; the {self._views.who} goes on. {self._views.leave[0].lower()}() stops it."
            )
        if self._box is None:
            print(self._views.text(self._read()))

    def _watch(self, seconds: float | None, every_s: float) -> None:
        began = time.monotonic()
        lines = 0
        while not self._views.over(snapshot := self.refresh()):
            watched_s = time.monotonic() - began
            if seconds is not None and watched_s >= seconds:
                return
            if self._box is None and watched_s >= lines * TEXT_EVERY_S:
                print(self._views.line(snapshot), flush=True)
                lines += 1
            time.sleep(every_s if seconds is None else min(every_s, seconds - watched_s))

    def __repr__(self) -> str:
        return f"Panel({self._views.line(self._read())})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """By hand, for ipywidgets 7 and 8 differ; files show the HTML, front-ends prefer the widget."""
        snapshot = self.refresh()
        views = self._views
        bundle: dict[str, Any] = {"text/plain": views.text(snapshot), "text/html": views.html(snapshot)}
        if self._box is not None:
            view = {"model_id": self._box.model_id, "version_major": 2, "version_minor": 0}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle
