"""The adaptive strategy (DeDLOC, section 3.2): how much each member of a round reduces.

Equation 1 has two rates for every pair of peers. Here, every member sends the part ``r_j`` of its vector to member j,
and member j sends the mean of this part back. So the n shares ``r_j`` determine the whole round. Unlike in equation 1,
each peer with samples contributes, and only peers have limits, not pairs of peers. Let V be the bytes of a
contribution and M the bytes of the means. Let ``c_i`` be 1 if peer i contributes, else 0, and k their sum. Let ``w_i``
be 1 if peer i needs means, else 0, and m their sum. Then peer i transfers::

    up    c_i V (1 - r_i)  +  r_i M (m - w_i)
    down  w_i M (1 - r_i)  +  r_i V (k - c_i)

The round takes as long as the slowest of these 2n transfers. A linear program minimizes this time. Each transfer
bounds only one share, so bisection finds the least time for which the shares can add up to 1.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt

from colab_swarm.averaging.group import Group, RoundTerms, SharePlan, Ticket, equal_shares, offer_of, reducing
from colab_swarm.events import Bottleneck
from colab_swarm.tensors.codecs import Precision
from colab_swarm.tensors.sparse import Sparse, SparseLoCo, sparse16_bytes

_Array = npt.NDArray[np.float64]

# A claimed bandwidth counts as at most this many times the median, and at least the median divided by this number. So a
# member that lies cannot slow a round by more than that.
CLAIM_CAP = 16.0
_SMALL = 0.3  # part of an equal share; smaller shares are only used if they save time
_LEARNT = 0.3
_FORGOTTEN = 0.02
_MOST_LATE = 10.0
_PRECISION = 1e-7


def plan_round(tickets: Sequence[Ticket], shares: Sequence[float] | None = None) -> SharePlan:
    """Return the plan of the fastest round or, if ``shares`` are given, of a round with these shares.

    An unknown bandwidth is taken as the median. Raises ValueError if no peer reduces, or if no bandwidth is known.
    """
    loads = _Loads(tickets)
    if shares is None:
        parts = loads.best()
    else:
        parts = np.array(shares, np.float64)
    parts /= parts.sum()
    averaging_s = float(loads.seconds(parts).max(initial=0.0))
    explanation, bottleneck = loads.explain(parts)
    return SharePlan(tuple(map(float, parts)), averaging_s, explanation, bottleneck)


class _Loads:
    """The transfer times as a function of the shares. The first row is for uploads, the second for downloads."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        terms = tickets[0].terms
        # c and w as in the module's docstring.
        c = np.array([ticket.weight > 0 for ticket in tickets], np.float64)
        w = np.array([not ticket.assists for ticket in tickets], np.float64)
        up = encoded_bytes(terms.codec, terms.numel)
        down = mean_bytes(terms, int(c.sum()))
        self._reduces = np.array(reducing(tickets), np.float64)
        if not self._reduces.any():
            raise ValueError("nobody reduces: no peer accepts connections")
        self._fixed = np.stack([up * c, down * w])
        self._slope = np.stack([down * (w.sum() - w) - up * c, up * (c.sum() - c) - down * w])
        upload_bps = _completed([ticket.upload_bps for ticket in tickets])
        download_bps = _completed([ticket.download_bps for ticket in tickets])
        self._rates = np.array([upload_bps, download_bps]) / 8

    def seconds(self, shares: _Array) -> _Array:
        return ((self._fixed + self._slope * shares) / self._rates).ravel()

    def best(self) -> _Array:
        """Return the shares of the fastest round; very small shares are dropped if this costs no time."""
        shares = self._fill()
        few = np.where(shares < _SMALL * shares.mean(), 0.0, shares)
        few /= few.sum()
        if self.seconds(few).max() <= (1 + _PRECISION) * self.seconds(shares).max():
            return few
        return shares

    def _fill(self) -> _Array:
        longest = float(self.seconds(self._reduces / self._reduces.sum()).max()) * (1 + _PRECISION)
        least = _least(self._feasible, longest)
        low, high = self._bounds(least)
        within = _least(lambda time: np.maximum(low, self._bounds(time)[1]).sum() >= 1, least, precision=1e-3)
        high = np.minimum(high, np.maximum(low, self._bounds(within)[1]))
        spare = float((high - low).sum())
        if not spare:
            return low
        part = (1 - float(low.sum())) / spare
        return low + (high - low) * part

    def _bounds(self, seconds: float) -> tuple[_Array, _Array]:
        """Return each peer's lowest and highest share for a round of ``seconds``; if none fits, lowest > highest."""
        room = seconds * self._rates - self._fixed
        with np.errstate(divide="ignore", invalid="ignore"):
            limit = room / self._slope
        high = np.where((self._slope < 0) | np.isnan(limit), np.inf, limit).min(axis=0)
        low = np.where(self._slope < 0, limit, 0.0).max(axis=0)
        return np.maximum(low, 0.0), np.minimum(high, self._reduces)

    def _feasible(self, seconds: float) -> bool:
        low, high = self._bounds(seconds)
        return bool((low <= high).all() and low.sum() <= 1 <= high.sum())

    def explain(self, shares: _Array) -> tuple[str, Bottleneck]:
        peers = len(shares)
        reducers = int(self._reduces.sum())
        seconds = self.seconds(shares)
        if peers == 1:
            return "a peer alone needs no averaging", ""
        above = shares > (1 + 1e-3) / reducers
        what = f"{reducers} of {peers} peers reduce equal shares"
        if above.sum() == 1:
            what = f"1 of {peers} peers reduces {shares[above].sum():.0%}"
        elif above.any():
            what = f"{above.sum()} of {peers} peers reduce {shares[above].sum():.0%}"
        slowest = (seconds >= 0.99 * seconds.max()).reshape(2, peers)
        count = int(slowest.any(axis=0).sum())
        mbit = self._rates[slowest] * 8e-6
        low = _in_digits(mbit.min())
        high = _in_digits(mbit.max())
        rate = f"{low} Mbit/s"
        if low != high:
            rate = f"{low} to {high} Mbit/s"
        if count == peers:
            return f"{what} because all finish together ({rate})", "none"
        upload, download = slowest.any(axis=1)
        bottleneck: Bottleneck = "download"
        verb = "is"
        if upload and download:
            bottleneck = "upload and download"
            verb = "are"
        elif upload:
            bottleneck = "upload"
        who = f"{count} peers"
        if count == 1:
            who = "1 peer"
        return f"{what} because {bottleneck} of {who} ({rate}) {verb} the bottleneck", bottleneck


