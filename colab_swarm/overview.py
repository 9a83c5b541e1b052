"""What panels show of a peer, gathered from its services."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from colab_swarm.events import StepFinished
from colab_swarm.net.peers import PeerId, short
from colab_swarm.snapshot import PeerRow, SwarmSnapshot, describe
from colab_swarm.training.progress import ProgressRecord
from colab_swarm.training.settings import Services

if TYPE_CHECKING:
    from colab_swarm.training.optimizer import SwarmOptimizer

MAX_LOSSES = 1000


class Overview:
    """Makes snapshots of the peer ``name`` in the run ``run``."""

    def __init__(self, services: Services, *, run: str, name: str) -> None:
        self._services, self._run, self._name = services, run, name
        self._losses: list[tuple[int, float]] = []
        self._joined_at = time.monotonic()
        services.events.listen(self._note)

    def _note(self, event: object) -> None:
        if isinstance(event, StepFinished) and event.loss is not None:
            kept = self._losses if len(self._losses) < MAX_LOSSES else [self._losses[0], *self._losses[2:]]
            self._losses = [*kept, (event.step, event.loss)]

    def snapshot(self, optimizer: SwarmOptimizer | None, *, reached: str, left: bool) -> SwarmSnapshot:
        """One frozen record; safe from any thread."""
        peers = self._services.peers
        total = peers.statistics()
        rows: tuple[PeerRow, ...] = ()
        step, speed, target, samples = 0, 0.0, 0.0, 0.0
        if optimizer is not None:
            progress = optimizer.collaboration.progress
            rows = tuple(
                _row(peer, record, peer == peers.id) for peer, record in sorted(progress.records.items())
            )
            rows += tuple(
                PeerRow(record.name, short(peer), "assistant", 0, 0.0, 0.0, True, peer == peers.id)
                for peer, record in sorted(optimizer.collaboration.assistants.records.items())
                if peer not in progress.records
            )
            step, speed = progress.own.step, progress.samples_per_s()
            target, samples = progress.target_batch_size, sum(r.samples for r in progress.records.values())
        return SwarmSnapshot(
            run=self._run,
            me=self._name,
            reached=reached,
            state="left" if left else "training" if optimizer is not None else "joined",
            peers=(*rows, *self._linked_rows({row.id for row in rows})),
            step=step,
            samples_per_s=speed,
            target_batch_size=target,
            accumulated=samples,
            loss_history=tuple(self._losses),
            sent_bytes=total.sent_bytes,
            received_bytes=total.received_bytes,
            uptime_s=time.monotonic() - self._joined_at,
            log=tuple(map(describe, self._services.events.recent()[-8:])),
        )

    def _linked_rows(self, shown: set[str]) -> list[PeerRow]:
        """This peer and those it is linked to, without the trainers that are ``shown`` already."""
        peers = self._services.peers
        others = (short(peer) for peer in sorted(peers.linked()))
        rows = [
            PeerRow(self._name, short(peers.id), "peer", 0, 0.0, 0.0, bool(peers.contact.addresses), True)
        ]
        rows += [PeerRow(f"peer-{peer}", peer, "peer", 0, 0.0, 0.0, None, False) for peer in others]
        return [row for row in rows if row.id not in shown]


def _row(peer: PeerId, record: ProgressRecord, me: bool) -> PeerRow:
    return PeerRow(
        name=record.name,
        id=short(peer),
        role="catching up" if record.syncing else "trainer",
        step=record.step,
        samples_per_s=record.samples_per_s,
        samples=record.samples,
        reachable=bool(record.addresses),
        me=me,
    )
