"""What a swarm shows to the person at the notebook: panels, snapshots, reprs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from colab_swarm.member import Who
from colab_swarm.net.peers import short
from colab_swarm.overview import Overview
from colab_swarm.runtime import Runs
from colab_swarm.session import SessionPeer
from colab_swarm.snapshot import SwarmSnapshot
from colab_swarm.training.settings import Services
from colab_swarm.trust.leaderboard import Leaderboard

if TYPE_CHECKING:
    from colab_swarm.flight import Recorder
    from colab_swarm.widgets.panel import Panel


class NotebookFace(SessionPeer, ABC):
    """One peer of a run, as its user sees it."""

    def __init__(self, runtime: Runs, services: Services, **who: Unpack[Who]) -> None:
        super().__init__(runtime, services, **who)
        self._overview = Overview(runtime, services, who["presence"], run=self.run, name=self.name)
        self._recorder: Recorder | None = None
        self._panel: Panel[SwarmSnapshot] | None = None

    @abstractmethod
    def leave(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the run and close all links."""

    def panel(self) -> Panel[SwarmSnapshot]:
        """A live view of the swarm: widgets in a notebook, text elsewhere. It is always the same one.

        While the cell waits for other peers, as in ``optimizer.step()``, widgets stay live by themselves.
        """
        from colab_swarm.widgets.environment import has_frontend
        from colab_swarm.widgets.panel import Panel

        live = has_frontend()
        if self._panel is None:
            self._panel = Panel(self.snapshot, self.leave, pause=self._pause, live=live)
        if live:
            self._runtime.while_waiting(self._panel.tick)
        return self._panel

    def _pause(self, wanted: bool) -> None:
        """The panel's button: stand still, or go on."""
        if wanted:
            self.pause()
        else:
            self.unpause()

    def watch(self, seconds: float | None = None) -> None:
        """Show the swarm for ``seconds`` (until interrupted if None); the peer goes on afterwards."""
        self.panel().watch(seconds)

    def record(self, path: str | Path) -> Recorder:
        """Record what happens from now on into a file, a line of JSON for each event; `cs.replay` draws it, offline.

        It ends with ``close()`` of what is returned, and when this peer leaves. Recording again ends the former one.

        Args:
            path: the file; an older recording there is gone on with.

        Raises:
            ValueError: the file there is something else.
            OSError: it cannot be written.
        """
        from colab_swarm.flight import Header, Recorder

        self._end_recording()
        header = Header.now(run=self.run, name=self.name, peer=self.id.hex(), at=self._runtime.time())
        self._recorder = Recorder(
            self.events, path, header, names=lambda: self._overview.names(self._optimizer)
        )
        return self._recorder

    def contributions(self) -> Leaderboard:
        """The leaderboard: who gave how much, as the others saw it; most samples first."""
        names = {**self._overview.names(self._optimizer), short(self.id): self.name}
        return Leaderboard(super().contributions(), names, self.id)

    def _end_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def snapshot(self) -> SwarmSnapshot:
        """What a panel shows, as one frozen record; safe from any thread."""
        reached = str(self.reachability)
        return self._overview.snapshot(self._optimizer, reached=reached, left=self.left, session=self.session)

    def __repr__(self) -> str:
        linked = len(self._services.peers.linked())
        state = "left" if self.left else f"{linked} {'peer' if linked == 1 else 'peers'} linked"
        return f"Swarm({self.run}, {self.name}, {state})"

    def _repr_html_(self) -> str:
        from colab_swarm.widgets.render import render_html

        return render_html(self.snapshot())
