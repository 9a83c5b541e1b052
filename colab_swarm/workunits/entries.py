"""What happened to a job, as entries of its store's log.

The log is the job's memory: whoever reads it from the beginning knows every unit, volunteer and epoch. The
coordinator writes all of it but `Assimilated` and `Measured`, which the parameter servers write.

    Met -> Assigned -> Accepted -> Assimilated -> Measured        then EpochEnded, and at last Finished
              |  \\-> Returned -> Accepted | Rejected             with replicas, until enough of them are back
              |  \\-> Rejected                                    the result was no use: the unit goes to somebody else
              |---> Expired                                      its deadline passed: likewise
              \\---> GaveBack                                     the volunteer left in good order: likewise

Times are seconds since the epoch, so that they mean the same after a restart.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Unit(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One subset of the data in one epoch, both counted as people do: epochs from 1, subsets from 0."""

    epoch: int
    subset: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.subset}"


class Entry(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all entries. ``at``: when it happened."""

    at: float


class Met(Entry, frozen=True):
    """A volunteer came for the first time. ``volunteer``: its peer id in hex; ``name``: what it calls itself."""

    volunteer: str
    name: str


class Assigned(Entry, frozen=True):
    """A volunteer is to train a unit before ``deadline``.

    Attributes:
        assignment: random, 32 hex digits; the only thing that an upload names.
        version: of the parameters at that time.
    """

    unit: Unit
    assignment: str
    volunteer: str
    deadline: float
    version: int


class Returned(Entry, frozen=True):
    """The result of one replica is kept as blob ``result`` until enough of them are back."""

    assignment: str
    result: str


class Accepted(Entry, frozen=True):
    """The unit's result, blob ``result``, waits for a parameter server, which weighs its own copy by ``alpha``.

    Attributes:
        base: version of the parameters that training began with.
        change: how far training moved the parameters (L2 norm).
    """

    unit: Unit
    assignment: str
    result: str
    alpha: float
    base: int
    change: float


class Rejected(Entry, frozen=True):
    """The result was no use."""

    assignment: str
    reason: str


class Expired(Entry, frozen=True):
    """The deadline passed without a result."""

    assignment: str


class GaveBack(Entry, frozen=True):
    """The volunteer will not train it after all."""

    assignment: str


class Assimilated(Entry, frozen=True):
    """A parameter server has made the result part of the parameters, which have ``version`` since.

    Attributes:
        seconds: what the update took, from taking the result to the new parameters in the store.
    """

    unit: Unit
    assignment: str
    server: str
    version: int
    seconds: float


class Measured(Entry, frozen=True):
    """Accuracy on the validation samples after the unit's assimilation."""

    unit: Unit
    accuracy: float


class EpochEnded(Entry, frozen=True):
    """All units of an epoch are assimilated; mean, lowest and highest accuracy over its units."""

    epoch: int
    accuracy: float
    low: float
    high: float


class Finished(Entry, frozen=True):
    """The job is done."""

    reason: str


AnyEntry: TypeAlias = (
    Met
    | Assigned
    | Returned
    | Accepted
    | Rejected
    | Expired
    | GaveBack
    | Assimilated
    | Measured
    | EpochEnded
    | Finished
)
_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode_entry(entry: AnyEntry) -> bytes:
    """As stores keep it."""
    return msgspec.msgpack.encode(entry)


def decode_entry(data: bytes) -> AnyEntry:
    """What `encode_entry` made."""
    return _decoder.decode(data)
