"""What a model replies to a question, before and now: plain records, to be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Picture: TypeAlias = tuple[tuple[float, ...], ...]
"""Rows of pixels, 0 (empty) to 1 (ink)."""


@dataclass(frozen=True)
class Canvas:
    """What a picture is drawn on: its sides, and the value of a pixel with ink."""

    height: int
    width: int
    ink: float


@dataclass(frozen=True)
class Answer:
    """One of the likeliest answers, and its probability."""

    label: str
    probability: float


@dataclass(frozen=True)
class Reply:
    """The likeliest answers to one question, the likeliest first.

    Attributes:
        question: as text.
        picture: what was asked about; empty if it is a text.
        before: by the model as this peer found it; empty if that is not known.
        now: by the model as it is.
    """

    question: str
    picture: Picture
    before: tuple[Answer, ...]
    now: tuple[Answer, ...]
