"""A run in a bucket: its rounds are objects, so no two peers need to be online together. See README.md here.

A *bucket* is a bucket of an object store (S3, Google, Azure) or a shared folder.
"""

from collections.abc import Callable
from functools import partial

from colab_swarm.events import Notice
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.mailbox.bucket_rounds import BucketRounds
from colab_swarm.mailbox.journal import Statements
from colab_swarm.runtime import Runner
from colab_swarm.training.communication import (
    PRESETS,
    Communication,
    Plan,
    communication_by,
    elected_agreement,
)
from colab_swarm.training.link_rounds import LinkRounds
from colab_swarm.training.records import read_participants
from colab_swarm.training.rounds import Rounds
from colab_swarm.training.settings import PeerServices, TrainingSettings


def rounds_for(services: PeerServices, settings: TrainingSettings) -> Callable[..., Rounds]:
    """Return the function that makes a trainer's rounds, in the bucket of these services or over links."""
    if not services.mailbox:
        return LinkRounds
    return partial(BucketRounds, Bucket(services.mailbox, settings.prefix))


def communication_for(
    choice: Communication | Plan | str, runtime: Runner, services: PeerServices, prefix: str
) -> Communication:
    """Return how to communicate, for a user's ``choice``.

    For "auto", return the way on which the peers of this model have agreed, or else the usual way in this kind of run.
    The agreement is in the peers' records or in the bucket's card, and `Swarm.optimizer` checks it later. Call this
    function from the user's thread, because it may need secrets. Raises ValueError if ``choice`` is unknown.
    """
    if choice != "auto":
        return Communication.of(choice)
    if services.mailbox:
        statements = Statements(Bucket(services.mailbox, prefix), prefix, services.peers.role_by)
        card = runtime.call(statements.card())
        agreement = () if card is None else card.agreement
    else:
        trainers, *_ = runtime.call(read_participants(services.dht, prefix))
        agreement = elected_agreement(trainers)
    if agreement:
        communication = communication_by(agreement)
        services.events.emit(Notice(runtime.time(), f"adopted from the others: {communication}"))
        return communication
    communication = PRESETS["sparseloco" if services.mailbox else "synchronous"]
    services.events.emit(
        Notice(runtime.time(), f"nobody trains this model yet: it begins with {communication}")
    )
    return communication
