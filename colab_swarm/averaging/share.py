"""A peer's part of a step: what it is granted and has counted, as it reports it to the organizer."""

import math
import statistics
from collections import deque

from colab_swarm.averaging.group import StepReport, Ticket

_REMEMBERED_TIMES = 5
_IDLE_STEPS = 4  # without a grant, until this peer is measured anew; each time twice as many
_MOST_IDLE_STEPS = 256


class Share:
    """This peer's part of a step. The trainer's thread counts, the event loop reports.

    Attributes:
        step, lineage: of the state that it holds; -1: none.
        granted, counted: samples of the present step; granted 0: nothing yet, and the first micro-batch is reported.
        away: it computes nothing for now.
        final: the ticket stands, and it computes for the next step.
        averages: the round of its last contribution, and the step with its mean, are not over.
        ticket: it has computed what was granted, and waits for the group.
        assistant: it trains nothing, and offers this.
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
        self._begun_at = math.inf  # the present micro-batch; nothing is known of the first one
        self._idle_steps = 0  # that it waited out, one after another
        self._longest_idle = _IDLE_STEPS
        self._aside: float | None = None  # the counted samples of a final ticket, while the trainer counts on

    @property
    def samples(self) -> float:
        """Samples of a micro-batch; 0: not known."""
        return self._samples

    @property
    def batch_s(self) -> float:
        """What a micro-batch takes, the median of the last ones; 0: not known."""
        return statistics.median(self._times_s) if self._times_s else 0.0

    def work(self, now: float) -> None:
        """The trainer computes from now on."""
        self._begun_at = now

    def count(self, samples: float, now: float) -> None:
        """Count a micro-batch: the trainer computed it since `work`, or since the last one."""
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
        """The last micro-batch of the grant begins."""
        return self.counted + self._samples >= self.granted

    def begin(self, granted: float) -> None:
        """A group has formed: what follows counts for the next step."""
        self._note_idle(granted)
        self.granted = granted
        if self._aside is None:
            self.counted = 0.0
            self._begun_at = math.inf
        self._aside = None
        self.final = False
        self.ticket = None

    def _note_idle(self, granted: float) -> None:
        """Forget the times of a peer that gets no part by them: it may have been busy just then."""
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
        """The ticket that follows is final, and what is counted from now on is of the next step."""
        self._aside = self.counted
        self.counted = 0.0

    def returned(self) -> None:
        """The ticket found no group: its samples count again."""
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
