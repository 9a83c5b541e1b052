"""Compares this peer's learning rates, and a sketch of its state, with those of the other trainers.

Equal lineages prove that peers received the same means, not that they hold the same parameters. A donor may give false
parameters with a correct lineage, and a trainer may load weights or change a learning rate. So each ticket contains the
learning rates, and every tenth step's ticket also contains a *sketch*: random projections of the state. The lineage is
the seed of the projections. No peer knows a lineage in advance, so none can prepare a false state with a fitting
sketch. Sketches are compared with a tolerance, because processors round differently. The group contains a *witness*:
the ticket with which the tickets of most members agree.
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

_RATE_TOLERANCE = 1e-6  # relative tolerance of learning rates
# Parts of the tolerance. Above the first part, rounding has moved this peer's state away: this peer loads the swarm's
# state if this costs little traffic. Above the second part it loads that state at any cost, before its own counts as
# deviant.
_DRIFT = 1 / 200
_URGENT = 1 / 2


def equal_rates(rates: Rates, others: Rates) -> bool:
    return len(rates) == len(others) and all(
        math.isclose(rate, other, rel_tol=_RATE_TOLERANCE) for rate, other in zip(rates, others, strict=True)
    )


def sketch_of(ticket: Ticket) -> StateSketch | None:
    if not ticket.sketch:
        return None
    return StateSketch(ticket.terms.step, ticket.terms.lineage, ticket.sketch)


class Verdict(Enum):
    """The reason why this peer's state differs from the state of most others."""

    FALSE = "the donors of this peer's state gave another one"
    MOVED = "its own steps moved it"
    AGAIN = "its own steps moved it, for the second time"
    DRIFTS = "rounding moved it, within the tolerance"


class StateCheck:
    """Compares this peer's sketches with those of most other peers; a pure core."""

    def __init__(self, tolerance: float) -> None:
        self.donors: tuple[PeerId, ...] = ()  # donors of the loaded state, until most other peers confirm it
        self._tolerance = tolerance
        self._moved = False  # whether this peer's own steps have moved its state before
        self._false: set[PeerId] = set()  # donors of unconfirmed states, since the last confirmed one

    def judge(
        self, own: StateSketch, theirs: StateSketch, agreeing: Collection[PeerId], *, corrects: bool = True
    ) -> Verdict | None:
        """Compare two sketches of one step; return None if they are equal enough.

        ``agreeing`` are the peers that have the state of ``theirs``. If a donor of this peer is one of them, the loaded
        state was right, so this peer's own steps have moved it. With ``corrects``, a small drift counts, too.
        """
        gap = own.distance(theirs)
        if gap <= self._tolerance:
            self.donors = ()
            self._false.clear()
            drifts = gap > _DRIFT * self._tolerance and (corrects or gap > _URGENT * self._tolerance)
            return Verdict.DRIFTS if drifts else None
        donors = set(self.donors)
        # If the states of other donors differed in the same way, this peer is the cause.
        is_other_cause = not self._false or donors <= self._false
        if donors and is_other_cause and not donors.intersection(agreeing):
            self._false |= donors
            return Verdict.FALSE
        moved = self._moved
        self._moved = True
        return Verdict.AGAIN if moved else Verdict.MOVED


class Comparison:
    """Decides whether this peer must load the swarm's state, or must stop training.

    Attributes:
        deviant: True from the time when this peer's state is found to differ from most others' until it has loaded the
            swarm's state.
        shown_sketch: the last sketch of a confirmed state.
        moved_bytes: bytes sent and received in rounds since this peer last loaded a state because of drift.
            `LinkRounds` counts them.
    """

    def __init__(self, view: SwarmView, tolerance: float, events: EventLog, *, drift_bytes: float) -> None:
        """Between two state downloads because of small drift, rounds move at least ``drift_bytes``."""
        self.deviant = False
        self.shown_sketch: StateSketch | None = None
        self.moved_bytes = 0
        self._drift_bytes = drift_bytes
        self._view = view
        self._tolerance = tolerance
        self._events = events
        self._check = StateCheck(tolerance)
        self._sketch: StateSketch | None = None  # the sketch of the last step, if it had one
        self._refusal = ""

    @property
    def confirmed(self) -> bool:
        """True if this peer loaded no state, or if most other peers have confirmed the loaded state since."""
        return not self._check.donors

    def check(self) -> None:
        """Raise `MismatchError` if this peer must not train on."""
        require(not self._refusal, self._refusal, MismatchError)

    def on_sketch(self, sketch: StateSketch | None) -> None:
        """Remember the sketch of the state after a step; None if the step has no sketch."""
        self._sketch = sketch
        if sketch is not None and self.confirmed:
            self.shown_sketch = sketch

    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        """Note that these donors gave this peer's state; it must be confirmed before this peer shows sketches."""
        self.deviant = False
        self._sketch = None
        self._check.donors = donors

    def shown(self, rates: Rates, step: int) -> tuple[Rates, tuple[float, ...]]:
        """Return the rates and the sketch for the ticket of a step; the sketch is empty except every `SKETCH_STEPS`."""
        sketch = self._sketch
        if step % SKETCH_STEPS or sketch is None or sketch.step != step or not self.confirmed:
            return rates, ()
        return rates, sketch.values

    def agree(self, one: Ticket, other: Ticket) -> bool:
        """Return True if two tickets of one step show equal rates and, if both have sketches, equal states."""
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
        """Compare this peer with the majority of these tickets, if there is no organizer that names a witness."""
        witness, agreeing = elect(tickets, self.agree, min(tickets, default=self._view.me))
        if witness is not None:
            self.on_witness(witness, [list(tickets)[index] for index in agreeing], rates)

    def on_witness(self, witness: Ticket, agreeing: Sequence[PeerId], rates: Rates) -> None:
        """Compare this peer with the ``witness``, a ticket with which most peers, ``agreeing``, agree."""
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
            # Nobody shows a sketch, because all peers loaded their states: all states count as confirmed.
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
            # The donors may give a false state again, so other donors are asked first. In a bucket, this peer may have
            # written the newest state itself.
            self._view.distrust([*donors, self._view.me], now=now)
        self._view.update(syncing=True)
        self.deviant = True
