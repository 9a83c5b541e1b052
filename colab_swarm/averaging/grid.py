"""Groups in turn instead of one group of all (Moshpit averaging; DeDLOC section 3.2 and Appendix C).

The peers are laid out on a virtual grid. Round r averages within the lines along axis r; after one round per axis
everyone has the exact mean of all, and whoever fails in a round costs only its own line.

What makes it exact:

- There is no empty cell: where the number of peers is no product of sides, some cells hold several peers. A line with
  a hole would leave another line's mean behind.
- Beside its values each peer carries a *weight*. After a round the weight of all who averaged is shared out, equally
  to the line's cells and within a cell equally to its peers, so that no weight is ever lost or counted twice: in the
  next round every line along the other axis gets the same part of it.
- Whoever misses a round keeps its values and its weight; the next pass mixes them in.

Peers that cannot be dialled are laid out such that every line has one that can.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from colab_swarm.net.peers import PeerId

Cell = tuple[int, ...]


class Grid:
    """Who averages with whom, round by round; the same for all who know the same peers and seed.

    Args:
        seed: shuffles the peers, so that each pass has other groups.
        reachable: for every peer whether it accepts connections.
        group_size: wanted members of a group; it is raised until every line has a peer that accepts connections.

    Attributes:
        sides: cells along each axis; one round each.
    """

    def __init__(self, seed: bytes, reachable: Mapping[PeerId, bool], group_size: int) -> None:
        self._seed = seed
        shuffled = sorted(reachable, key=lambda peer: hashlib.sha256(seed + peer).digest())
        dialled = [peer for peer in shuffled if reachable[peer]]
        self.sides, cells = _covered(len(shuffled), group_size, len(dialled))
        order = dialled + [peer for peer in shuffled if not reachable[peer]]
        self.cells = {peer: cells[i % len(cells)] for i, peer in enumerate(order)}

    @property
    def rounds(self) -> int:
        """Rounds of one pass."""
        return len(self.sides)

    def line(self, peer: PeerId, axis: int) -> tuple[PeerId, ...]:
        """Who averages with ``peer`` along ``axis``, itself included; sorted."""
        mine = self._across(peer, axis)
        return tuple(sorted(other for other in self.cells if self._across(other, axis) == mine))

    def line_id(self, peer: PeerId, axis: int) -> bytes:
        """Names the line of ``peer`` along ``axis`` in this grid: 16 bytes."""
        return hashlib.sha256(self._seed + repr((axis, self._across(peer, axis))).encode()).digest()[:16]

    def carried(self, peer: PeerId, holders: Collection[PeerId], weight: float) -> float:
        """The weight that ``peer`` carries on from a round.

        Args:
            holders: who has the line's mean now, ``peer`` included.
            weight: of all contributions in that mean together.
        """
        cells = [self.cells[holder] for holder in holders]
        return weight / len(set(cells)) / cells.count(self.cells[peer])

    def _across(self, peer: PeerId, axis: int) -> Cell:
        cell = self.cells[peer]
        return cell[:axis] + cell[axis + 1 :]

    def __repr__(self) -> str:
        return f"Grid({len(self.cells)} peers on {'x'.join(map(str, self.sides))})"


def rounds_for(peers: int, group_size: int) -> int:
    """ceil(log_m n): rounds in groups of ``group_size`` until all ``peers`` have met."""
    rounds, met = 1, group_size
    while met < peers:
        rounds, met = rounds + 1, met * group_size
    return rounds


def plan_sides(peers: int, rounds: int) -> tuple[int, ...]:
    """Sides of a grid for so many rounds, as equal as can be, with at most as many cells as there are ``peers``.

    A side is 2 or more, so that there may be fewer rounds than asked for; the last side is the longest.
    """
    rounds = max(1, min(rounds, peers.bit_length() - 1))
    sides, left = [], peers
    for axes in range(rounds, 0, -1):
        side = next(s for s in itertools.count(1) if (s + 1) ** axes > left)
        sides.append(side)
        left //= side
    return tuple(sides)


def _covered(peers: int, group_size: int, reachable: int) -> tuple[tuple[int, ...], list[Cell]]:
    """Sides and cells, those first that hit every line at least once; as many as are ``reachable`` suffice."""
    for rounds in range(rounds_for(peers, group_size), 0, -1):
        sides = plan_sides(peers, rounds)
        shortest = min(sides)
        cells = sorted(itertools.product(*map(range, sides)), key=lambda cell: sum(cell) % shortest > 0)
        if sum(sum(cell) % shortest == 0 for cell in cells) <= reachable or rounds == 1:
            break
    return sides, cells


# --- how large a group should be ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundTime:
    """How long a round takes: finding each other, and the transfer, of which a member moves (m - 1) / m.

    Attributes:
        overhead_s: whatever the size of the group.
        transfer_s: in a large group.
    """

    overhead_s: float
    transfer_s: float

    def seconds(self, group_size: int) -> float:
        """T(m), seconds."""
        return self.overhead_s + self.transfer_s * (group_size - 1) / group_size


def success_rate(peers: int, group_size: int, *, failures_per_s: float, time: RoundTime) -> float:
    """Global averages per second that nobody's failure spoils (DeDLOC Appendix C).

    r(m) = (1-q)^(m ceil(log_m n)) / (T(m) ceil(log_m n)). The chance q that a peer fails during a round grows with the
    round: q = 1 - exp(-failures_per_s T(m)). With one q for all sizes, pairs would never beat fours, because
    m / log m is the same for both; with this one a high failure rate gives pairs.
    """
    rounds, round_s = rounds_for(peers, group_size), time.seconds(group_size)
    return math.exp(-failures_per_s * round_s * group_size * rounds) / (round_s * rounds)


def choose_group_size(peers: int, *, failures_per_s: float, time: RoundTime) -> int:
    """The group size m, 2 or more, with the highest `success_rate`; the smallest of several as good."""
    sizes = range(2, max(3, peers + 1))
    return max(sizes, key=lambda m: success_rate(peers, m, failures_per_s=failures_per_s, time=time))


MEMORY_ROUNDS = 20
"""The figures are those of the last rounds, about so many."""


class RoundMeter:
    """What rounds cost and how often peers fail in them, as one peer sees it. Pure.

    Attributes:
        time: of undisturbed rounds; how long disturbed ones take tells of patience, not of the network.
    """

    def __init__(self) -> None:
        self.time = RoundTime(overhead_s=0.2, transfer_s=0.8)
        self._timed = 0
        self._failures, self._members, self._rounds = 0.05, 10.0, 1.0

    @property
    def failure_rate(self) -> float:
        """The chance q that a member of a group fails during a round."""
        return self._failures / self._members

    @property
    def failures_per_s(self) -> float:
        """How often a member fails, per second of an undisturbed round."""
        round_s = self.time.seconds(max(2, round(self._members / self._rounds)))
        return -math.log1p(-min(self.failure_rate, 0.999)) / round_s

    def on_round(self, members: int, failed: int, *, overhead_s: float, averaging_s: float) -> None:
        """A round of ``members`` is over; those who ``failed`` did not come, or were lost."""
        keep = 1 - 1 / MEMORY_ROUNDS
        self._failures = keep * self._failures + failed
        self._members = keep * self._members + members
        self._rounds = keep * self._rounds + 1
        if failed or members < 2:
            return
        self._timed = min(self._timed + 1, MEMORY_ROUNDS)
        old, transfer_s = self.time, averaging_s * members / (members - 1)
        self.time = RoundTime(
            old.overhead_s + (overhead_s - old.overhead_s) / self._timed,
            old.transfer_s + (transfer_s - old.transfer_s) / self._timed,
        )

    def choose_group_size(self, peers: int) -> int:
        """The best group size for so many ``peers``, as far as this peer can tell."""
        return choose_group_size(peers, failures_per_s=self.failures_per_s, time=self.time)
