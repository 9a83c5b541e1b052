"""The line that lets volunteers in: the coordinator's address, and behind ``#`` what an invitation holds.

    https://example.org/#NAME.PAYLOAD

In a browser it opens the status page; what stands behind the ``#`` never reaches the server.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from colab_swarm.access import Entrance
from colab_swarm.errors import InviteError
from colab_swarm.invite import PROJECT_URL, Invite
from colab_swarm.net.addresses import host_of, is_local
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Grant, Membership
from colab_swarm.net.peers import Role
from colab_swarm.trust.authority import AuthoritySettings
from colab_swarm.widgets.invitation import Invitation
from colab_swarm.workunits.tokens import Signs, Token

LOCAL_ONLY = (
    "Only volunteers in the same local network can use this link, because the coordinator's address is private: "
    "give it a public one by tunnel='cloudflared' or tunnel='ngrok'."
)


@dataclass(frozen=True)
class WorkLink:
    """What a link says: where the coordinator is, and the invitation to its run."""

    url: str
    invite: Invite

    @classmethod
    def issue(cls, url: str, entrance: Entrance, identity: Signs, *, hours: float) -> WorkLink:
        """A new one, by the authority of the run, good for ``hours``."""
        until = time.time() + 3600 * hours
        if entrance.closed is None:
            return cls(url, Invite(entrance.run_id, (), until))
        secret = os.urandom(32)
        key, member_until = Identity(secret).public_key, until + AuthoritySettings.member_s
        grant = Grant(entrance.run_id, Role.WORKER, key, until, member_until).signed(identity.sign)
        invite = Invite.issue(grant, secret, (), access="invite", authority=identity.public_key)
        return cls(url, invite)

    @classmethod
    def parse(cls, text: str) -> WorkLink:
        """Read a link.

        Raises:
            InviteError: it is no link to a coordinator, or is mistyped, tampered with or expired.
        """
        url = text.strip().strip("'\"").partition("#")[0]
        if url.startswith(PROJECT_URL):
            raise InviteError(
                "this invites to a swarm, not to a coordinator: swarm = cs.join(link), then swarm.volunteer()"
            )
        if not url.startswith(("http://", "https://")) or "#" not in text:
            raise InviteError("this is no link to a coordinator: it looks like https://HOST/#NAME.PAYLOAD")
        return cls(url, Invite.parse(text))

    @property
    def authority(self) -> bytes | None:
        """Public key of the run's authority; None where everybody may join."""
        return None if self.invite.access == "open" else self.invite.authority

    def token(self, identity: Identity) -> Token:
        """What lets the peer with this key in.

        Raises:
            InviteError: the organizer has to be asked first.
        """
        grant = self.invite.grant
        if grant is None:
            return Token(identity)
        if not grant.offline:
            raise InviteError(
                "the organizer wants to admit each peer of this run: swarm = cs.join(invitation), "
                "then swarm.volunteer(link)"
            )
        membership = Membership.by_invitation(
            grant, self.invite.key, key=identity.public_key, now=time.time()
        )
        return Token(identity, membership.encode())

    def shown(self) -> Invitation:
        """As people meet it."""
        name, expires_at = self.invite.name, self.invite.expires_at
        return Invitation(
            str(self),
            run=name,
            role="volunteer",
            expires_at=expires_at,
            purpose="volunteer",
            warning=LOCAL_ONLY if is_local(host_of(self.url)) else "",
        )

    def __str__(self) -> str:
        return f"{self.url}#{str(self.invite).partition('#')[2]}"

    def __repr__(self) -> str:
        return f"WorkLink({self.url}, {self.invite.name})"
