"""What a swarm shows to the person at the notebook: panels, snapshots, reprs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from colab_swarm.member import Who
from colab_swarm.net.peers import short
from colab_swarm.overview import Overview
from colab_swarm.receipt import Deeds, Receipt
from colab_swarm.runtime import Runs
from colab_swarm.session import SessionPeer
from colab_swarm.snapshot import SwarmSnapshot
from colab_swarm.training.settings import Services
from colab_swarm.trust.leaderboard import Leaderboard

if TYPE_CHECKING:
    from torch import nn

    from colab_swarm.flight import Recorder
    from colab_swarm.recipes.asking import Askable
    from colab_swarm.widgets.panel import Panel
    from colab_swarm.widgets.try_model import TryModel


class NotebookFace(SessionPeer, ABC):
    """One peer of a run, as its user sees it."""

    def __init__(self, runtime: Runs, services: Services, **who: Unpack[Who]) -> None:
        super().__init__(runtime, services, **who)
        self._overview = Overview(
            runtime, services, who["presence"], lambda: self._optimizer, run=self.run, name=self.name
        )
        self._deeds = Deeds(services)
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
        self._recorder = Recorder(self.events, path, header, names=self._overview.names)
        return self._recorder

    def contributions(self) -> Leaderboard:
        """The leaderboard: who gave how much, as the others saw it; most samples first."""
        names = {**self._overview.names(), short(self.id): self.name}
        return Leaderboard(super().contributions(), names, self.id)

    def receipt(self) -> Receipt:
        """What this peer gave, as the others have signed it: a card to show, which proves itself offline.

        Peers publish what they saw every 30 s.

        Raises:
            PermissionError: in a simulation, which keeps no ledger.
        """
        presence = self._require_real()
        vouchers = self._runtime.call(presence.trust.contributions.vouchers())
        admission = presence.entrance.admission
        authority = b"" if admission is None else admission.authority
        return self._deeds.receipt(self.run_id, self.name, vouchers, authority=authority)

    def can_ask(self, model: nn.Module, askable: Askable) -> None:
        """From now on `try_model` asks this model, in this way; recipes call it."""
        self._asking.can_ask(model, askable)

    def try_model(
        self,
        question: Any = None,
        *,
        model: nn.Module | None = None,
        tokenizer: Any = None,
        labels: Sequence[str] | None = None,
        shape: tuple[int, ...] | None = None,
        ink: float | None = None,
    ) -> TryModel:
        """Ask the model, as it is now and as this peer found it: examples and a form, or one question.

        Call it between two steps.

        Args:
            question: a text with [MASK], or the values of what is to be classified.
            model: None for the one of ``cs.albert(…, swarm=swarm)``.
            tokenizer: of a masked language model.
            labels: of a classifier, such as ``"0123456789"``.
            shape: of one thing to classify, such as (8, 8).
            ink: value of a drawn pixel; for the digits of scikit-learn, divided by 16: 1.

        Raises:
            ValueError: there is no such model, or it cannot be asked so.
        """
        from colab_swarm.recipes.asking import Classes, MaskedText

        askable: Askable | None = None if labels is None else Classes(labels, shape, ink)
        if tokenizer is not None:
            askable = MaskedText(tokenizer)
        return self._asking.try_model(question, model, askable)

    def _end_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def snapshot(self) -> SwarmSnapshot:
        """What a panel shows, as one frozen record; safe from any thread."""
        reached = str(self.reachability)
        return self._overview.snapshot(reached=reached, left=self.left, session=self.session)

    def __repr__(self) -> str:
        linked = len(self._services.peers.linked())
        state = "left" if self.left else f"{linked} {'peer' if linked == 1 else 'peers'} linked"
        return f"Swarm({self.run}, {self.name}, {state})"

    def _repr_html_(self) -> str:
        from colab_swarm.widgets.render import render_html

        return render_html(self.snapshot())
