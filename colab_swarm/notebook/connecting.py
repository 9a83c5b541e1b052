"""The form of ``cs.connect()``: it makes a notebook a peer, and then becomes the invitation and the panel.

Its button works on the user's thread, which alone repaints on Colab; cells that are started meanwhile wait for it.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from colab_swarm.errors import JoinError, SwarmError, require
from colab_swarm.markup import text
from colab_swarm.notebook.panel import make_button, update_button
from colab_swarm.notebook.platforms import Platform
from colab_swarm.notebook.theme import Document

_CONSENT = (
    "I may use this machine for a swarm. If no peer reaches it otherwise, it may use iroh's free relays or a tunnel, "
    "which see addresses, sizes and times but no contents."
)
Say: TypeAlias = Callable[[str], None]
Connect: TypeAlias = Callable[[str, str, bool, Say], Any]
"""Takes the invitation (empty: start a run), the name, the consent; says each stage; returns the peer."""


class Connection:
    """A form that makes this notebook a peer; then it has all attributes of its `Swarm`."""

    def __init__(self, connect: Connect, here: Platform, *, saved: bool) -> None:
        import ipywidgets

        self._connect = connect
        self._must_agree = here.must_agree
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
        consent = ipywidgets.HTML(_lines(f"{here.terms} {_CONSENT}"))
        agreed = ipywidgets.HBox([self._agreed, consent])
        self._button = make_button("Start / Join", "plug", "make this notebook a peer", self._on_click)
        self._button.layout.align_self = "flex-start"
        self._stages: list[str] = []
        self._log = ipywidgets.HTML()
        self._box = ipywidgets.VBox([self._invitation, self._name, agreed, self._button, self._log])

    @property
    def swarm(self) -> Any:
        """The peer's `Swarm`; raises `JoinError` before there is one."""
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
        # IPython asks for many names that are not the swarm's
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
            text = "read the terms, and tick the box if they allow this"
            require(self._agreed.value or not self._must_agree, text)
            name = self._name.value.strip()
            self._swarm = self._connect(self._invitation.value, name, self._agreed.value, self._say)
        except (SwarmError, ValueError, OSError) as error:
            self._say(f"✖ {error}")
            update_button(self._button, disabled=False, description="Try again")
            return
        # an invitation is a key to the run, which a saved notebook must not hold
        self._invitation.value = ""
        self._box.children = (self._log, *self._views())

    def _views(self) -> list[Any]:
        """Return the invitation of a peer that started a run, and its panel."""
        import ipywidgets

        views = []
        if self.swarm.is_owner:
            views.append(ipywidgets.HTML(self.swarm.invite()._repr_mimebundle_()["text/html"]))
        # there is no widget without a front-end
        panel = self.swarm.panel().widget()
        if panel is not None:
            views.append(panel)
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
