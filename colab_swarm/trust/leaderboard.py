"""The leaderboard as people see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from colab_swarm.markup import facts, plain, size
from colab_swarm.net.peers import PeerId, short
from colab_swarm.trust.contributions import Contribution

COLUMNS = ("", "peer", "id", "samples", "averaged for others", "relayed for others", "units", "expert calls")


class Leaderboard(tuple[Contribution, ...]):
    """Who gave how much to the swarm, as the others saw it; the most samples first.

    Attributes:
        names: what peers call themselves, by short id, as far as it is known; not to be trusted.
        me: this peer.
    """

    names: Mapping[str, str]
    me: PeerId

    def __new__(cls, given: Iterable[Contribution], names: Mapping[str, str], me: PeerId) -> Leaderboard:
        """Take over the order."""
        board = super().__new__(cls, given)
        board.names, board.me = names, me
        return board

    def __getnewargs__(self) -> tuple[tuple[Contribution, ...], Mapping[str, str], PeerId]:
        """For copies."""
        return tuple(self), self.names, self.me

    def rows(self) -> list[tuple[str, ...]]:
        """Of a table with `COLUMNS`."""
        return [
            (
                f"{place}.",
                plain(self.names.get(short(one.peer), ""), 40) + " (me)" * (one.peer == self.me),
                short(one.peer),
                f"{one.samples:,.0f}",
                size(one.reduced_bytes),
                size(one.relayed_bytes),
                f"{one.units:,.0f}",
                f"{one.expert_calls:,.0f}",
            )
            for place, one in enumerate(self, 1)
        ]

    def __repr__(self) -> str:
        peers = f"{len(self)} peer" + "s" * (len(self) != 1)
        return f"Leaderboard({peers}, {sum(one.samples for one in self):,.0f} samples)"

    def _repr_html_(self) -> str:
        nothing = "" if self else ": nothing yet"
        return facts(f"Leaderboard: what others saw each peer give{nothing}", {}, COLUMNS, self.rows())
