"""The README's curves, drawn again: ``python -m tests.readme.proof`` (or ``make picture``).

One peer alone, and four peers that lose one, learn the digits on the same simulated home lines. The PNG holds its
points as text, so a test can compare them with new ones.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits

import colab_swarm as cs

PICTURE = Path(__file__).parents[2] / "tutorials" / "images" / "proof.png"
STEPS = {1: 20, 4: 50}
KILLED_AT_S = 150.0
HELD_OUT = 300
Curve = list[tuple[float, float]]


def learn(swarm: cs.Swarm, steps: int, now: Callable[[], float]) -> Curve:
    """Train for ``steps`` and return seconds and held-out loss after each."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images, loss_of = images.float() / 16, torch.nn.functional.cross_entropy
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = swarm.optimizer(adam, target_batch_size=256, model=model)
    rng = torch.Generator().manual_seed(swarm.id[0])
    curve: Curve = []
    while optimizer.global_step < steps:
        chosen = torch.randint(HELD_OUT, len(images), (32,), generator=rng)
        loss = loss_of(model(images[chosen]), labels[chosen])
        loss.backward()
        if optimizer.step(samples=32, loss=loss):
            with torch.no_grad():
                held_out = loss_of(model(images[:HELD_OUT]), labels[:HELD_OUT])
            curve.append((round(now(), 1), round(held_out.item(), 4)))
    return curve


def curves() -> dict[str, Curve]:
    found = {}
    for peers, steps in STEPS.items():
        with cs.simulate(peers=peers) as simulation:
            if peers > 1:
                simulation.network.at(KILLED_AT_S).crash("dave")
            run = simulation.run(partial(learn, steps=steps, now=lambda: simulation.time))
            assert len(run) == max(1, peers - 1), "dave was to be killed"
        found[f"{peers}"] = run["alice"]
    return found


def draw(found: dict[str, Curve], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="virtual time (s)", ylabel="held-out loss")
    for peers, colour in zip(found, ("#6b7785", "#0b6bcb"), strict=True):
        label = "one peer alone" if peers == "1" else f"{peers} peers, one is killed"
        axes.plot(*zip(*found[peers], strict=True), "o-", markersize=3, color=colour, label=label)
    axes.axvline(KILLED_AT_S, color="#c4432b", linestyle=":")
    axes.annotate("dave is killed", (KILLED_AT_S + 4, axes.get_ylim()[1] * 0.85), color="#c4432b")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Comment": json.dumps(found), "Software": None})


if __name__ == "__main__":
    draw(curves(), PICTURE)
