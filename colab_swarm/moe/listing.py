"""What was read of one prefix or shelf, made ready for searches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from colab_swarm.moe.bans import Bans
from colab_swarm.moe.beam import Mask
from colab_swarm.moe.records import Holding
from colab_swarm.net.peers import PeerId


class Listing:
    """What was read of one prefix or shelf: each host's words, and who is believed for each index."""

    def __init__(self, words: dict[PeerId, list[Holding]]) -> None:
        self.words = words
        self._by_index: dict[int, list[Holding]] = {}
        for word in sorted(itertools.chain(*words.values()), key=lambda word: word.claim):
            self._by_index.setdefault(word.index, []).append(word)
        self._mask: Mask | None = None
        self._mask_version, self._mask_until = -1, 0.0

    def live(self, index: int, now: float) -> Iterator[Holding]:
        """Hosts' words for an index that still hold, the rightful one's first."""
        return (word for word in self._by_index.get(index, ()) if word.until > now)

    def usable(self, index: int, now: float, bans: Bans) -> Holding | None:
        """Who can be called for an index: the rightful one of those that are not banned."""
        for word in self.live(index, now):
            if word.served and not bans.banned((word.uid, word.host.id), now):
                return word
        return None

    def mask(self, width: int, now: float, bans: Bans) -> Mask:
        """The usable ones of ``width`` indices; worked out anew only when something has changed."""
        if self._mask is None or self._mask_version != bans.version or now >= self._mask_until:
            self._mask = np.zeros(width, np.bool_)
            self._mask[[index for index in self._by_index if self.usable(index, now, bans)]] = True
            ends = (word.until for word in itertools.chain(*self._by_index.values()) if word.until > now)
            self._mask_version = bans.version
            self._mask_until = min([bans.next_end(now), *ends], default=math.inf)
        return self._mask
