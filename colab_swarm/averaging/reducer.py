"""The pure core of a reducer: weighted means of one span, chunk by chunk, as contributions arrive.

- A chunk is finished when every member still expected delivered it. Its mean never changes then.
- A member that sends invalid data (NaN, wrong length, unknown chunk) or is lost is dropped. Its
  valid chunks stay, nothing more is accepted, and its weight leaves the mean of all other chunks.
- A chunk without contributions has no mean: members keep their local values.
- A contribution whose root mean square in a chunk is over ``most_rms``, and `OUTLIER` times that of this
  peer's ``own``, is scaled down; one of few values must be larger still.
- With ``clip``, a chunk's mean is `clipped_mean`: outliers and a third of liars move it little. ``most_rms`` does
  not count then, as auditors recompute the mean.
- Sums are float32 in order of arrival, of values already scaled by weight / total weight, so they
  cannot overflow.

State, as sets of members: ``_expected`` still owe chunks; ``_delivered[chunk]`` are in its sum.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from colab_swarm.averaging.group import Group, Span, chunk_values, cut_chunks
from colab_swarm.tensors.codecs import Floats, all_finite

OUTLIER = 10.0  # largest contribution, in usual sizes
FEW_VALUES = 64  # short vectors differ by chance: at this length twice as large is admitted, below it more
CLIP_STEPS, CONVERGED = 6, 1e-3  # at most, of a mean that moves by clipped distances
FAR, TINY = 4.0, 1e-60  # in median distances; a square
MOST_RMS = 1e15  # of a row whose inner products are taken in float32


class SpanLedger:
    """The vector of one member, and the state of each chunk of each reducer's span."""

    def __init__(self, group: Group, values: Floats) -> None:
        self.values = values
        size = chunk_values(group.terms.codec, group.terms.mean_codec)
        self.chunks = [cut_chunks(span, size) for span in group.spans()]
        # (reducer, chunk) -> whether there is a mean, and the members that are missing in it
        self._placed: dict[tuple[int, int], tuple[bool, tuple[int, ...]]] = {}

    def chunk(self, reducer: int, index: int) -> Span:
        """Return the place of a chunk of a reducer's span; raises ValueError if there is none."""
        if not 0 <= reducer < len(self.chunks) or not 0 <= index < len(self.chunks[reducer]):
            raise ValueError(f"there is no chunk {index} of span {reducer}")
        return self.chunks[reducer][index]

    def place(self, reducer: int, index: int, mean: Floats | None, missing: tuple[int, ...]) -> None:
        """Replace the own values by the mean, unless the chunk is settled; None: there is no mean."""
        chunk = self.chunk(reducer, index)
        if not self.settled(reducer, index):
            if mean is not None:
                self.values[chunk.start : chunk.stop] = mean
            self._placed[reducer, index] = mean is not None, missing

    def settled(self, reducer: int, index: int) -> bool:
        """Return True if the chunk's mean has arrived, or is known not to exist."""
        return (reducer, index) in self._placed

    def result(self, reducer: int, index: int) -> tuple[bool, tuple[int, ...]]:
        """Return whether the values are the mean, and the members that are missing in it."""
        return self._placed.get((reducer, index), (False, ()))

    def lacking(self, reducer: int) -> list[int]:
        return [index for index in range(len(self.chunks[reducer])) if not self.settled(reducer, index)]

    def root(self, reducer: int) -> bytes:
        """Return the digest of all means of a span, and of the members that are missing in them."""
        digest = blake3()
        for index, chunk in enumerate(self.chunks[reducer]):
            has_mean, missing = self.result(reducer, index)
            digest.update(f"{has_mean}{missing}".encode())
            digest.update(self.values[chunk.start : chunk.stop].data.cast("B") if has_mean else b"")
        return digest.digest()

    def kept_local(self) -> tuple[Span, ...]:
        """Return the spans of values that are still this member's own, as few as possible."""
        kept: list[Span] = []
        for reducer, chunks in enumerate(self.chunks):
            for index, chunk in enumerate(chunks):
                if not self.result(reducer, index)[0]:
                    start = kept.pop().start if kept and kept[-1].stop == chunk.start else chunk.start
                    kept.append(Span(start, chunk.stop))
        return tuple(kept)

    def incomplete(self) -> Collection[int]:
        """Return the members that are missing in at least one mean."""
        return {member for _, missing in self._placed.values() for member in missing}

    def waited(self) -> dict[int, int]:
        """Return a member that is missing in a reducer's means, by reducer: it may have waited for that one."""
        return {reducer: missing[0] for (reducer, _), (has_mean, missing) in self._placed.items() if missing}

    def gaps(self) -> tuple[tuple[Span, tuple[int, ...]], ...]:
        """Return the chunks whose values lack members, and which: all, where there is no mean."""
        chunks = ((cut, *self.result(r, i)) for r, own in enumerate(self.chunks) for i, cut in enumerate(own))
        everyone = tuple(range(len(self.chunks)))
        lacking = ((cut, missing if has_mean else everyone) for cut, has_mean, missing in chunks)
        return tuple((cut, missing) for cut, missing in lacking if missing)


