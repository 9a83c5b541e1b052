"""What ``join()`` shows of the local network."""

from __future__ import annotations

import html

from colab_swarm.markup import text
from colab_swarm.net.lan import LanSwarm
from colab_swarm.widgets import theme

NONE = (
    "no swarm announces itself in this network: begin one with cs.create(…), or paste an invitation into "
    "cs.join('https://…#…'); some networks keep multicast from passing"
)


class LanSwarms(tuple[LanSwarm, ...]):
    """The swarms that announce themselves in the local network; an open one can be joined: ``cs.join(found[0])``."""

    def rows(self) -> list[tuple[str, str, str]]:
        """For each, its place and name, who is there, and how to join."""
        return [
            (f"[{index}] {swarm.run}", ", ".join(swarm.names), self._how(index, swarm))
            for index, swarm in enumerate(self)
        ]

    @staticmethod
    def _how(index: int, swarm: LanSwarm) -> str:
        return (
            f"open: cs.join(found[{index}])" if swarm.access == "open" else "by invitation: ask them for one"
        )

    def __repr__(self) -> str:
        return "\n".join("  ".join(row) for row in self.rows()) or NONE

    def _repr_html_(self) -> str:
        if not self:
            return theme.wrap(f"<p>{html.escape(NONE)}</p>", "swarms in this network")
        rows = (tuple(map(text, row)) for row in self.rows())
        table = theme.table(("swarm", "who is there", "how to join"), rows, label="swarms in this network")
        return theme.wrap(table, "swarms in this network")
