"""What a volunteer does, at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitProgress:
    """One of the units that a volunteer works on at a time.

    Attributes:
        unit: which, for people; empty while there is none.
        phase: ``asking``, ``waiting``, ``downloading``, ``training`` or ``uploading``.
        done, batches: trained so far, and of the whole unit; 0 before training.
        loss: of the last batch.
        seconds: since the unit was given.
    """

    unit: str = ""
    phase: str = "asking"
    done: int = 0
    batches: int = 0
    loss: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class VolunteerSnapshot:
    """What one volunteer does and has done in a job.

    Attributes:
        job: its name.
        state: what goes on, or why it ended, for people.
        over: whether it has ended.
        fault: traceback of the job's own code, if that is why it ended.
        epoch, accuracy: where the job is, and of its last epoch, as the coordinator told last.
        units: in hand.
        accepted, refused, given_back: units so far.
        refusal: why the last one was refused.
        samples: trained in accepted units.
        sent_bytes, received_bytes: of results, and of data and parameters.
        seconds: since it began.
        cache_hits, cache_misses: units whose data were on this disk already, and were not.
    """

    job: str
    state: str
    over: bool
    fault: str
    epoch: int
    accuracy: float | None
    units: tuple[UnitProgress, ...]
    accepted: int
    refused: int
    given_back: int
    refusal: str
    samples: int
    sent_bytes: int
    received_bytes: int
    seconds: float
    cache_hits: int = 0
    cache_misses: int = 0
