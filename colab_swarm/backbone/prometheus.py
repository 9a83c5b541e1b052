"""A `View` in the text format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator

from colab_swarm.backbone.view import CollaborationView, View
from colab_swarm.markup import Labels, Metric, exposition


def render_prometheus(view: View) -> str:
    """The figures of the run, one a line."""
    return exposition(_metrics(view))


def _metrics(view: View) -> Iterator[Metric]:
    run = (("run", view.run),)
    yield "uptime_seconds", "gauge", {run: view.at - view.since}
    yield "linked_peers", "gauge", {run: view.linked}
    yield "sent_bytes_total", "counter", {run: view.sent_bytes}
    yield "received_bytes_total", "counter", {run: view.received_bytes}
    models: dict[Labels, CollaborationView] = {
        (*run, ("collaboration", one.name)): one for one in view.collaborations
    }
    yield "step", "gauge", {labels: one.step for labels, one in models.items()}
    yield "loss", "gauge", {labels: one.loss for labels, one in models.items() if one.loss is not None}
    yield "samples_per_second", "gauge", {labels: one.samples_per_s for labels, one in models.items()}
    yield "peers", "gauge", _peers(models)
    yield "rounds_total", "counter", {labels: one.round_count for labels, one in models.items()}
    kept = {labels: one.checkpoints[-1] for labels, one in models.items() if one.checkpoints}
    yield "checkpoint_step", "gauge", {labels: one.step for labels, one in kept.items()}
    yield "checkpoint_timestamp_seconds", "gauge", {labels: one.at for labels, one in kept.items()}
    pushed = {labels: one.hub_failures for labels, one in models.items() if one.hub}
    yield "hub_failures_total", "counter", {labels: float(count) for labels, count in pushed.items()}


def _peers(models: dict[Labels, CollaborationView]) -> dict[Labels, float]:
    counts: dict[Labels, float] = {}
    for labels, one in models.items():
        counts[(*labels, ("role", "trainer"))] = one.trainers
        counts[(*labels, ("role", "catching up"))] = one.catching_up
        counts[(*labels, ("role", "assistant"))] = one.assistants
    return counts
