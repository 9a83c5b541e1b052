"""A volunteer's notebook hosts experts, on what takes itself for Colab; the organizer's kernel trains with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.kernel import CellFailed, Kernel, opened
from tests.notebooks.test_notebooks import COLAB

WANTED = {"prefix": "ffn", "dim": 16, "grid": "4x4"}
TRAIN = """
import torch
layer = swarm.mixture_of_experts("ffn", 16, grid=(4, 4), k=2)
for _ in range(5):
    layer(torch.randn(8, 16)).square().mean().backward()
print(sorted(layer.utilisation))
"""


def host(kernel: Kernel, invitation: str) -> None:
    """Run the volunteer's notebook until it hosts."""
    kernel.execute(COLAB)
    form = {"INVITATION": invitation, "MY_NAME": "carol", "COUNT": 3}
    kernel.run()
    with pytest.raises(CellFailed, match="accept_terms=True"):
        kernel.run(**form)
    assert "Swarm(class-of-26, carol, 1 peer linked)" in kernel.run(I_HAVE_READ_THE_TERMS=True, **form)
    kernel.run()  # the doctor
    kernel.run(**form)


@pytest.mark.slow
def test_who_hosts_from_colab_serves_the_organizers_layer_and_leaves_saves_behind(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("organizer", "carol")]
    for home in homes:
        home.mkdir()
    with opened("organizer", homes[0]) as organizer, opened("host_experts", homes[1]) as carol:
        for form in ({}, {"RUN": "class-of-26"}, {}):
            organizer.run(**form)
        invitation = organizer.execute(f"print(swarm.invite(settings={WANTED!r}))").strip()
        host(carol, invitation)
        assert "3 of 3 experts" in carol.execute("print(host)")
        assert organizer.execute(TRAIN).count("ffn.") >= 2
        shown = carol.run_all(MINUTES=0.01)
        assert "my expert" in shown[0] and "done: torch.Size" in shown[1]
    kept = homes[1] / "host"
    assert (kept / "peer.json").exists() and any(path.is_file() for path in (kept / "experts").rglob("*"))
