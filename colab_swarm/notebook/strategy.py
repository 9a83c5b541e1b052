"""What the adaptive strategy makes of a collaboration: drawn anew with every move of a slider."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from colab_swarm.averaging.strategy import AveragingSetup, Capacity, SharePlan, plan_round
from colab_swarm.markup import text
from colab_swarm.notebook import theme
from colab_swarm.notebook.platforms import has_frontend

MAX_COUNT = 32
SPEEDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0)
"""What the sliders offer, in Mbit/s."""


@dataclass(frozen=True)
class SplitKind:
    """Several peers that are alike.

    Attributes:
        name: what to call them.
        count: how many.
        mbit_s: up and down, each.
        computes: whether they have an accelerator; without, they only reduce.
    """

    name: str
    count: int
    mbit_s: float
    computes: bool = True


@dataclass(frozen=True)
class Comparison:
    """A collaboration, the plan for it, and how long its rounds take the other ways.

    Attributes:
        shares: of the reducing, per kind, all its peers together.
        all_reduce_s: everybody reduces the same share.
        server_s: the best single peer reduces everything.
    """

    kinds: tuple[SplitKind, ...]
    plan: SharePlan
    shares: tuple[float, ...]
    all_reduce_s: float
    server_s: float


def compare(kinds: Sequence[SplitKind], *, megabytes: float) -> Comparison:
    """Plan one round of averaging a gradient of so many ``megabytes``.

    Raises:
        ValueError: nobody computes.
    """
    peers = [kind for kind in kinds for _ in range(kind.count)]
    capacities = tuple(Capacity(float(k.computes), k.mbit_s * 1e6, k.mbit_s * 1e6) for k in peers)
    if not any(kind.computes for kind in peers):
        raise ValueError("nobody computes gradients: give a kind that does a count of 1 or more")
    setup = AveragingSetup(capacities, megabytes * 1e6, megabytes * 1e6)
    computing = [index for index, kind in enumerate(peers) if kind.computes]
    plan = plan_round(setup, computing)
    alone = ([float(i == server) for i in range(len(peers))] for server in range(len(peers)))
    return Comparison(
        tuple(kinds),
        plan,
        tuple(sum(s for s, k in zip(plan.shares, peers, strict=True) if k is kind) for kind in kinds),
        plan_round(setup, computing, [1.0] * len(peers)).averaging_s,
        min(plan_round(setup, computing, shares).averaging_s for shares in alone),
    )


def strategy_text(found: Comparison) -> str:
    """The comparison as aligned lines."""
    kinds = [
        f"  {kind.count:2} {kind.name:<12} {kind.mbit_s:6.0f} Mbit/s   reduce {share:4.0%}"
        for kind, share in zip(found.kinds, found.shares, strict=True)
        if kind.count
    ]
    times = [f"  {name:<18} {seconds:6.1f} s" for name, seconds in _times(found)]
    return "\n".join([*kinds, *times, f"  {found.plan.explanation}"])


def strategy_html(found: Comparison) -> str:
    """The comparison as one ``div`` with two bar charts."""
    shares = [
        (f"{kind.count} {kind.name}, {kind.mbit_s:.0f} Mbit/s", share, f"{share:.0%}")
        for kind, share in zip(found.kinds, found.shares, strict=True)
        if kind.count
    ]
    times = [(name, seconds, f"{seconds:.1f} s") for name, seconds in _times(found)]
    return theme.wrap(
        f"<h4>who reduces how much</h4>{_bars(shares, 'blue', 'shares of the reducing')}"
        f"<h4>how long a round takes</h4>{_bars(times, 'amber', 'seconds that a round takes')}"
        f"<p>{html.escape(found.plan.explanation)}</p>",
        "strategy",
    )


def _times(found: Comparison) -> list[tuple[str, float]]:
    return [
        ("all-reduce", found.all_reduce_s),
        ("parameter server", found.server_s),
        ("adaptive", found.plan.averaging_s),
    ]


def _bars(rows: Sequence[tuple[str, float, str]], hue: str, label: str) -> str:
    """Name, a bar, and its length in words, each."""
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    drawn = (
        (text(name), theme.bar(value / longest, f"{text(name)}: {told}", hue), told)
        for name, value, told in rows
    )
    return theme.table((), drawn, numbers=(2,), widths=("30%", "60%", "10%"), label=label)


class StrategyExplorer:
    """Sliders for the peers and their bandwidths; without a front-end the comparison as text and static HTML.

    Args:
        megabytes: of a gradient.
        live: whether to use widgets; None to find out.
    """

    def __init__(self, kinds: Sequence[SplitKind], *, megabytes: float, live: bool | None = None) -> None:
        self._kinds, self._megabytes = list(kinds), megabytes
        self.found = compare(kinds, megabytes=megabytes)
        self._view: Any = None
        self._box: Any = None
        if has_frontend() if live is None else live:
            self._build()

    def _build(self) -> None:
        import ipywidgets

        self._view = ipywidgets.HTML(strategy_html(self.found))
        rows = []
        for index, kind in enumerate(self._kinds):
            count = ipywidgets.IntSlider(kind.count, 0, MAX_COUNT, description=kind.name)
            options = [(f"{speed:g}", speed) for speed in sorted({*SPEEDS, kind.mbit_s})]
            speed = ipywidgets.SelectionSlider(options=options, value=kind.mbit_s, description="Mbit/s")
            count.observe(lambda change, i=index: self.change(i, count=change["new"]), names="value")
            speed.observe(lambda change, i=index: self.change(i, mbit_s=change["new"]), names="value")
            rows.append(ipywidgets.HBox([count, speed]))
        self._box = ipywidgets.VBox([*rows, self._view])

    def change(self, index: int, **changes: float) -> None:
        """Change the ``count`` or ``mbit_s`` of a kind and draw again."""
        self._kinds[index] = replace(self._kinds[index], **changes)  # type: ignore[arg-type]
        try:
            self.found = compare(self._kinds, megabytes=self._megabytes)
        except ValueError as error:
            drawn = theme.wrap(f'<p class="warn">⚠ {html.escape(str(error))}</p>', "strategy")
        else:
            drawn = strategy_html(self.found)
        if self._view is not None:
            self._view.value = drawn

    def __repr__(self) -> str:
        return strategy_text(self.found)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": strategy_html(self.found)}
        if self._box is not None:
            bundle["application/vnd.jupyter.widget-view+json"] = {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self._box.model_id,
            }
        return bundle
