"""Two peers behind routers of their own and a public backbone train ALBERT-tiny, whichever way their links run."""

from typing import Any

import pytest

from tests.netlab.lab import Lab, Program, Site

STEPS = 8
TRAINER = ("--steps", STEPS, "--target-batch-size", 96, "--json-lines")


def wait_told(program: Program, event: str) -> Any:
    while (told := program.line(timeout_s=120.0))["event"] != event:
        pass
    return told


@pytest.mark.slow
@pytest.mark.ordeal
@pytest.mark.parametrize(
    ("flags", "reached"),
    [
        ((), "relayed by"),
        (("--no-listen", "--no-relays"), "outgoing only"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_both_end_with_the_same_parameters(
    flags: tuple[str, ...], reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with Lab(Site("a"), Site("b")) as lab:
        backbone = lab.python("pub", "colab_swarm.cli", "backbone", "nat", "--json-lines")
        invite = wait_told(backbone, "invite")["invite"]
        peers = [lab.python(host, "colab_swarm.cli", "peer", invite, *TRAINER, *flags) for host in "ab"]
        ends = [wait_told(peer, "finished") for peer in peers]
    assert all(end["step"] >= STEPS and end["reached"].startswith(reached) for end in ends), ends
    assert ends[0]["parameters"] == ends[1]["parameters"]
