"""What the doctor found: traffic lights, as text in a terminal and a table in a notebook; told by symbol and colour."""

from __future__ import annotations

import enum
import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from colab_swarm.widgets import theme

WIDTH = 100
INDENT = " " * 18


class Light(enum.Enum):
    """How good it is: symbol, word and hue."""

    GREEN = ("✔", "good", "green")
    YELLOW = ("▲", "look", "amber")
    RED = ("✖", "stop", "red")

    @property
    def symbol(self) -> str:
        """One character."""
        return self.value[0]

    @property
    def word(self) -> str:
        """For those who cannot see the symbol."""
        return self.value[1]

    @property
    def hue(self) -> str:
        """Of the theme."""
        return self.value[2]


@dataclass(frozen=True)
class Check:
    """One thing the doctor looked at.

    Attributes:
        name: of the thing.
        light: how good it is.
        text: what was found.
        fix: exactly what to do; empty only if the light is green.
    """

    name: str
    light: Light
    text: str
    fix: str = ""


def summary(checks: Sequence[Check]) -> str:
    """How many are good, to look at, and stopping, in one line."""
    count = {light: sum(check.light is light for check in checks) for light in Light}
    if count[Light.RED]:
        verdict = "this has to be mended before you train"
    else:
        verdict = (
            "ready to train" if not count[Light.YELLOW] else "ready to train, with a thing or two to know"
        )
    lights = ", ".join(f"{number} {light.symbol} {light.word}" for light, number in count.items() if number)
    return f"{verdict}: {lights}"


def render_text(checks: Sequence[Check]) -> str:
    """A line or more per check, and under it what to do."""
    lines = [summary(checks)]
    for check in checks:
        first = f" {check.light.symbol} {_plain(check.name):<15}"
        lines += textwrap.wrap(f"{first}{_plain(check.text)}", WIDTH, subsequent_indent=INDENT)
        if check.fix:
            arrow = f"{INDENT}→ {_plain(check.fix)}"
            lines += textwrap.wrap(arrow, WIDTH, subsequent_indent=INDENT + "  ", break_on_hyphens=False)
    return "\n".join(lines)


def render_html(checks: Sequence[Check]) -> str:
    """The same as a table."""
    return theme.wrap(
        theme.heading("doctor", html.escape(summary(checks)))
        + theme.table(("check", "", "found, and what to do"), map(_row, checks), label="checks"),
        "what the doctor found",
    )


def _row(check: Check) -> tuple[str, str, str]:
    light, fix = check.light, f"<br>→ <b>{html.escape(_plain(check.fix))}</b>" if check.fix else ""
    return (
        f'<b style="white-space:nowrap">{html.escape(_plain(check.name))}</b>',  # ours, and never long
        theme.mark(light.hue, light.symbol, light.word),
        html.escape(_plain(check.text)) + fix,
    )


def _plain(text: str) -> str:
    """Without control characters, which could steer a terminal: some of it comes from peers."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
