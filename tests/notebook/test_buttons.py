"""What buttons do beside the panel that holds them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import ipywidgets

from colab_swarm.notebook import buttons


def test_a_button_that_speaks_from_a_cell_still_listens_while_the_cell_is_busy() -> None:
    noted = SimpleNamespace(_reply_subshell_id=None, comm_id="7")  # what ipykernel 7.4 notes
    button = SimpleNamespace(description="Pause", comm=noted)
    buttons.say(button, description="Resume")
    assert button.description == "Resume" and vars(noted) == {"comm_id": "7"}
    buttons.say(button, description="Pause")
    assert vars(noted) == {"comm_id": "7"}


def test_a_button_says_only_what_is_new() -> None:
    button = ipywidgets.Button(description="Pause")
    told: list[object] = []
    button.observe(told.append)
    buttons.say(button, description="Pause", disabled=False)
    assert not told


def test_the_browsers_clock_asks_for_refreshes() -> None:
    asked = threading.Event()
    clock, style = buttons.play(asked.set)
    clock.value += 1
    assert asked.is_set()
    assert "cs-live" in clock._dom_classes and '"live"' in style.value
