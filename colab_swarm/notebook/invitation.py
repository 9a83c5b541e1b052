"""An invitation as people meet it: the line to copy, a QR code, badges that open the join notebook."""

from __future__ import annotations

import html
import time
from importlib.util import find_spec
from typing import Any, Self

from colab_swarm.markup import text
from colab_swarm.net.lan import LanSwarm
from colab_swarm.notebook import theme

PROJECT = "OWNER/colab_swarm"

"""On GitHub; whoever publishes a copy puts its own owner here."""

COLAB_URL = f"https://colab.research.google.com/github/{PROJECT}/blob/main/notebooks/NAME.ipynb"

KAGGLE_URL = (
    f"https://kaggle.com/kernels/welcome?src=https://github.com/{PROJECT}/blob/main/notebooks/NAME.ipynb"
)

NOTEBOOKS = {"join": ("join_colab", "join_kaggle"), "volunteer": ("volunteer", "volunteer")}

"""On Colab and on Kaggle, by what the invitation is for."""

MAX_QR_CHARACTERS = 1500

"""A longer line makes a code that no camera reads from a screen."""

QR_WIDTH = 200

BOX = "border:1px solid var(--line);border-radius:4px"

BADGE = f"display:inline-block;{BOX};padding:2px 10px;margin:0 8px 0 0;text-decoration:none;color:var(--blue)"


class Invitation(str):
    """The text of an invitation; in a notebook it shows itself with a QR code and badges.

    It is the secret that lets others in: pass it on as you would a key.

    Args:
        text: the line itself.
        run: the run's name.
        role: what its bearer may be, such as ``worker``.
        expires_at: seconds since the epoch.
        uses: how many peers may join by it; None for any number.
        purpose: of `NOTEBOOKS`: which of them the badges open.
        warning: one sentence if not everybody can use it, which is shown with it; else empty.
    """

    run: str
    role: str
    expires_at: float
    uses: int | None
    purpose: str
    warning: str

    def __new__(
        cls,
        text: str,
        *,
        run: str,
        role: str,
        expires_at: float,
        uses: int | None = None,
        purpose: str = "join",
        warning: str = "",
    ) -> Self:
        invitation = super().__new__(cls, text)
        invitation.run, invitation.role = run, role
        invitation.expires_at, invitation.uses = expires_at, uses
        invitation.purpose, invitation.warning = purpose, warning
        return invitation

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        """An invitation is sent to other processes, by pickle too."""
        return (str(self),), dict(vars(self))

    def described(self) -> str:
        """Run, role, expiry and uses, in one line."""
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.expires_at))
        uses = (
            "any number of times" if self.uses is None else "once" if self.uses == 1 else f"{self.uses} times"
        )
        return f"join {self.run} as {self.role}, {uses}, until {until}"

    @property
    def facts(self) -> dict[str, str]:
        """The line as ``invite`` and, if there is one, the ``warning``: what a program tells its user."""
        return {"invite": str(self), **({"warning": self.warning} if self.warning else {})}

    def _qr_html(self) -> str:
        code = _code(self)
        if isinstance(code, str):
            return f'<p class="soft">{html.escape(code)}</p>'
        modules = code.symbol_size(border=4)[0]
        # dark on white whatever the page: many cameras cannot read the inverse
        drawn = code.svg_inline(scale=QR_WIDTH / modules, border=4, dark="#000", light="#fff", omitsize=False)
        return f'<div role="img" aria-label="QR code of the invitation">{drawn}</div>'

    def _repr_html_(self) -> str:
        colab, kaggle = NOTEBOOKS[self.purpose]
        warning = f'<p class="warn">{html.escape(self.warning)}</p>' if self.warning else ""
        badges = _badge(COLAB_URL, colab, "Open in Colab") + _badge(KAGGLE_URL, kaggle, "Open in Kaggle")
        return theme.wrap(
            f"{theme.heading(html.escape(self.described()))}{warning}{self._qr_html()}"
            f'<p><code style="{BOX};display:block;padding:6px 8px;overflow-wrap:anywhere;white-space:normal;'
            'background:var(--card);color:inherit;user-select:all" title="one click selects all of it">'
            f"{html.escape(self)}</code></p>"
            f"<p>{badges}and paste the line there.</p>",
            "invitation",
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # the line comes last: whoever copies all of the text can still join by it
        told = f"{self.warning}\n{self}" if self.warning else str(self)
        return {"text/plain": told, "text/html": self._repr_html_()}


def _badge(url: str, notebook: str, text: str) -> str:
    url = url.replace("NAME", notebook)
    return f'<a href="{html.escape(url)}" target="_blank" rel="noopener" style="{BADGE}">{text} ↗</a>'


def _code(text: str) -> Any:
    """The QR code, or a sentence that says why there is none."""
    if find_spec("segno") is None:
        return "For a QR code: pip install segno"
    if len(text) > MAX_QR_CHARACTERS:
        return f"This invitation is too long for a QR code ({len(text):,} characters): copy the line."
    import segno

    return segno.make(str(text), error="l", micro=False, boost_error=False)


NONE = (
    "no swarm announces itself in this network: begin one with cs.create(…), or paste an invitation into "
    "cs.join('https://…#…'); some networks keep multicast from passing"
)


class LanSwarms(tuple[LanSwarm, ...]):
    """The swarms that announce themselves in the local network; an open one can be joined: ``cs.join(found[0])``."""

    def rows(self) -> list[tuple[str, str, str]]:
        """For each, its place and name, who is there, and how to join."""
        return [
            (f"[{index}] {swarm.run}", ", ".join(swarm.names), self._how(index, swarm))
            for index, swarm in enumerate(self)
        ]

    @staticmethod
    def _how(index: int, swarm: LanSwarm) -> str:
        return (
            f"open: cs.join(found[{index}])" if swarm.access == "open" else "by invitation: ask them for one"
        )

    def __repr__(self) -> str:
        return "\n".join("  ".join(row) for row in self.rows()) or NONE

    def _repr_html_(self) -> str:
        if not self:
            return theme.wrap(f"<p>{html.escape(NONE)}</p>", "swarms in this network")
        rows = (tuple(map(text, row)) for row in self.rows())
        table = theme.table(("swarm", "who is there", "how to join"), rows, label="swarms in this network")
        return theme.wrap(table, "swarms in this network")
