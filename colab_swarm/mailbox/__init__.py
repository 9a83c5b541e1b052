"""A run in a bucket: rounds without anybody online."""

from collections.abc import Callable
from functools import partial
from typing import Any

from colab_swarm.errors import require
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.mailbox.collaboration import MailboxCollaboration
from colab_swarm.mailbox.journal import open_statement
from colab_swarm.mailbox.rounds import CARD, Card
from colab_swarm.training.collaboration import Collaboration
from colab_swarm.training.communication import Communication, elected_agreement, options_by
from colab_swarm.training.part import TrainingPart
from colab_swarm.training.progress import read_participants
from colab_swarm.training.settings import PeerServices, TrainingSettings


def part_for(services: PeerServices, settings: TrainingSettings) -> Callable[..., TrainingPart]:
    """Return what makes a trainer's part in the run: over links, or in the bucket of these services."""
    if not services.mailbox:
        return Collaboration
    return partial(MailboxCollaboration, Bucket(services.mailbox, settings.prefix))


async def options_for(
    communication: Communication | str | None, services: PeerServices, prefix: str
) -> dict[str, Any]:
    """Return the options that communicate by a plan or, for "auto", as the peers of this model have agreed.

    They did so by their records, or by the bucket's card. Raises ValueError if there is nothing to adopt.
    """
    if communication is None or isinstance(communication, Communication):
        return {} if communication is None else communication.options
    how = "pass 'auto', or swarm.plan(model, step_s=…)"
    require(communication == "auto", f"communication={communication!r:.40}: {how}")
    if not services.mailbox:
        return options_by(elected_agreement((await read_participants(services.dht, prefix))[0]))
    bucket = Bucket(services.mailbox, prefix)
    data = await bucket.read(CARD)
    return options_by(open_statement(services, prefix, data, Card, bucket.now())[0].agreement if data else ())
