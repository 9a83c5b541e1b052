"""The form of ``cs.connect()``: it makes a notebook a peer, and then becomes the invitation and the panel.

The button does its work on the user's thread, because only this thread can repaint on Colab. Cells that the user
starts in the meantime wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from colab_swarm.credentials import Secret
from colab_swarm.errors import JoinError, SwarmError, TokenNotSent, require
from colab_swarm.markup import text
from colab_swarm.notebook.panel import make_button, update_button
from colab_swarm.notebook.platforms import Consent, Platform
from colab_swarm.notebook.theme import Document

_CONSENT = "I may use this machine for a swarm."
_TUNNELS = (
    "If no peer reaches it otherwise, it may use iroh's free relays or a tunnel by cloudflared or ngrok, which see "
    "addresses, sizes and times but no contents. Without the tick none of these opens."
)
_SEND_TOKEN = "Send my Hugging Face token (HF_TOKEN) to this organizer."
Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Entries:
    """The user's entries. An empty invitation starts a run; the token of ngrok may be empty."""

    invitation: str = field(repr=False)
    name: str
    consent: Consent
    ngrok_token: str = field(default="", repr=False)
    send_hf_token: bool = False


Connect: TypeAlias = Callable[[Entries, Say], Any]
"""Creates or joins a run according to the entries, reports each stage, and returns the peer."""


class Connection:
    """A form that makes this notebook a peer; then it has all attributes of its `Swarm`."""

    def __init__(self, connect: Connect, here: Platform, *, saved: bool) -> None:
        import ipywidgets

        self._connect = connect
        self._here = here
        self._swarm: Any = None
        hint = "paste one to join; empty, or a bucket's address: start a run"
        if saved:
            hint = "empty: use the saved one"
        style = {"description_width": "6em"}
        layout = {"width": "95%"}
        self._invitation = ipywidgets.Text(
            description="Invitation", placeholder=hint, style=style, layout=layout
        )
        self._name = ipywidgets.Text(
            description="Your name", placeholder="what the others see", style=style, layout=layout
        )
        self._agreed = ipywidgets.Checkbox(indent=False, layout={"width": "auto"})
        self._tunnels = ipywidgets.Checkbox(indent=False, layout={"width": "auto"})
        self._token = ipywidgets.Password(
            description="ngrok token",
            placeholder="only for ngrok; it is not stored",
            style=style,
            layout=layout,
        )
        tunnels = f"{here.tunnels_if}. {_TUNNELS}" if here.tunnels_if else _TUNNELS
        consents = [
            ipywidgets.HBox([self._agreed, ipywidgets.HTML(_lines(f"{here.terms} {_CONSENT}"))]),
            ipywidgets.HBox([self._tunnels, ipywidgets.HTML(_lines(tunnels))]),
        ]
        if here.tunnels_if:
            consents.append(self._token)
        # shown for one invitation only, and its tick applies only to that
        self._send_token = ipywidgets.Checkbox(indent=False, layout={"width": "auto"})
        self._token_consent = ipywidgets.HBox([self._send_token, ipywidgets.HTML(_lines(_SEND_TOKEN))])
        self._invitation.observe(lambda _: self._withdraw_token(), names="value")
        self._button = make_button("Start / Join", "plug", "make this notebook a peer", self._on_click)
        self._button.layout.align_self = "flex-start"
        self._stages: list[str] = []
        self._log = ipywidgets.HTML()
        self._box = ipywidgets.VBox([self._invitation, self._name, *consents, self._button, self._log])

    @property
    def swarm(self) -> Any:
        """The peer's `Swarm`. Raises `JoinError` as long as there is no peer."""
        if self._swarm is None:
            raise JoinError(
                "this notebook is no peer yet: press Start / Join under the cell of cs.connect() first"
            )
        return self._swarm

    @property
    def is_open(self) -> bool:
        """True unless the peer has left its run."""
        return self._swarm is None or not self._swarm.left

    def __getattr__(self, name: str) -> Any:
        # IPython asks for many names that a swarm does not have
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.swarm, name)

    def __repr__(self) -> str:
        return "Connection(no peer yet)" if self._swarm is None else repr(self._swarm)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        document = Document("", label="connect")
        document.draw("", *(self._stages or [repr(self)]))
        return document.bundle(self._box)

    def _on_click(self) -> None:
        update_button(self._button, disabled=True)
        self._stages.clear()
        try:
            self._swarm = self._connect(self._read(), self._say)
        except (SwarmError, ValueError, OSError) as error:
            self._say(f"✖ {error}")
            if isinstance(error, TokenNotSent) and self._token_consent not in self._box.children:
                self._box.children = (*self._box.children, self._token_consent)
            update_button(self._button, disabled=False, description="Try again")
            return
        # an invitation is a key to the run, so a saved notebook must not contain it
        self._invitation.value = ""
        self._box.children = (self._log, *self._views())

    def _read(self) -> Entries:
        """Return the entries, and empty the token's field, because a saved notebook must not contain the token."""
        text = "tick the first box: “I may use this machine for a swarm”"
        if self._here.must_agree:
            text = "read the terms, and tick the first box if they allow this"
        require(self._agreed.value, text)
        token = Secret(self._token.value.strip())
        text = f"ngrok opens only if you tick the second box: “{self._here.tunnels_if}”"
        require(self._tunnels.value or not token, text)
        # on the user's own machine, plain consent would also open relays and tunnels
        consent: Consent = "tunnels" if self._tunnels.value else self._here.must_agree
        self._token.value = ""
        return Entries(
            self._invitation.value, self._name.value.strip(), consent, token, self._send_token.value
        )

    def _withdraw_token(self) -> None:
        """Take back the consent to send a token, because it was given for the invitation that was entered before."""
        self._send_token.value = False
        self._box.children = tuple(child for child in self._box.children if child is not self._token_consent)

    def _views(self) -> list[Any]:
        """Return the panel, and before it the invitation if this peer started the run."""
        import ipywidgets

        views = []
        if self.swarm.is_owner:
            views.append(ipywidgets.HTML(self.swarm.invite()._repr_mimebundle_()["text/html"]))
        # without a front-end there is no widget
        panel = self.swarm.panel()
        widget = panel.widget()
        if widget is not None:
            panel.form = self._box
            views.append(widget)
        return views

    def _say(self, stage: str) -> None:
        # the result of a stage replaces its announcement
        if self._stages and self._stages[-1].startswith("…"):
            del self._stages[-1]
        self._stages.append(stage)
        self._log.value = _lines(*self._stages)


def _lines(*lines: str) -> str:
    html = ""
    for line in lines:
        html += f'<p style="margin:2px 0;line-height:1.4">{text(line, 1000)}</p>'
    return html
