"""Which links there are, and which of several to one peer is used. Free of I/O."""

from __future__ import annotations

from collections.abc import Iterator

from colab_swarm.net.carrier import Way
from colab_swarm.net.link import Link
from colab_swarm.net.peers import PeerId

SIMULTANEOUS_S = 10.0


class LinkTable:
    """Links by peer.

    A link through a relay is only used while there is no other: both ends leave it as soon as they have a better
    one, and it ends when its calls and streams are over, so nothing is lost in the change.

    When both ends dial at once there are two links for a moment. Both ends choose the one that the peer with
    the smaller id dialled, and leave the other, which ends when its calls and streams are over. A link that
    comes later than a dial can last replaces the old one: the peer would not have dialled if that still
    worked for it.

    Args:
        own: this peer's id.
    """

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._by_peer: dict[PeerId, list[Link]] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(
            [link for links in list(self._by_peer.values()) for link in links]
        )  # seen from other threads

    def __len__(self) -> int:
        return sum(len(links) for links in self._by_peer.values())

    def peers(self) -> frozenset[PeerId]:
        """Peers with a link."""
        return frozenset(self._by_peer)

    def of(self, peer: PeerId) -> list[Link]:
        """All links to a peer."""
        return list(self._by_peer.get(peer, ()))

    def best(self, peer: PeerId) -> Link | None:
        """The link to use for something new."""
        usable = [link for link in self._by_peer.get(peer, ()) if not link.leaving]
        if len(usable) < 2:
            return usable[0] if usable else None
        usable = [link for link in usable if not _relayed(link)] or usable
        newest = max(link.opened_at for link in usable)
        rivals = [link for link in usable if newest - link.opened_at < SIMULTANEOUS_S]
        return max(rivals, key=lambda link: (link.dialled == (self._own < peer), link.opened_at))

    def add(self, link: Link) -> bool:
        """Take a new link; returns whether it is the first to its peer."""
        links = self._by_peer.setdefault(link.peer, [])
        links.append(link)
        return len(links) == 1

    def remove(self, link: Link) -> bool:
        """Forget a link; returns whether it was the last to its peer."""
        links = self._by_peer.get(link.peer, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._by_peer[link.peer]
                return True
        return False

    def full(self, limit: int) -> bool:
        """Whether no link may be added: of ``limit`` none can be closed, or too many never leave when told to."""
        return len(self) >= 2 * limit or (len(self) >= limit and self.longest_unused() is None)

    def longest_unused(self) -> Link | None:
        """The quiet link that could be closed first."""
        quiet = [link for link in self if link.mux.quiet and not link.leaving]
        return min(quiet, key=lambda link: link.used_at, default=None)


def _relayed(link: Link) -> bool:
    return link.remote.path.way is Way.RELAYED
