"""What a training loop shows: in a script, lines for events and steps; in a notebook, one line above the panel."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colab_swarm.errors import SwarmError, require
from colab_swarm.events import Event, Notice, PeerJoined, PeerLeft, Waited
from colab_swarm.markup import count, plain
from colab_swarm.net.peers import PeerId
from colab_swarm.snapshot import describe

if TYPE_CHECKING:
    from colab_swarm.notebook.panel import Panel
    from colab_swarm.snapshot import SwarmSnapshot
    from colab_swarm.swarm.overview import Overview
    from colab_swarm.training.optimizer import SwarmOptimizer

LOOK_EVERY_S = 0.25
_LONG_WAIT_S = 1.0  # shorter waits happen in every round
_VERY_LONG_WAIT_S = 10.0  # a wait that lasts longer gets a line while it lasts
_LINE_EVERY_S = 1.0


class Attendance:
    """Remembers which peers train with this one, and reports what has changed since the last call. Pure."""

    def __init__(self) -> None:
        self._there: Mapping[PeerId, str] = {}
        self._seen = set[PeerId]()
        self.reasons: dict[str, str] = {}  # why a link ended, by hex id

    def look(self, there: Mapping[PeerId, str]) -> list[str]:
        """Return a line for each peer that joined, left or came back; ``there`` names the peers that train."""
        lines = []
        for peer in sorted(there.keys() - self._there.keys()):
            self.reasons.pop(peer.hex(), None)
            lines.append(f"{there[peer]} {'is back' if peer in self._seen else 'joined'}")
        for peer in sorted(self._there.keys() - there.keys()):
            reason = self.reasons.pop(peer.hex(), "")
            how = f"is away: {reason}".removesuffix(": ")
            lines.append(f"{self._there[peer]} {'left' if reason == 'the peer left' else how}")
        self._there = dict(there)
        self._seen |= there.keys()
        return lines


@dataclass(eq=False)
class ScriptLines:
    """Prints the lines on the user's thread, after each batch and while that thread waits for a round."""

    optimizer: "SwarmOptimizer"
    overview: (
        "Overview | None"  # has the log; None in a simulation, where each line begins with the peer's name
    )
    now: Callable[[], float]  # the clock for ``every_s``
    name: str  # this peer's name
    every_s: float  # least seconds between two lines for steps
    creator: PeerId | None = None
    invite: Callable[[], object] = str  # makes an invitation, which is shown when the creator is away

    def __post_init__(self) -> None:
        text = f"log_every_s={self.every_s!r}: pass seconds, such as 10"
        require(isinstance(self.every_s, int | float) and self.every_s >= 0, text)
        self._prefix = f"{self.name}: " if self.overview is None else ""
        self._attendance = Attendance()
        self._printed_step = self.optimizer.global_step
        self._printed_at = float("-inf")
        self._looked_at = float("-inf")
        self._told: Waited | None = None  # the last long wait for which a line was printed
        self._with_creator = False
        self._creator_left = False

    def tick(self) -> None:
        """Print the lines of events, at most four times a second."""
        now = time.monotonic()
        if self.overview is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        names = self.overview.names()
        unsaid = self.overview.unsaid
        while unsaid:
            event = unsaid.popleft()
            if isinstance(event, PeerLeft):
                self._attendance.reasons[event.peer] = event.reason
            elif _is_news(event):
                _say(describe(event, names))
        view = self.optimizer.rounds.view
        there = {peer: record.name for peer, record in view.there.items() if peer != view.me}
        for line in self._attendance.look(there):
            _say(line)
        self._creator_left |= self._with_creator and self.creator not in there
        self._with_creator = self.creator in there
        wait = self.overview.silent
        if wait is None or wait is self._told:
            return
        if self.now() - wait.at + wait.seconds > _VERY_LONG_WAIT_S:
            self._told = wait
            _say(f"waiting for {names.get(wait.peer[:8], wait.peer[:8])} still: {wait.what}")

    def on_begin(self, max_steps: int) -> None:
        """Print a line if the swarm has done all steps already."""
        step = self.optimizer.global_step
        if step >= max_steps:
            print(self._prefix + done_line(step, max_steps), flush=True)

    def on_batch(self, max_steps: int) -> None:
        """Print what happened, and the step's line if one is due."""
        self.tick()
        if self._creator_left:
            self._creator_left = False
            self._say_invitation()
        step = self.optimizer.global_step
        now = self.now()
        is_due = step > self._printed_step and now - self._printed_at >= self.every_s
        is_last = step >= max_steps > self._printed_step
        if is_due or is_last:
            self._printed_step = step
            self._printed_at = now
            print(self._prefix + _step_line(self.optimizer, step, max_steps), flush=True)

    def _say_invitation(self) -> None:
        # if no peer can be reached, there is no invitation
        with suppress(SwarmError, PermissionError):
            _say(f"who created the run is away; new friends can join by {self.invite()}", 2000)

    def on_end(self, max_steps: int) -> None:
        pass


@dataclass(eq=False)
class CellView:
    """One line and the panel under a training cell.

    The line is text that the notebook saves, so it is still there after the page was reloaded. The panel is a widget:
    after a reload it is gone until the cell ends, because the kernel cannot answer the page before that.
    """

    optimizer: "SwarmOptimizer"
    panel: "Panel[SwarmSnapshot]"
    run: str
    _handle: Any = None
    _shown_at: float = float("-inf")

    def on_begin(self, max_steps: int) -> None:
        from IPython.display import display

        line = {"text/plain": self._line(max_steps)}
        self._handle = display(line, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        self.panel.show_here()

    def on_batch(self, max_steps: int) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _LINE_EVERY_S:
            self._shown_at = now
            self._handle.update({"text/plain": self._line(max_steps)}, raw=True)

    def on_end(self, max_steps: int) -> None:
        step = self.optimizer.global_step
        end = "stopped: run the cell again to go on"
        if step >= max_steps:
            end = done_line(step, max_steps)
        line = f"{_step_line(self.optimizer, step, max_steps)}; {end}"
        self._handle.update({"text/plain": line}, raw=True)
        self.panel.refresh()

    def _line(self, max_steps: int) -> str:
        line = _step_line(self.optimizer, self.optimizer.global_step, max_steps)
        return f"{line}, at {time.strftime('%H:%M:%S')}\nIn a terminal: colab-swarm status {self.run} --watch"


def done_line(step: int, max_steps: int) -> str:
    """Return the line of a loop that ends before its first batch."""
    return f"step {step} of {max_steps} is done: raise max_steps to train on"


def _say(line: str, limit: int = 400) -> None:
    """Print a line. It contains names and words of peers, which must not control the terminal."""
    print(plain(line, limit), flush=True)


def _is_news(event: Event) -> bool:
    """Return True if the event gets a line; warnings were shown already, and `Attendance` reports peers."""
    if isinstance(event, Waited):
        return event.seconds >= _LONG_WAIT_S
    was_shown = isinstance(event, Notice) and event.logged
    return not (was_shown or isinstance(event, PeerJoined))


def _step_line(optimizer: "SwarmOptimizer", step: int, max_steps: int) -> str:
    metrics = optimizer.metrics()
    peers = count(int(metrics["swarm_peers"]), "peer")
    speed = ""
    # The speed is known after two rounds.
    if metrics["swarm_samples_per_s"]:
        speed = f"{metrics['swarm_samples_per_s']:,.1f} samples/s from "
    loss = "" if optimizer.loss is None else f"loss {optimizer.loss:.4f}, "
    return f"step {step} of {max_steps}: {loss}{speed}{peers}"
