"""Tells the user when this machine's clock is off. Free of I/O."""

from __future__ import annotations

from colab_swarm.net.membership import SLACK_S, in_words

TELL_S = 30.0
"""A difference that is worth a word."""
FIX = (
    "set it (Linux: `sudo timedatectl set-ntp true`; Windows, macOS: switch on automatic time in the settings; "
    "Colab, Kaggle: restart the runtime)"
)


class ClockWatch:
    """Says a thing once: when the clock is off, when that has become much worse or better, when it is over."""

    def __init__(self) -> None:
        self._told_s = 0.0

    def on_skew(self, behind_s: float) -> str | None:
        """What to tell now that the clock is ``behind_s`` behind the other peers' (ahead if negative), if anything."""
        off_s, told_s = abs(behind_s), abs(self._told_s)
        if told_s and off_s <= TELL_S / 2:
            self._told_s = 0.0
            return "this machine's clock is right again"
        as_told = told_s > 0 and abs(behind_s - self._told_s) <= max(TELL_S, told_s / 2)
        if off_s <= TELL_S or (as_told and (off_s > SLACK_S) == (told_s > SLACK_S)):
            return None
        self._told_s = behind_s
        way = "behind" if behind_s > 0 else "ahead of"
        text = f"this machine's clock is {in_words(off_s)} {way} the other peers'"
        if off_s <= SLACK_S:
            return f"{text}: compensated, nothing needs to be done"
        return f"{text}: beyond 10 minutes they refuse what it signs; {FIX}"
