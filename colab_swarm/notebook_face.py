"""What a swarm shows to the person at the notebook: panels, snapshots, reprs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Unpack

from colab_swarm.collaborator import Collaborator
from colab_swarm.member import Who
from colab_swarm.overview import Overview
from colab_swarm.runtime import Runs
from colab_swarm.snapshot import SwarmSnapshot
from colab_swarm.training.settings import Services

if TYPE_CHECKING:
    from colab_swarm.widgets.panel import Panel


class NotebookFace(Collaborator, ABC):
    """One peer of a run, as its user sees it."""

    def __init__(self, runtime: Runs, services: Services, **who: Unpack[Who]) -> None:
        super().__init__(runtime, services, **who)
        self._overview = Overview(runtime, services, who["presence"], run=self.run, name=self.name)

    @abstractmethod
    def leave(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the run and close all links."""

    def panel(self) -> Panel[SwarmSnapshot]:
        """A live view of the swarm: widgets in a notebook, text elsewhere."""
        from colab_swarm.widgets.panel import Panel

        return Panel(self.snapshot, self.leave)

    def watch(self, seconds: float | None = None) -> None:
        """Show the swarm for ``seconds`` (until interrupted if None); the peer goes on afterwards."""
        self.panel().watch(seconds)

    def snapshot(self) -> SwarmSnapshot:
        """What a panel shows, as one frozen record; safe from any thread."""
        return self._overview.snapshot(self._optimizer, reached=str(self.reachability), left=self.left)

    def __repr__(self) -> str:
        linked = len(self._services.peers.linked())
        state = "left" if self.left else f"{linked} {'peer' if linked == 1 else 'peers'} linked"
        return f"Swarm({self.run}, {self.name}, {state})"

    def _repr_html_(self) -> str:
        from colab_swarm.widgets.render import render_html

        return render_html(self.snapshot())
