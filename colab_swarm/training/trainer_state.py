"""What a trainer is doing, and the table of what may happen to it next. Pure.

A round may run beside a trainer that computes on (``overlap``): then it is averaging, and reports
micro-batches all the same.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from colab_swarm.errors import require


class TrainerState(Enum):
    """What a trainer is doing."""

    JOINING = "joining"  # it reads the others' records for the first time
    CATCHING_UP = "catching up"  # it has no state, or an old one, and gets the swarm's
    COMPUTING = "computing"  # it accumulates gradients for the next round
    WAITING = "waiting"  # it has no data, and waits until a round is due
    AVERAGING = "averaging"  # its contribution is in a round
    APPLYING = "applying"  # the mean is there, and a step is taken with it
    PAUSED = "paused"  # it computes nothing, and no round waits for it
    LEAVING = "leaving"  # it serves the last round to its end
    LEFT = "left"


class TrainerEvent(Enum):
    """What happens to a trainer: a call of its optimizer, or news from a round."""

    JOINED = "joined"
    FELL_BEHIND = "fell behind"
    CAUGHT_UP = "caught up"
    REPORTED = "reported a micro-batch"
    RAN_OUT = "ran out of data"
    WENT_ON = "went on"
    CONTRIBUTED = "contributed"
    MEAN_ARRIVED = "a mean arrived"
    NO_MEAN = "no mean arrived"
    APPLIED = "applied the mean"
    PAUSED = "was paused"
    RESUMED = "was resumed"
    LEAVES = "leaves"
    LEFT = "left"


def _transitions() -> Mapping[tuple[TrainerState, TrainerEvent], TrainerState]:
    state = TrainerState
    event = TrainerEvent
    table = {
        (state.JOINING, event.JOINED): state.COMPUTING,
        (state.JOINING, event.FELL_BEHIND): state.CATCHING_UP,
        (state.CATCHING_UP, event.FELL_BEHIND): state.CATCHING_UP,  # the next attempt
        (state.CATCHING_UP, event.REPORTED): state.CATCHING_UP,
        (state.CATCHING_UP, event.CAUGHT_UP): state.COMPUTING,
        (state.COMPUTING, event.REPORTED): state.COMPUTING,
        (state.COMPUTING, event.RAN_OUT): state.WAITING,
        (state.COMPUTING, event.CONTRIBUTED): state.AVERAGING,
        (state.COMPUTING, event.FELL_BEHIND): state.CATCHING_UP,
        (state.COMPUTING, event.PAUSED): state.PAUSED,
        (state.WAITING, event.WENT_ON): state.COMPUTING,
        (state.WAITING, event.PAUSED): state.PAUSED,
        (state.AVERAGING, event.REPORTED): state.AVERAGING,  # the round runs beside the trainer
        (state.AVERAGING, event.MEAN_ARRIVED): state.APPLYING,
        (state.AVERAGING, event.NO_MEAN): state.COMPUTING,
        (state.APPLYING, event.REPORTED): state.APPLYING,
        (state.APPLYING, event.APPLIED): state.COMPUTING,
        (state.APPLYING, event.NO_MEAN): state.COMPUTING,  # the step failed here
        # What was decided just before the pause still happens.
        (state.PAUSED, event.REPORTED): state.PAUSED,
        (state.PAUSED, event.CONTRIBUTED): state.AVERAGING,
        (state.PAUSED, event.FELL_BEHIND): state.CATCHING_UP,
        (state.PAUSED, event.RESUMED): state.COMPUTING,
        # A step that had begun is finished.
        (state.LEAVING, event.APPLIED): state.LEAVING,
        (state.LEFT, event.APPLIED): state.LEFT,
        (state.LEFT, event.LEAVES): state.LEFT,
    }
    for any_state in state:
        table[any_state, event.LEFT] = state.LEFT
        table.setdefault((any_state, event.LEAVES), state.LEAVING)
    return table


TRANSITIONS: Final = _transitions()


def next_state(state: TrainerState, event: TrainerEvent) -> TrainerState:
    """Return the state after an event; raises RuntimeError if it cannot happen in this one."""
    text = f"a trainer that is {state.value} cannot take the event: {event.value}"
    require((state, event) in TRANSITIONS, text, RuntimeError)
    return TRANSITIONS[state, event]
