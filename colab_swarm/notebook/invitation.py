"""Shows an invitation: the link to copy, a QR code, and badges that open a notebook with which to join."""

import html
import time
from importlib.util import find_spec
from typing import Any, Self

from colab_swarm.invite import Invite
from colab_swarm.net.lan import LanSwarm
from colab_swarm.notebook.theme import Document
from colab_swarm.project import notebook_links

MAX_QR_CHARACTERS = 1500  # cameras cannot read the code of a longer text from a screen
_BOX = "border:1px solid var(--line);border-radius:4px"
BADGE = (
    f"display:inline-block;{_BOX};padding:2px 10px;margin:0 8px 0 0;text-decoration:none;color:var(--blue)"
)
# The only script of this package. If a page removes it, as in an untrusted notebook, one click selects the text.
COPY = (
    "getSelection().selectAllChildren(this.previousElementSibling);"
    "this.textContent=document.execCommand('copy')?'Copied':'Press Ctrl+C'"
)
_MODULE_PX = 3  # size of a QR code's squares; phones cannot read smaller ones from a screen
NONE = (
    "found no swarm in this network: create one with cs.create(…), or pass an invitation to cs.join('swarm://…'); "
    "some networks block multicast"
)


class Invitation(str):
    """The secret that lets others join; a notebook shows it with a QR code and badges."""

    run: str = ""  # name of the run
    role: str = ""  # of the peers that join with it, such as ``worker``
    expires_at: float = 0.0  # seconds since the epoch
    uses: int | None = None  # how many peers may join; None for any number
    notebook: str = "swarm"  # the notebook that the badges open
    warning: str = ""  # one sentence if not everybody can use the invitation; otherwise empty

    def __new__(cls, text: str, **facts: Any) -> Self:
        invitation = super().__new__(cls, text)
        vars(invitation).update(facts)
        return invitation

    @classmethod
    def of(cls, invite: Invite) -> Self:
        facts = {"run": invite.name, "role": invite.role.name.lower(), "expires_at": invite.expires_at}
        return cls(str(invite), uses=invite.uses or None, warning=invite.warning, **facts)

    def described(self) -> str:
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.expires_at))
        uses = f"{self.uses} times"
        if self.uses is None:
            uses = "any number of times"
        elif self.uses == 1:
            uses = "once"
        return f"join {self.run} as {self.role}, {uses}, until {until}"

    @property
    def facts(self) -> dict[str, str]:
        """What a program prints: ``invite`` and, if there is one, ``warning``."""
        facts = {"invite": str(self)}
        if self.warning:
            facts["warning"] = self.warning
        return facts

    def _qr_html(self) -> str:
        if find_spec("segno") is None or len(self) > MAX_QR_CHARACTERS:
            words = f"QR codes need pip install segno and at most {MAX_QR_CHARACTERS:,} characters"
            return f'<p class="soft">{words}; this one has {len(self):,}.</p>'
        import segno

        code = segno.make(str(self), error="l", micro=False, boost_error=False)
        # dark on white on any page, because many cameras cannot read white on dark
        drawn = code.svg_inline(scale=_MODULE_PX, border=4, dark="#000", light="#fff", omitsize=False)
        return f'<div role="img" aria-label="QR code of the invitation">{drawn}</div>'

    def _document(self) -> Document:
        badges = ""
        for name, url in notebook_links(self.notebook).items():
            badges += f'<a href="{url}" target="_blank" rel="noopener" style="{BADGE}">Open in {name} ↗</a>'
        paste = f"<p>{badges}and paste the text there.</p>" if badges else ""
        document = Document(self.described(), label="invitation")
        document.warn(self.warning)
        document.draw(
            f'<div class="row">{self._qr_html()}<div style="flex:1 1 300px"><p><code style="{_BOX};display:block;'
            "padding:6px 8px;overflow-wrap:anywhere;white-space:normal;background:var(--card);color:inherit;"
            f'user-select:all" title="one click selects all of it">{html.escape(self)}</code>'
            f'<button style="{BADGE};margin-top:6px;font:inherit;background:var(--card);cursor:pointer" '
            f'onclick="{COPY}">Copy</button></p>{paste}</div></div>'
        )
        return document

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        # the invitation comes last, so that a copy of the whole text can still be used to join
        text = str(self)
        if self.warning:
            text = f"{self.warning}\n{text}"
        return self._document().bundle() | {"text/plain": text}


class LanSwarms(tuple[LanSwarm, ...]):
    """The swarms found in the local network; join an open one with ``cs.join(found[0])``."""

    def _document(self) -> Document:
        document = Document(label="swarms in this network")
        rows = []
        for index, swarm in enumerate(self):
            way = "by invitation: ask its peers for one"
            if swarm.access == "open":
                way = f"open: cs.join(found[{index}])"
            rows.append((f"[{index}] {swarm.run}", ", ".join(swarm.names), way))
        document.table(("swarm", "peers", "how to join"), rows, list, what="swarms in this network")
        if not self:
            document.note(NONE)
        return document

    def __repr__(self) -> str:
        return self._document().text()

    def _repr_html_(self) -> str:
        return self._document().html()
