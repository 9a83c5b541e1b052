"""A run in which everything happens at once, as its backbone sees it."""

import math

from colab_swarm.snapshot import Checkpoint, KeptModel, PeerRow, SwarmSnapshot

NOW = 1_800_000_000.0
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank")


def view(
    *, steps: int = 2400, evil: str = EVIL, standing_in: int | None = None, run: str = "sahajbert"
) -> tuple[SwarmSnapshot, ...]:
    roles = ("trainer", "trainer", "trainer", "trainer", "catching up", "assistant", "trainer")
    shown = SwarmSnapshot(
        run=run,
        me="backbone",
        reached=f"direct {evil}",
        state="joined",
        peers=tuple(
            PeerRow(
                name,
                chr(97 + i) * 8,
                roles[i],
                2400,
                0.0,
                0.0,
                None,
                False,
                connected="direct",
                compute_samples_per_s=20.0,
            )
            for i, name in enumerate((*NAMES, evil))
        ),
        step=steps,
        samples_per_s=0.0,
        compute_samples_per_s=103.4,
        target_batch_size=0.0,
        accumulated=0.0,
        loss_history=tuple((step, _loss(step)) for step in range(0, steps, max(1, steps // 300))),
        sent_bytes=12_300_000_000,
        received_bytes=9_870_000_000,
        uptime_s=9000.0,
        log=(),
        model=evil,
        kept=KeptModel(
            tuple(Checkpoint(step, NOW - (steps - step) * 3.5, 217_000_000) for step in (0, steps)),
            standing_in,
            "neuropark/sahajBERT: Step 2000, loss 7.724 pushed",
            2,
        ),
        at=NOW,
    )
    return (shown,)


def _loss(step: int) -> float:
    return 2.0 + 9.0 * math.exp(-step / 3000) + 0.12 * math.sin(step / 23)
