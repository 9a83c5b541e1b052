"""What a bucket was told, from its objects: the rounds, and how often each contribution counted."""

from collections.abc import Iterable

from colab_swarm.mailbox.objects import PLACE, RoundManifest, content_digest, unseal
from colab_swarm.net.peers import PeerId

Contribution = tuple[PeerId, int]  # a member, and the round


def rounds_of(objects: Iterable[tuple[str, bytes]]) -> tuple[list[RoundManifest], set[Contribution]]:
    """Return the manifests in order, and all contributions; asserts that the rounds follow each other.

    Objects are in the order of their writing; each contribution is listed once at most.
    """
    manifests, digests, written = list[RoundManifest](), list[bytes](), set[Contribution]()
    for path, data in objects:
        if (place := PLACE.search(path)) is None:
            continue
        if place[2]:
            written.add((PeerId(bytes.fromhex(place[2])), int(place[1])))
        else:
            manifests.append(unseal(data, RoundManifest)[0])
            digests.append(content_digest(data))
    assert [one.round for one in manifests] == list(
        range(manifests[0].round, manifests[0].round + len(manifests))
    )
    assert [one.base for one in manifests[1:]] == digests[:-1]
    listed = [(entry.member, entry.round) for one in manifests for entry in one.entries]
    assert len(listed) == len(set(listed)) and set(listed) <= written
    return manifests, written - set(listed)
