"""Compares what this peer applies, and what came of it, with the other trainers: learning rates and sketches.

Equal lineages prove that peers received the same means, not that they hold the same parameters: a
donor may give others under an honest lineage, and a trainer may load weights, or change a learning
rate. So each ticket has the rates, and that of each tenth step random projections of the state, seeded by
the lineage: nobody knows it in advance, so no state can be prepared that fits. They are
compared with a tolerance, as processors differ by rounding. The group names the ticket that most members agree with.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from colab_swarm.averaging.forming import elect
from colab_swarm.averaging.group import Group, Ticket
from colab_swarm.errors import MismatchError, require
from colab_swarm.events import EventLog, Fault, Notice
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import loop_now
from colab_swarm.training.records import SKETCH_STEPS, Rates, StateSketch
from colab_swarm.training.view import SwarmView

_RATE_TOLERANCE = 1e-6  # of learning rates, relative
_DRIFT = 1 / 200  # of the tolerance: by more, rounding has moved a state away, and it is brought back
_URGENT = (
    1 / 2
)  # of the tolerance: by more, it is brought back whatever that costs, before it passes for another one


def equal_rates(rates: Rates, others: Rates) -> bool:
    return len(rates) == len(others) and all(
        math.isclose(rate, other, rel_tol=_RATE_TOLERANCE) for rate, other in zip(rates, others, strict=True)
    )


def sketch_of(ticket: Ticket) -> StateSketch | None:
    if not ticket.sketch:
        return None
    return StateSketch(ticket.terms.step, ticket.terms.lineage, ticket.sketch)


class Verdict(Enum):
    """What the comparison of this peer's state with that of most others comes to."""

    FALSE = "the donors of this peer's state gave another one"
    MOVED = "its own steps moved it"
    AGAIN = "its own steps moved it, for the second time"
    DRIFTS = "rounding moved it, within the tolerance"


class StateCheck:
    """Compares this peer's sketches with those of most others; a pure core."""

    def __init__(self, tolerance: float) -> None:
        self.donors: tuple[PeerId, ...] = ()  # of a loaded state, until most others confirm it
        self._tolerance = tolerance
        self._moved = False  # whether its own steps have moved its state once
        self._false: set[PeerId] = set()  # who gave states that were not confirmed, since one was

    def judge(
        self, own: StateSketch, theirs: StateSketch, agreeing: Collection[PeerId], *, corrects: bool = True
    ) -> Verdict | None:
        """Compare two sketches of one step; None: they are equal enough.

        ``agreeing``: who has their state. A donor among them gave it, so this peer's own steps moved it.
        ``corrects``: also if it drifts by little.
        """
        gap = own.distance(theirs)
        if gap <= self._tolerance:
            self.donors = ()
            self._false.clear()
            drifts = gap > _DRIFT * self._tolerance and (corrects or gap > _URGENT * self._tolerance)
            return Verdict.DRIFTS if drifts else None
        donors = set(self.donors)
        # Where states of other donors come to the same, this peer is the cause.
        is_other_cause = not self._false or donors <= self._false
        if donors and is_other_cause and not donors.intersection(agreeing):
            self._false |= donors
            return Verdict.FALSE
        moved = self._moved
        self._moved = True
        return Verdict.AGAIN if moved else Verdict.MOVED


