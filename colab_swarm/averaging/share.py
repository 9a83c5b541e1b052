"""A peer's share of a step: the samples that it was granted and has counted, and its report to the organizer."""

import math
import statistics
from collections import deque

from colab_swarm.averaging.group import StepReport, Ticket

_REMEMBERED_TIMES = 5
_IDLE_STEPS = 4  # steps without a grant until this peer is measured again; their number doubles each time
_MOST_IDLE_STEPS = 256


class Share:
    """This peer's part of a step. The trainer's thread counts samples here, and the event loop reports them.

    Attributes:
        step, lineage: step and lineage of the state that this peer holds; the step is -1 if it has no state.
        granted, counted: samples of the present step. While ``granted`` is 0, this peer reports its first micro-batch.
        away: True if this peer computes nothing for now.
        final: True if the ticket does not change any more, because this peer already computes for the next step.
        averages: True until the round of the last contribution, and the step with its mean, are over.
        ticket: set when this peer has computed the granted samples, and waits for the group.
        assistant: the ticket of an assistant, which trains nothing; None at a trainer.
    """

    def __init__(self) -> None:
        self.step = -1
        self.lineage = b""
        self.granted = 0.0
        self.counted = 0.0
        self.away = False
        self.final = False
        self.averages = False
        self.ticket: Ticket | None = None
        self.assistant: Ticket | None = None
        self._samples = 0.0
        self._times_s: deque[float] = deque(maxlen=_REMEMBERED_TIMES)
        self._begun_at = math.inf  # when the present micro-batch began; not known for the first micro-batch
        self._idle_steps = 0  # number of steps in a row in which this peer got no grant
        self._longest_idle = _IDLE_STEPS
        self._aside: float | None = None  # the counted samples of a final ticket, while the trainer counts on

    @property
    def samples(self) -> float:
        """Number of samples in a micro-batch; 0 if not known."""
        return self._samples

    @property
    def batch_s(self) -> float:
        """Time of a micro-batch, the median of the last ones; 0 if not known."""
        return statistics.median(self._times_s) if self._times_s else 0.0

    def work(self, now: float) -> None:
        """Note that the trainer computes from now on."""
        self._begun_at = now

    def count(self, samples: float, now: float) -> None:
        """Count a micro-batch that the trainer computed since `work`, or since the last micro-batch."""
        if self._begun_at <= now:
            self._times_s.append(max(now - self._begun_at, 1e-6))
        self._samples = samples
        self.counted += samples
        self._begun_at = now

    @property
    def computes(self) -> bool:
        return self._begun_at < math.inf

    @property
    def used_up(self) -> bool:
        return self.counted >= self.granted

    @property
    def nearly(self) -> bool:
        """True if the next micro-batch uses the grant up."""
        return self.counted + self._samples >= self.granted

    def begin(self, granted: float) -> None:
        """Begin the next step, because a group has formed; ``granted`` is the number of samples granted for it."""
        self._note_idle(granted)
        self.granted = granted
        if self._aside is None:
            self.counted = 0.0
            self._begun_at = math.inf
        self._aside = None
        self.final = False
        self.ticket = None

    def _note_idle(self, granted: float) -> None:
        """After some steps without a grant, forget this peer's times: it may have been busy when they were measured."""
        if granted:
            self._idle_steps = 0
            if self._times_s:
                self._longest_idle = _IDLE_STEPS
        elif self.ticket is not None and not self.away:
            self._idle_steps += 1
            if self._idle_steps >= self._longest_idle:
                self._idle_steps = 0
                self._longest_idle = min(2 * self._longest_idle, _MOST_IDLE_STEPS)
                self._times_s.clear()

    def depart(self) -> None:
        """Note that the next ticket is final; samples that are counted from now on belong to the next step."""
        self._aside = self.counted
        self.counted = 0.0

    def returned(self) -> None:
        """Count the samples of a final ticket again, because the ticket found no group."""
        self.counted += self._aside or 0.0
        self._aside = None

    def report(self, now: float) -> StepReport:
        age_s = 0.0
        if self.ticket is None and not self.away:
            age_s = max(0.0, now - self._begun_at)
        counted = self.counted if self._aside is None else self._aside
        return StepReport(
            self.step,
            self.lineage,
            counted=counted,
            granted=self.granted,
            batch_samples=self._samples,
            batch_s=self.batch_s,
            age_s=age_s,
            away=self.away,
            final=self.final,
            averages=self.averages,
            ticket=self.ticket,
        )
