"""A run in a bucket: its rounds are objects, so no two peers need to be online together. See README.md here."""

from collections.abc import Callable
from functools import partial
from typing import Any

from colab_swarm.errors import require
from colab_swarm.events import Notice
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.mailbox.bucket_rounds import BucketRounds
from colab_swarm.mailbox.journal import Statements
from colab_swarm.runtime import Runner
from colab_swarm.training.communication import Communication, elected_agreement, options_by
from colab_swarm.training.link_rounds import LinkRounds
from colab_swarm.training.records import read_participants
from colab_swarm.training.rounds import Rounds
from colab_swarm.training.settings import PeerServices, TrainingSettings


def rounds_for(services: PeerServices, settings: TrainingSettings) -> Callable[..., Rounds]:
    """Return what makes a trainer's rounds: over links, or in the bucket of these services."""
    if not services.mailbox:
        return LinkRounds
    return partial(BucketRounds, Bucket(services.mailbox, settings.prefix))


def options_for(
    communication: Communication | str | None, runtime: Runner, services: PeerServices, prefix: str
) -> dict[str, Any]:
    """Return the options of a plan or, for "auto", those that the peers of this model have agreed on.

    They did so by their records, or by the bucket's card, which `Swarm.optimizer` checks later. Call
    it from the user's thread, as it may need secrets. Raises ValueError if there is nothing to adopt.
    """
    if communication is None or isinstance(communication, Communication):
        return {} if communication is None else communication.options
    how = "pass 'auto', or swarm.plan(model, step_s=…)"
    require(communication == "auto", f"communication={communication!r:.40}: {how}")
    if services.mailbox:
        statements = Statements(Bucket(services.mailbox, prefix), prefix, services.peers.role_by)
        card = runtime.call(statements.card())
        agreement = () if card is None else card.agreement
    else:
        trainers, *_ = runtime.call(read_participants(services.dht, prefix))
        agreement = elected_agreement(trainers)
    options = options_by(agreement)
    adopted = ", ".join([f"{name}={value}" for name, value in options.items()])
    services.events.emit(Notice(runtime.time(), f"adopted from the others: {adopted or 'the defaults'}"))
    return options
