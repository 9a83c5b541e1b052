"""What a collaborative optimizer tells of itself, at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from colab_swarm.markup import facts


@dataclass(frozen=True)
class OptimizerSnapshot:
    """How far the swarm is, as one peer's optimizer knows it.

    Attributes:
        optimizer: what it steps.
        step: updates of the swarm that this peer's parameters have.
        own_samples: accumulated here for the next one.
        samples, target_batch_size: accumulated by all peers, and what the next step takes.
        samples_per_s: of all peers together.
        peers: that train.
        budget: what the budget led to, in words; empty without one.
    """

    optimizer: str
    step: int
    own_samples: float
    samples: float
    target_batch_size: float
    samples_per_s: float
    peers: int
    budget: str

    def _repr_html_(self) -> str:
        told: dict[str, object] = {
            "step of the swarm": f"{self.step:,}",
            "samples for the next step": f"{self.samples:,.0f} of {self.target_batch_size:,.0f}, "
            f"{self.own_samples:,.0f} of them here",
            "speed": f"{self.samples_per_s:,.1f} samples/s from {self.peers} peers",
        }
        return facts(
            f"SwarmOptimizer({self.optimizer})", told | ({"budget": self.budget} if self.budget else {})
        )
