"""The exception tree. The user's own mistake raises at once; a peer's fault becomes a result.

SwarmError
├── PeerError             something a peer or the network did; services catch it, users rarely see it
│   ├── PeerUnreachable   no known address of the peer answered
│   ├── PeerLost          the link broke, or the stream was reset, before the talk was over
│   ├── PeerTimeout       the peer did not answer in time (also a TimeoutError)
│   ├── WrongPeer         somebody else answered at the peer's address
│   ├── NotAdmitted       a peer of the run, but without a valid membership
│   ├── CallRefused       the peer answered with an error: unknown message, limit, refusal, fault in its handler
│   ├── ExpertError       an expert did not answer, or answered what cannot be used
│   └── ProtocolError     the peer broke the protocol: garbled, oversized, replayed or undecodable bytes
├── InviteError           the invitation is mistyped, expired, tampered with or of another version
├── JoinError             no peer named in the invitation could be reached
├── TermsError            the platform's terms may forbid what was asked for, and nobody said to have read them
├── SecretError           a token or password is needed and was found nowhere
├── TunnelError           a tunnel could not be opened
├── HostError             another process of this peer's host died, failed or fell out of step
├── NoExpertsError        no expert of the prefix is alive
├── StoreError            the store of a job of work units cannot be opened or used
└── StateError            a checkpoint or a peer's training state cannot be used
"""

from __future__ import annotations


class SwarmError(Exception):
    """Any error of this package that is not a plain ValueError or TypeError of the caller."""


class PeerError(SwarmError, ConnectionError):
    """A peer or the network failed; the text names the peer and what happened."""


class PeerUnreachable(PeerError):
    """No known address of the peer answered."""


class PeerLost(PeerError):
    """The link broke, or the stream was reset, before the talk was over."""


class PeerTimeout(PeerError, TimeoutError):
    """The peer did not answer in time."""


class WrongPeer(PeerError):
    """Somebody else answered at the peer's address."""


class NotAdmitted(PeerError):
    """The peer has no membership of the run, or one that has expired or was revoked."""


class CallRefused(PeerError):
    """The peer answered with an error.

    Attributes:
        code: ``unknown`` (no such message), ``invalid`` (undecodable), ``busy`` (a limit is reached),
            ``refused`` (the handler said no) or ``failed`` (the handler has a fault).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ProtocolError(PeerError):
    """The peer broke the protocol; the link is closed."""


class ExpertError(PeerError):
    """An expert did not answer, or answered what cannot be used; the text names it and says why.

    Attributes:
        retry_s: a busy host's hint when to ask again; None if it is not busy.
    """

    def __init__(self, text: str, *, retry_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_s = retry_s


class InviteError(SwarmError, ValueError):
    """The invitation cannot be used; the text says why and what to do."""


class JoinError(SwarmError, ConnectionError):
    """No peer named in the invitation could be reached; the text says what was tried."""


class TermsError(SwarmError):
    """The platform's terms may forbid this, and the user has not said to have read them."""


class SecretError(SwarmError, LookupError):
    """A token or password is needed and was found nowhere; the text says where it was sought and how to set it."""


class TunnelError(SwarmError, ConnectionError):
    """A tunnel could not be opened; the text says why and what to do."""


class NoExpertsError(SwarmError, LookupError):
    """No expert of the prefix is alive; the text says how many were ever seen, and when."""


class StoreError(SwarmError):
    """The store of a job cannot be opened or used; the text says why and what to do."""


class StateError(SwarmError):
    """A checkpoint or a peer's training state cannot be used; the text says why."""


class HostError(SwarmError):
    """Another process of this peer's host died, failed or fell out of step; the text says which if it is known."""
