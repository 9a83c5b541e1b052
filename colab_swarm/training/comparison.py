"""Compares what this peer applies, and what came of it, with the other trainers: learning rates and sketches."""

from collections.abc import Mapping

from colab_swarm.errors import MismatchError, require
from colab_swarm.events import EventLog, Fault, Notice
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import loop_now
from colab_swarm.training.election import equal_rates
from colab_swarm.training.progress import Progress
from colab_swarm.training.records import Rates
from colab_swarm.training.sketch import Deviation, StateCheck, StateSketch


class Comparison:
    """Says if this peer must load the swarm's state, or may not train on.

    Attributes:
        deviant: this peer's state is not that of most others: from `compare_states` until it has loaded theirs.
        moved_bytes: sent and received in rounds since this peer was brought together with the others. `LinkRounds`
            adds to them.
    """

    def __init__(self, progress: Progress, tolerance: float, events: EventLog, *, drift_bytes: float) -> None:
        """Rounds move ``drift_bytes`` between two states that are loaded because rounding moved this peer's."""
        self.deviant = False
        self.moved_bytes = 0
        self._drift_bytes = drift_bytes
        self._progress = progress
        self._events = events
        self._check = StateCheck(tolerance)
        self._refusal = ""  # its state left the swarm's for the second time; stays
        self._other_rates = ""  # its learning rates are others; `compare_rates` sets it each time

    def check(self) -> None:
        """Raise `MismatchError` if this peer must not train on."""
        for text in (self._refusal, self._other_rates):
            require(not text, text, MismatchError)

    def compare_rates(self, rates: Mapping[PeerId, Rates], step: int) -> None:
        """Compare the learning rates of a step, this peer's own included."""
        known = self._progress.known
        self._other_rates = ""
        mine = rates.get(known.me)
        senior = self._progress.election.senior(rates, equal_rates)
        if not mine or senior is None or equal_rates(mine, rates[senior]):
            return
        theirs = ", ".join(f"{rate:g}" for rate in rates[senior])
        own = ", ".join(f"{rate:g}" for rate in mine)
        self._other_rates = (
            f"at step {step} the swarm has the learning rate {theirs}, this peer {own}: give all peers the same "
            "scheduler=… with the same arguments, and change no rate by hand"
        )

    def compare_states(self) -> None:
        """Compare this peer's last sketch with the others'; it needs the swarm's state if most hold another."""
        election = self._progress.election
        known = self._progress.known
        own = self._check.own
        if own is None:
            return
        sketches, votes = election.sketches(own)
        senior = election.senior({known.me: own, **sketches}, self._check.agree)
        corrects = self.moved_bytes >= self._drift_bytes
        deviation = self._check.judge(sketches, votes, senior, now=loop_now(), corrects=corrects)
        if deviation is not None:
            self._deviate(deviation)
        self._publish()

    def _deviate(self, deviation: Deviation) -> None:
        text = self._text_of(deviation)
        if deviation.again:
            self._refusal = f"this peer's state {text} For the second time, so it trains no more here"
        if deviation.drifts:
            self.moved_bytes = 0
            self._events.emit(Notice(loop_now(), f"this peer's state {text}"))
        else:
            self._events.emit(Fault(loop_now(), "this peer's state", text))
        self._progress.election.distrust(deviation.donors, now=loop_now())
        self._progress.known.update(syncing=True)
        self.deviant = True

    def _text_of(self, deviation: Deviation) -> str:
        if deviation.donors:
            donors = ", ".join(map(short, deviation.donors))
            return f"is not what most peers hold, since {donors} gave it: it is loaded again, from others"
        if deviation.drifts:
            return f"is rounded in another way than the first one's, by {deviation.gap:.1e} of its norm: that is loaded"
        cause = "its learning rates, its optimizer or its data type may differ"
        if self._progress.known.own.changed:
            cause = (
                "its parameters were changed outside optimizer.step(), as model.load_state_dict() after "
                "swarm.optimizer(…) does"
            )
        return f"left that of the others, by {deviation.gap:.2%} of its norm: {cause}. Theirs is loaded."

    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        """Compare this peer's state, which it has from the donors, before it is a witness for others."""
        self.deviant = False
        self._check.on_loaded(donors)

    def on_sketch(self, sketch: StateSketch | None) -> None:
        """Publish a sketch of the state after a step, if there is one."""
        if sketch is not None:
            self._check.on_sketch(sketch)
            self._publish()

    def _publish(self) -> None:
        known = self._progress.known
        sketch = self._check.published
        if sketch != known.own.sketch:
            known.update(sketch=sketch)
            known.urgent.set()
