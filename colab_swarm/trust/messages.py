"""What peers, members or not yet, say about memberships."""

from __future__ import annotations

from typing import Annotated

import msgspec

from colab_swarm.net.hello import MAX_MEMBERSHIP_BYTES
from colab_swarm.net.peers import Message, Role

Shown = Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]


class RequestMembership(Message, frozen=True):
    """To the authority: give me a membership, or a fresh one.

    Attributes:
        proof: a membership of mine: under an invitation's grant, or an earlier one by the authority.
        token: of my Hugging Face account, where the run asks for one.
    """

    proof: Shown
    token: Annotated[str, msgspec.Meta(max_length=512)] = ""

    def __repr__(self) -> str:
        return f"RequestMembership({len(self.proof)} bytes, {'a' if self.token else 'no'} token)"


class IssuedMembership(Message, frozen=True):
    """The authority's answer."""

    membership: Shown


class PresentMembership(Message, frozen=True):
    """To a linked peer: this is my membership from now on."""

    membership: Shown


class Presented(Message, frozen=True):
    """The role it gives at this peer."""

    role: Role


class ShareRevoked(Message, frozen=True):
    """Both ways: I know the authority's list of this version; here it is if I think that you do not."""

    version: int
    revocations: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""