def _in_digits(mbit: float) -> str:
    if mbit >= 100:
        return f"{mbit:,.0f}"
    return f"{mbit:.3g}"


def _least(enough: Callable[[float], object], most: float, *, precision: float = _PRECISION) -> float:
    low = 0.0
    high = most
    while high - low > precision * max(high, precision * most):
        middle = (low + high) / 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _completed(rates_bps: Sequence[float | None]) -> list[float]:
    known = [rate for rate in rates_bps if rate is not None]
    if not known or not all(0 < rate < math.inf for rate in known):
        raise ValueError(f"bandwidths must be positive and one at least known, got {list(rates_bps)}")
    median = statistics.median_low(known)
    completed = []
    for rate in rates_bps:
        if rate is None:
            rate = median
        completed.append(rate)
    return completed


def believed(claims_bps: Sequence[float | None]) -> list[float | None]:
    """Bound claimed rates to between the median divided by `CLAIM_CAP` and the median times `CLAIM_CAP`.

    Claims under 1 bit per second are ignored. The median of two claims is the lower claim, so that one liar among two
    peers cannot raise it.
    """
    known = [claim for claim in claims_bps if _is_rate(claim)]
    usual = 0.0
    if known:
        usual = statistics.median_low(known)
    rates: list[float | None] = []
    for claim in claims_bps:
        if _is_rate(claim):
            rates.append(min(max(claim, usual / CLAIM_CAP), CLAIM_CAP * usual))
        else:
            rates.append(None)
    return rates


def _is_rate(claim_bps: float | None) -> TypeGuard[float]:
    return claim_bps is not None and 1 <= claim_bps < math.inf


def adaptive_shares(tickets: Sequence[Ticket], *, flattery: float = 1.0) -> SharePlan:
    """Plan the shares of a live round; its tickets determine which peers contribute.

    The shares are equal if there are no measurements, or if other shares would save less than a tenth of the time. The
    reason is that measured rates are noisy, and equal shares reveal more about them. ``flattery`` is a correction: how
    many times more optimistic forecasts were for planned shares than for equal shares.
    """
    equal = equal_shares(tickets)
    trusted = _trusted_tickets(tickets)
    if not any(equal.shares) or trusted is None:
        return equal
    as_equals = plan_round(trusted, equal.shares)
    planned = plan_round(trusted)
    if planned.averaging_s * flattery < 0.9 * as_equals.averaging_s:
        return planned
    return as_equals