class Comparison:
    """Says if this peer must load the swarm's state, or may not train on.

    Attributes:
        deviant: this peer's state is not that of most others, until it has loaded theirs.
        shown_sketch: the last one of a state that was confirmed.
        moved_bytes: sent and received in rounds since this peer was brought together with the others. `LinkRounds`
            adds to them.
    """

    def __init__(self, view: SwarmView, tolerance: float, events: EventLog, *, drift_bytes: float) -> None:
        """Rounds move ``drift_bytes`` between two states that are loaded because rounding moved this peer's."""
        self.deviant = False
        self.shown_sketch: StateSketch | None = None
        self.moved_bytes = 0
        self._drift_bytes = drift_bytes
        self._view = view
        self._tolerance = tolerance
        self._events = events
        self._check = StateCheck(tolerance)
        self._sketch: StateSketch | None = None  # of the last step that had one
        self._refusal = ""

    @property
    def confirmed(self) -> bool:
        """True if this peer's state came from nobody, or was compared with the others' since then."""
        return not self._check.donors

    def check(self) -> None:
        """Raise `MismatchError` if this peer must not train on."""
        require(not self._refusal, self._refusal, MismatchError)

    def on_sketch(self, sketch: StateSketch | None) -> None:
        """Take the sketch of the state after a step, if there is one."""
        self._sketch = sketch
        if sketch is not None and self.confirmed:
            self.shown_sketch = sketch

    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        """Compare this peer's state, which it has from the donors, before it is a witness for others."""
        self.deviant = False
        self._sketch = None
        self._check.donors = donors

    def shown(self, rates: Rates, step: int) -> tuple[Rates, tuple[float, ...]]:
        """Return the rates and, each `SKETCH_STEPS` steps, the sketch for the ticket of a step."""
        sketch = self._sketch
        if step % SKETCH_STEPS or sketch is None or sketch.step != step or not self.confirmed:
            return rates, ()
        return rates, sketch.values

    def agree(self, one: Ticket, other: Ticket) -> bool:
        """Return whether two tickets of one step show equal rates and states."""
        if not equal_rates(one.rates, other.rates):
            return False
        mine = sketch_of(one)
        theirs = sketch_of(other)
        return mine is None or theirs is None or mine.distance(theirs) <= self._tolerance

    def on_group(self, group: Group, rates: Rates) -> None:
        """Compare this peer with the witness of a group, if it has one."""
        if group.witness is not None:
            self.on_witness(group.witness, [group.members[index].id for index in group.agreeing], rates)

    def on_tickets(self, tickets: Mapping[PeerId, Ticket], rates: Rates) -> None:
        """Compare this peer with most of these tickets, where no organizer has done so."""
        witness, agreeing = elect(tickets, self.agree, min(tickets, default=self._view.me))
        if witness is not None:
            self.on_witness(witness, [list(tickets)[index] for index in agreeing], rates)

    def on_witness(self, witness: Ticket, agreeing: Sequence[PeerId], rates: Rates) -> None:
        """Compare this peer with what most others have; ``agreeing`` are these."""
        if not equal_rates(rates, witness.rates):
            theirs = ", ".join(f"{rate:g}" for rate in witness.rates)
            own = ", ".join(f"{rate:g}" for rate in rates)
            self._refusal = (
                f"at step {witness.terms.step} the swarm has the learning rate {theirs}, this peer {own}: give all "
                "peers the same scheduler=… with the same arguments, and change no rate by hand"
            )
            return
        sketch = sketch_of(witness)
        own_sketch = self._sketch
        if own_sketch is None:
            return
        if sketch is None and own_sketch.step == witness.terms.step:
            # Nobody is a witness: all have their states from others, and begin anew.
            self._check.donors = ()
        if sketch is None or not sketch.is_of_step(own_sketch):
            return
        corrects = self.moved_bytes >= self._drift_bytes
        verdict = self._check.judge(own_sketch, sketch, agreeing, corrects=corrects)
        if verdict is not None:
            self._on_deviation(verdict, own_sketch.distance(sketch))

    def _on_deviation(self, verdict: Verdict, gap: float) -> None:
        now = loop_now()
        donors = self._check.donors
        if verdict is Verdict.DRIFTS:
            self.moved_bytes = 0
            text = f"is rounded in another way than the first one's, by {gap:.1e} of its norm: that is loaded"
            self._events.emit(Notice(now, f"this peer's state {text}"))
        elif verdict is Verdict.FALSE:
            names = ", ".join(map(short, donors))
            text = f"is not what most peers hold, since {names} gave it: it is loaded again, from others"
            self._events.emit(Fault(now, "this peer's state", text))
        else:
            cause = "its learning rates, its optimizer or its data type may differ"
            if self._view.own.changed:
                cause = (
                    "its parameters were changed outside optimizer.step(), as model.load_state_dict() after "
                    "swarm.optimizer(…) does"
                )
            text = f"left that of the others, by {gap:.2%} of its norm: {cause}. Theirs is loaded."
            self._events.emit(Fault(now, "this peer's state", text))
            if verdict is Verdict.AGAIN:
                self._refusal = f"this peer's state {text} For the second time, so it trains no more here"
        if verdict is not Verdict.DRIFTS:
            # Whoever gave it may show another one: others are asked first.
            self._view.distrust(donors, now=now)
        self._view.update(syncing=True)
        self.deviant = True
