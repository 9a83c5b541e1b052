"""The buttons of a panel. What a click asks for is handed to a thread: a callback holds up the kernel."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

SURE_S = 5.0
"""How long a button that asks "sure?" waits for the second click."""
PLAY_STYLE = """<style>.cs-live button::after{margin-left:6px} .cs-live button:nth-child(1)::after{content:"live"}
.cs-live button:nth-child(2)::after{content:"still"}</style>"""
"""The play widget's buttons have pictures only, and no trait to name them by."""


def make(description: str, icon: str, tooltip: str, clicked: Callable[[], None]) -> Any:
    """A button; ``clicked`` must return at once."""
    import ipywidgets

    button = ipywidgets.Button(description=description, icon=icon, tooltip=tooltip)
    button.layout.width = "auto"
    button.on_click(lambda _: clicked())
    say(button)
    return button


def say(button: Any, **traits: object) -> None:
    """Change what is new of a button, and let it go on listening."""
    for name, value in traits.items():
        if getattr(button, name) != value:
            setattr(button, name, value)
    listen(button)


def listen(control: Any) -> None:
    """Keep a control alive while a cell runs, on kernels that can.

    Some kernels (ipykernel 7) take clicks in a thread beside the busy cell, but 7.4 does so only for widgets that no
    cell has spoken of since. It is to forget that one has; other kernels keep no such note.
    """
    if control.comm is not None:
        vars(control.comm).pop("_reply_subshell_id", None)


def interrupt_cell() -> None:
    """Interrupt the cell that runs, as the notebook's own ■ does; nothing happens where none runs.

    A callback on the main thread means that the cell has ended already: the kernel took the click only then.
    """
    if threading.current_thread() is threading.main_thread():
        return
    if hasattr(signal, "pthread_kill"):  # wakes the cell from a wait too
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def play(refresh: Callable[[], object]) -> tuple[Any, Any]:
    """The button by which the browser asks for a refresh each second, and the style that gives it its name."""
    import ipywidgets

    clock = ipywidgets.Play(interval=1000, max=1_000_000, show_repeat=False)
    clock.tooltip = "live: keeps this view up to date while no cell runs"  # ipywidgets 7 has no such trait
    clock.add_class("cs-live")
    clock.observe(lambda change: refresh(), names="value")
    listen(clock)
    return clock, ipywidgets.HTML(PLAY_STYLE)


class Leave:
    """Ends what the panel shows, at the second click.

    Args:
        words: on the button before and after.
        who: leaves.
        stop: ends it; called on a thread of its own.
    """

    def __init__(self, words: tuple[str, str], who: str, stop: Callable[[], None]) -> None:
        self._before, self._after = words
        self._stop = stop
        self._asked_at = float("-inf")
        self._done = False
        tooltip = f"{self._before}: ends this {who}'s part for good; asks once more"
        self.widget = make(self._before, "sign-out", tooltip, self._click)

    def _click(self) -> None:
        if time.monotonic() - self._asked_at > SURE_S:
            self._asked_at = time.monotonic()
            say(self.widget, description=f"{self._before}? Click again", button_style="warning")
            return
        self.settle(over=True)
        threading.Thread(target=self._stop, name="colab-swarm-leave", daemon=True).start()

    def settle(self, over: bool) -> None:
        """Say what is the case: over, or a question that nobody answered."""
        self._done = self._done or over
        if self._done:
            say(self.widget, description=self._after, disabled=True, button_style="")
        elif time.monotonic() - self._asked_at > SURE_S:
            say(self.widget, description=self._before, button_style="")


class Pause:
    """Lets the work stand still, and go on.

    Args:
        pause: called with what is wanted, on a thread of its own.
    """

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self._pause = pause
        self._paused = False
        tooltip = (
            "Pause: your work stands still, others go on without you; click again to go on. "
            "Some kernels take clicks only while no cell runs"
        )
        self.widget = make("Pause", "pause", tooltip, self._click)

    def _click(self) -> None:
        wanted = not self._paused
        threading.Thread(target=self._pause, args=(wanted,), name="colab-swarm-pause", daemon=True).start()
        self.settle(wanted, over=False)

    def settle(self, paused: bool, over: bool) -> None:
        """Say what is the case."""
        self._paused = paused
        words = ("Resume", "play") if paused else ("Pause", "pause")
        say(self.widget, description=words[0], icon=words[1], disabled=over)


def stop() -> Any:
    """The button that interrupts the running cell."""
    tooltip = "Stop: interrupts the cell that trains; where nothing happens, press ■ in the toolbar instead"
    return make("Stop", "stop", tooltip, interrupt_cell)