def forecast_s(group: Group) -> float:
    """Return the seconds that a group's round takes by the bandwidths that its members claim; 0 if not known.

    A claim below the median divided by `CLAIM_CAP` is raised to this value. For this median, a member without a claim
    counts as infinitely fast, so that a single claim is not the median.
    """
    if not any(member.reduces for member in group.members):
        # The only member accepts no connections.
        return 0.0
    tickets = [Ticket(group.terms, member.weight, *offer_of(member)) for member in group.members]
    trusted = _trusted_tickets(tickets)
    least_up = _median_claim([ticket.upload_bps for ticket in tickets]) / CLAIM_CAP
    least_down = _median_claim([ticket.download_bps for ticket in tickets]) / CLAIM_CAP
    if trusted is None or math.inf in (least_up, least_down):
        return 0.0
    believable = []
    for ticket in trusted:
        upload_bps = ticket.upload_bps and max(ticket.upload_bps, least_up)
        download_bps = ticket.download_bps and max(ticket.download_bps, least_down)
        believable.append(msgspec.structs.replace(ticket, upload_bps=upload_bps, download_bps=download_bps))
    return plan_round(believable, [member.share for member in group.members]).averaging_s


def _median_claim(claims_bps: Sequence[float | None]) -> float:
    """Return the median of the bandwidths that members claim; a member without a claim counts as infinitely fast."""
    known = [claim_bps for claim_bps in claims_bps if _is_rate(claim_bps)]
    unknown = [math.inf] * (len(claims_bps) - len(known))
    return statistics.median_high([*known, *unknown])


def _trusted_tickets(tickets: Sequence[Ticket]) -> list[Ticket] | None:
    """Return the tickets with the bandwidths that this peer believes; None if no bandwidth is known."""
    uploads = _trusted(tickets, [ticket.upload_bps for ticket in tickets])
    downloads = _trusted(tickets, [ticket.download_bps for ticket in tickets])
    if not any(uploads) or not any(downloads):
        return None
    trusted = []
    for ticket, upload_bps, download_bps in zip(tickets, uploads, downloads, strict=True):
        trusted.append(msgspec.structs.replace(ticket, upload_bps=upload_bps, download_bps=download_bps))
    return trusted


class AdaptiveShares:
    """Plans shares by `adaptive_shares`, and learns from the errors of its forecasts.

    A link's measured bandwidth cannot exceed the load on the link. So a peer that reduces more seems to have more
    bandwidth. Without learning, unequal shares among equal peers would confirm themselves.
    """

    def __init__(self) -> None:
        self._late = {True: 1.0, False: 1.0}  # actual over predicted time; True: with equal shares

    def __call__(self, tickets: Sequence[Ticket]) -> SharePlan:
        return adaptive_shares(tickets, flattery=self._late[False] / self._late[True])

    def on_round(self, shares: Sequence[float], predicted_s: float | None, seconds: float) -> None:
        """Learn from a round without failures.

        Equal and unequal shares each have a figure: actual over predicted time. The other kind's slowly returns to 1.
        """
        if predicted_s and seconds > 0:
            equal = len({*shares} - {0.0}) == 1
            late = min(max(seconds / predicted_s, 1 / _MOST_LATE), _MOST_LATE)
            self._late[equal] += _LEARNT * (late - self._late[equal])
            self._late[not equal] += _FORGOTTEN * (1.0 - self._late[not equal])


def _trusted(tickets: Sequence[Ticket], claims_bps: Sequence[float | None]) -> list[float | None]:
    """Return `believed` rates, with those of assistants raised to the trainers' median.

    Assistants carry little load, so their measured rates are too low.
    """
    rates = believed(claims_bps)
    trainers = []
    for ticket, rate in zip(tickets, rates, strict=True):
        if rate and not ticket.assists:
            trainers.append(rate)
    least = 0.0
    if trainers:
        least = statistics.median_high(trainers)
    for index, ticket in enumerate(tickets):
        if ticket.assists:
            rates[index] = max(rates[index] or 0.0, least) or None
    return rates


def encoded_bytes(precision: str, numel: int) -> int:
    """Return the bytes of an encoded vector, as if its small tensors had no finer codec."""
    return Precision(precision, fine=0).at(0).encoded_bytes(numel)


def mean_bytes(terms: RoundTerms, contributors: int) -> int:
    """Return the bytes of the encoded mean of this many contributions.

    The mean of sparse vectors has a value at each place where a contribution has a value. These places are assumed to
    be independent; the more of them are equal, the shorter is the mean.
    """
    dense = encoded_bytes(terms.mean_codec, terms.numel)
    codec = Precision(terms.codec).widest
    if not isinstance(codec, Sparse) or terms.mean_codec != "float16" or not terms.numel:
        return dense
    density = 1 - (1 - codec.kept(terms.numel) / terms.numel) ** contributors
    bits = 16.0
    if isinstance(codec, SparseLoCo):
        # As measured: each contributor has four values in a piece, and most sums have only one contribution.
        bits = min(bits, 1.05 + 1.27 * math.sqrt(contributors))
    return min(dense, sparse16_bytes(math.ceil(density * terms.numel), terms.numel, bits))
