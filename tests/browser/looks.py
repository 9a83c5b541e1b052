"""What can be told by a script of how a page looks: contrast, names of controls, what sticks out or overlaps."""

import itertools
from pathlib import Path
from typing import Any, TypeAlias

MIN_CONTRAST = 4.5
"""Of text, at any size (WCAG 2.2, 1.4.3, level AA)."""
CONTROLS = {"button", "checkbox", "combobox", "link", "listbox", "radio", "slider", "spinbutton", "textbox"}
SCRIPTS = Path(__file__).parent

Text: TypeAlias = dict[str, Any]
"""The beginning of a text, its contrast (1 to 21), its box, and the number of its SVG (-1: none)."""


def texts(page: Any, selector: str) -> list[Text]:
    found: list[Text] = page.locator(selector).first.evaluate((SCRIPTS / "contrasts.js").read_text())
    return found


def pale(found: list[Text]) -> list[str]:
    return [f"{one['text']}: {one['contrast']:.2f}" for one in found if one["contrast"] < MIN_CONTRAST]


def overlapping(found: list[Text]) -> list[str]:
    pairs = itertools.combinations((one for one in found if one["drawing"] >= 0), 2)
    return [
        f"{one['text']} / {other['text']}"
        for one, other in pairs
        if one["drawing"] == other["drawing"] and _overlap(one["box"], other["box"])
    ]


def _overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(
        min(one[end], other[end]) - max(one[begin], other[begin]) > 2
        for begin, end in (("left", "right"), ("top", "bottom"))
    )


def sticking_out(page: Any, selector: str) -> list[str]:
    """Elements that reach beyond the sides of the first element that fits, or of their drawing."""
    found: list[str] = page.locator(selector).first.evaluate((SCRIPTS / "sticking_out.js").read_text())
    return found


def controls(page: Any, selector: str) -> list[tuple[str, str]]:
    session = page.context.new_cdp_session(page)
    document = session.send("DOM.getDocument")["root"]["nodeId"]
    node = session.send("DOM.querySelector", {"nodeId": document, "selector": selector})["nodeId"]
    found = session.send("Accessibility.queryAXTree", {"nodeId": node})["nodes"]
    session.detach()
    heard = [
        (one["role"]["value"], one.get("name", {}).get("value", "")) for one in found if not one["ignored"]
    ]
    return [(role, name) for role, name in heard if role in CONTROLS]


def check(page: Any, selector: str) -> None:
    """Assert that texts in the first element that fits can be read, and that none lies over or beyond another."""
    found = texts(page, selector)
    assert len(found) >= 5, "there is hardly anything to see"
    assert pale(found) == [] and overlapping(found) == []
    assert sticking_out(page, selector) == []
