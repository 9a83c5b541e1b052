"""A run in a bucket: rounds without anybody online."""

from collections.abc import Callable
from functools import partial

from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.mailbox.collaboration import MailboxCollaboration
from colab_swarm.training.collaboration import Collaboration
from colab_swarm.training.part import TrainingPart
from colab_swarm.training.settings import PeerServices, TrainingSettings


def part_for(services: PeerServices, settings: TrainingSettings) -> Callable[..., TrainingPart]:
    """Return what makes a trainer's part in the run: over links, or in the bucket of these services."""
    if not services.mailbox:
        return Collaboration
    return partial(MailboxCollaboration, Bucket(services.mailbox, settings.prefix))