class SpanReducer:
    """Averages the span of these ``chunks`` for the whole group; members of weight 0 send nothing.

    ``sums`` is float32 memory for the span, and holds the means in the end; then a copy of them may take its place.
    With ``clip``, contributions must stay as they are until their chunk is finished.
    """

    def __init__(
        self,
        chunks: Sequence[Span],
        weights: Sequence[float],
        sums: Floats,
        most_rms: float = math.inf,
        *,
        own: Sequence[Floats] = (),
        clip: bool = False,
    ) -> None:
        self._clip, self._own, self._most_rms = clip, own, MOST_RMS if clip else most_rms
        self._rows: list[dict[int, tuple[Floats, float]]] = [{} for _ in chunks]  # to clip, and their parts
        self._rms: list[list[float]] = [[] for _ in chunks]
        origin = chunks[0].start if chunks else 0
        total = sum(weights) or 1.0
        self._weights = [weight / total for weight in weights]
        self.sums = [sums[chunk.start - origin : chunk.stop - origin] for chunk in chunks]
        widest = max((chunk.numel for chunk in chunks), default=0)
        self._scratch = np.empty((len(weights) if clip else 1, widest), np.float32)
        self._delivered: list[set[int]] = [set() for _ in chunks]
        self._everyone = frozenset(member for member, weight in enumerate(weights) if weight > 0)
        self._expected = set(self._everyone)
        self.unfinished = set(range(len(chunks)))

    def on_chunk(self, member: int, chunk: int, values: Floats) -> bool:
        """Add one contribution, if it is expected; return True if it finished the chunk.

        Raises ValueError, and changes nothing, if the contribution is invalid: `drop` the member.
        """
        if member not in self._expected:
            return False
        if not 0 <= chunk < len(self.sums):
            raise ValueError(f"chunk {chunk} of {len(self.sums)} does not exist")
        if len(values) != len(self.sums[chunk]):
            raise ValueError(f"chunk {chunk} has {len(values)} values, {len(self.sums[chunk])} expected")
        rms = root_mean_square(values)
        if not math.isfinite(rms):
            raise ValueError(f"chunk {chunk} has values that are not finite")
        if member in self._delivered[chunk]:
            return False
        self._rms[chunk].append(rms)
        sums, weight = self.sums[chunk], self._weights[member]
        most_rms, few = self._most_rms, 1.0 + FEW_VALUES / len(values)
        if rms > few * most_rms:
            own_rms = root_mean_square(self._own[chunk]) if self._own and not self._clip else 0.0
            weight *= min(1.0, few * max(most_rms, OUTLIER * own_rms) / rms)
        if self._clip:
            self._rows[chunk][member] = values, weight / self._weights[member]
        elif self._delivered[chunk]:
            scaled = self._scratch[0, : len(sums)]
            np.multiply(values, weight, out=scaled)
            np.add(sums, scaled, out=sums)
        else:
            np.multiply(values, weight, out=sums)
        self._delivered[chunk].add(member)
        return self._finished(chunk)

    def drop(self, member: int) -> list[int]:
        """Expect nothing more of a member; returns the chunks finished by that."""
        self._expected.discard(member)
        return self.finished()

    def mean(self, chunk: int) -> Floats | None:
        """Return the mean of a finished chunk (a view of ``sums``); None if empty or overflown."""
        return self.sums[chunk] if self._delivered[chunk] and all_finite(self.sums[chunk]) else None

    @property
    def usual_rms(self) -> float:
        """The median member's root mean square in the chunk where it is largest; 0 if nothing came."""
        return max((statistics.median_low(members) for members in self._rms if members), default=0.0)

    def missing(self, chunk: int) -> tuple[int, ...]:
        return tuple(sorted(self._everyone - self._delivered[chunk]))

    def has_all_of(self, member: int) -> bool:
        """Return True if its whole contribution to this span has come; False if the span is empty."""
        return bool(self._delivered) and all(member in delivered for delivered in self._delivered)

    def awaited(self) -> list[int]:
        return sorted({m for chunk in self.unfinished for m in self._expected - self._delivered[chunk]})

    def finished(self) -> list[int]:
        """Return the chunks that have just finished; at first all, if all weights are 0."""
        return [chunk for chunk in sorted(self.unfinished) if self._finished(chunk)]

    def _finished(self, chunk: int) -> bool:
        delivered = self._delivered[chunk]
        if self._expected - delivered:
            return False
        self.unfinished.discard(chunk)
        if self._clip and delivered:
            held, rows = self._rows[chunk], self._scratch[: len(delivered), : len(self.sums[chunk])]
            weights = np.array([self._weights[member] for member in sorted(held)])
            for row, member in zip(rows, sorted(held), strict=True):
                np.multiply(held[member][0], np.float32(held[member][1]), out=row)
            held.clear()
            clipped_mean(rows, weights, out=self.sums[chunk])
        elif delivered and delivered != self._everyone:
            present = sum(self._weights[member] for member in sorted(delivered))
            np.divide(self.sums[chunk], present, out=self.sums[chunk])
        return True


