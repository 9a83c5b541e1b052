"""What the doctor knows before it judges: frozen records that probes fill in. None stands for "could not be told"."""

from __future__ import annotations

from dataclasses import dataclass

from colab_swarm.diagnosis.predict import Line, Needs, Prediction, Workload
from colab_swarm.net.ladder import Reachability
from colab_swarm.widgets.environment import Platform


@dataclass(frozen=True)
class Gpu:
    """A graphics card; bytes of its memory."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    """This machine, as this process may use it.

    Attributes:
        cores: CPU cores.
        free_ram_bytes: main memory still to be had.
        free_disk_bytes: in the current folder.
        open_files: how many file descriptors (sockets are such) this process may hold.
        gpu: the card torch uses.
    """

    cores: int
    free_ram_bytes: int | None
    free_disk_bytes: int
    open_files: int | None
    gpu: Gpu | None


@dataclass(frozen=True)
class Version:
    """A package: what is here (None if nothing) and what is wanted at least."""

    name: str
    found: str | None
    wanted: str

    @property
    def too_old(self) -> bool:
        """Whether what is here is older than wanted."""
        return self.found is not None and numbers(self.found) < numbers(self.wanted)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.9.0+cu126`` is (2, 9, 0)."""
    parts: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    while parts and parts[-1] == 0:  # 3.0 is 3
        parts.pop()
    return tuple(parts)


@dataclass(frozen=True)
class Membership:
    """This peer in its swarm.

    Attributes:
        run: the run's name.
        reachability: how others reach this peer, and why not better.
        linked: peers it has links to.
        trainers: speeds of the peers that train already, samples/s.
        skew_s: own clock minus the swarm's, seconds.
        line: what speed tests with peers gave; None if no peer took one.
    """

    run: str
    reachability: Reachability
    linked: int
    trainers: tuple[float, ...]
    skew_s: float
    line: Line | None


@dataclass(frozen=True)
class Facts:
    """All that the doctor judges by.

    Attributes:
        platform, machine, versions: where this runs.
        internet: whether well-known hosts can be reached.
        membership: the swarm, if there is one.
        refused: why the swarm could not be joined; empty if it was, or if none was asked for.
        needs: memory of the model, if it is known.
        work, prediction: of the training, if its speed could be measured and the target batch is known.
    """

    platform: Platform
    machine: Machine
    versions: tuple[Version, ...]
    internet: bool
    membership: Membership | None = None
    refused: str = ""
    needs: Needs | None = None
    work: Workload | None = None
    prediction: Prediction | None = None
