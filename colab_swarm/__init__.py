"""Train one large model together: any notebook becomes a peer in one cell.

    import colab_swarm as cs

    swarm = cs.join("https://…#…")                   # or cs.create("my-run"), or cs.simulate(peers=4)
    model, batches = cs.albert("tiny", text="python-docs", swarm=swarm)
    optimizer = swarm.optimizer(cs.Lamb(model.parameters(), lr=1.76e-3), target_batch_size=256)
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step(samples=len(batch["input_ids"]))

Each protocol has a page: what problem it solves, its messages and times, what goes wrong, the paper, the figures.

| page | about |
|---|---|
| `colab_swarm.net` | encrypted links; how a peer behind a router is reached |
| `colab_swarm.trust` | invitations, roles, memberships, revocation, the leaderboard |
| `colab_swarm.dht` | where to find things |
| `colab_swarm.averaging` | groups, rounds, who reduces how much (DeDLOC) |
| `colab_swarm.training` | training data-parallel: progress, catching up, slow lines (DeDLOC) |
| `colab_swarm.moe` | layers of experts that live on many machines (Learning@home) |
| `colab_swarm.workunits` | volunteers that make plain HTTPS requests (VC-ASGD) |
| `colab_swarm.elastic` | small groups that do not wait for all gradients (Elastic Consistency) |
| `colab_swarm.sim` | a swarm in one process, on virtual time, with scripted faults |
| `colab_swarm.widgets` | what a person sees in a notebook or a terminal |
| `colab_swarm.backbone` | the peer that stays |
| `colab_swarm.errors` | what can go wrong, and what to do about it |

And besides: `colab_swarm.tensors` (what crosses the wire), `colab_swarm.recipes` (models with their data),
`colab_swarm.diagnosis` (the doctor), `colab_swarm.bench` (all figures, to be measured again).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colab_swarm.diagnosis.doctor import doctor
    from colab_swarm.errors import (
        ExpertError,
        InviteError,
        JoinError,
        NoExpertsError,
        PeerError,
        StateError,
        StoreError,
        SwarmError,
        TermsError,
        TunnelError,
    )
    from colab_swarm.explanation import explain
    from colab_swarm.jobs.coordinator import coordinate
    from colab_swarm.jobs.volunteer import volunteer
    from colab_swarm.joining import create, join, resume
    from colab_swarm.moe.blocks import FeedForward, TransformerBlock
    from colab_swarm.moe.expert import ExpertRule
    from colab_swarm.net.relay import RelayQuota
    from colab_swarm.presence import PeerOptions
    from colab_swarm.receipt import Receipt
    from colab_swarm.recipes.albert import albert
    from colab_swarm.recipes.hyperparameters import parameter_groups
    from colab_swarm.recipes.swav.recipe import swav
    from colab_swarm.simulation import Simulation, simulate
    from colab_swarm.swarm import Swarm
    from colab_swarm.training.checkpoint import CheckpointFolder
    from colab_swarm.training.host import host_optimizer
    from colab_swarm.training.lamb import Lamb
    from colab_swarm.training.lars import Lars
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.training.thrift import Budget
    from colab_swarm.trust.authority import Allowlist
    from colab_swarm.widgets.lesson import Wish
    from colab_swarm.widgets.replay import replay
    from colab_swarm.workunits.job import Job, WorkPlan

_HOMES = {
    "Allowlist": "trust.authority",
    "Budget": "training.thrift",
    "CheckpointFolder": "training.checkpoint",
    "ExpertError": "errors",
    "ExpertRule": "moe.expert",
    "FeedForward": "moe.blocks",
    "InviteError": "errors",
    "Job": "workunits.job",
    "JoinError": "errors",
    "Lamb": "training.lamb",
    "Lars": "training.lars",
    "NoExpertsError": "errors",
    "PeerError": "errors",
    "PeerOptions": "presence",
    "Receipt": "receipt",
    "RelayQuota": "net.relay",
    "Simulation": "simulation",
    "StateError": "errors",
    "StoreError": "errors",
    "Swarm": "swarm",
    "SwarmError": "errors",
    "SwarmOptimizer": "training.optimizer",
    "TermsError": "errors",
    "TransformerBlock": "moe.blocks",
    "TunnelError": "errors",
    "Wish": "widgets.lesson",
    "WorkPlan": "workunits.job",
    "albert": "recipes.albert",
    "coordinate": "jobs.coordinator",
    "create": "joining",
    "doctor": "diagnosis.doctor",
    "explain": "explanation",
    "host_optimizer": "training.host",
    "join": "joining",
    "parameter_groups": "recipes.hyperparameters",
    "replay": "widgets.replay",
    "resume": "joining",
    "simulate": "simulation",
    "swav": "recipes.swav.recipe",
    "volunteer": "jobs.volunteer",
}

__all__ = [  # noqa: RUF022 - by subject
    "create",
    "join",
    "resume",
    "simulate",
    "doctor",
    "explain",
    "replay",
    "Swarm",
    "Simulation",
    "Wish",
    "Receipt",
    "PeerOptions",
    "RelayQuota",
    "Allowlist",
    "SwarmOptimizer",
    "Budget",
    "CheckpointFolder",
    "albert",
    "parameter_groups",
    "Lamb",
    "Lars",
    "swav",
    "host_optimizer",
    "FeedForward",
    "TransformerBlock",
    "ExpertRule",
    "Job",
    "WorkPlan",
    "coordinate",
    "volunteer",
    "StoreError",
    "SwarmError",
    "PeerError",
    "InviteError",
    "JoinError",
    "TermsError",
    "TunnelError",
    "ExpertError",
    "NoExpertsError",
    "StateError",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a relay or backbone starts in a second because it never touches torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