def average_chunk(
    chunk: Span,
    weights: Sequence[float],
    contributions: Mapping[int, Floats],
    most_rms: float = math.inf,
    *,
    own: Sequence[Floats] = (),
    clip: bool = False,
) -> tuple[Floats | None, tuple[int, ...]]:
    """Average a chunk again, from ``contributions`` by member; return its mean and the members missing in it."""
    sums = np.empty(chunk.numel, np.float32)
    again = SpanReducer([chunk], weights, sums, most_rms, own=own, clip=clip)
    for member, values in sorted(contributions.items()):
        with suppress(ValueError):  # it may not be finite
            again.on_chunk(member, 0, values)
    for member in range(len(weights)):
        again.drop(member)
    return again.mean(0), again.missing(0)


def clipped_mean(rows: Floats, weights: npt.NDArray[np.float64], *, out: Floats) -> None:
    """Put the weighted mean of ``rows`` (members, values) into ``out``, with no row further off than half of them.

    CenteredClip (Karimireddy 2021; BTARD, section 3): each row pulls the mean by at most the median distance, and
    not at all if it is `FAR` times as far off, by its weight: few samples are noisier. The mean of the pulls at one
    mean gives the next one, until they are equal. The first is that of the closest majority (Krum, Blanchard 2017).
    Distances follow from the rows' inner products, so the values are read only twice.

    Up to a third may lie: with 1 liar of 4 or 5, 2 of 7 or 3 of 10 that send the flipped mean, or ten times that, the
    loss ended within 10 % of the clean run's. Liars that stay within the spread do harm from the first on: the mean
    less one deviation in every value, sent by 1 of 4, added 35 %, or 600 % at twice the noise. Memory of past rounds,
    as momentum, would help there (Karimireddy 2021). Measured with equal noise in 100 rounds of logistic regression.
    """
    products = (rows @ rows.T).astype(np.float64)
    norms, majority = products.diagonal(), len(weights) // 2 + 1
    apart = np.sqrt(np.maximum(norms[:, None] + norms - 2 * products, 0.0))
    central = np.sort(apart, axis=1)[:, :majority].sum(axis=1).argmin()
    far = FAR * np.sqrt(np.maximum(statistics.median(weights.tolist()) / weights, 1.0))
    parts = np.zeros_like(weights)
    parts[np.argsort(apart[central])[:majority]] = 1 / majority
    for _ in range(CLIP_STEPS):
        shadows = products @ parts
        distances = np.sqrt(np.maximum(norms - 2 * shadows + parts @ shadows, TINY))
        most = statistics.median_low(distances.tolist())
        pulls = weights * np.minimum(most / distances, 1.0) * (distances <= far * most)
        before, parts = parts, pulls / pulls.sum()
        if np.abs(parts - before).sum() < CONVERGED:
            break
    np.dot(parts.astype(np.float32), rows, out=out)


def root_mean_square(values: Floats) -> float:
    with np.errstate(over="ignore"):
        squares = float(np.dot(values, values))
    if not math.isfinite(squares):  # too large for float32, or not finite
        squares = float(np.square(values, dtype=np.float64).sum())
    return math.sqrt(squares / len(values))
