"""The exception tree. The user's own mistake raises at once; a peer's fault becomes a result.

What each means and what to do is in its docstring, after ``Cause:`` and ``Fix:``; `cs.explain` shows it.

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
    """Any error of this package that is not a plain ValueError or TypeError of the caller.

    Cause: something that the package needs is not as it should be; the text of the error says what.

    Fix: do what the text says. If it says nothing of use, run cs.doctor() and see which line is not green.
    """


class PeerError(SwarmError, ConnectionError):
    """A peer or the network failed; the text names the peer and what happened.

    Cause: another peer left, is slow or misbehaves, or the network between you and it is broken.

    Fix: training goes on without that peer, so most often there is nothing to do. If it happens with every peer,
    run cs.doctor(): then it is your own network.
    """


class PeerUnreachable(PeerError):
    """No known address of the peer answered.

    Cause: the peer is gone, or neither a firewall nor a router lets anybody in where it runs.

    Fix: wait, its record disappears within minutes if it is gone. If nobody can be reached, run cs.doctor(); a run
    needs one peer that accepts connections, which `colab-swarm backbone` starts on any machine.
    """


class PeerLost(PeerError):
    """The link broke, or the stream was reset, before the talk was over.

    Cause: the peer was closed or killed, its notebook was disconnected, or the connection broke.

    Fix: nothing, the peer is linked again when it comes back. If all links break at once, look at your own
    connection: cs.doctor().
    """


class PeerTimeout(PeerError, TimeoutError):
    """The peer did not answer in time.

    Cause: the peer or the line to it is too slow or overloaded; a laptop that sleeps looks the same.

    Fix: try again. If it is this machine that is busy, leave it a core, or send less: a smaller codec such as
    codec="int8".
    """


class WrongPeer(PeerError):
    """Somebody else answered at the peer's address.

    Cause: the address has gone to another peer, such as one that was restarted with a new key or a recycled tunnel.

    Fix: ask for a new invitation. A peer that keeps its key (PeerOptions(identity="peer.key")) stays the same one.
    """


class NotAdmitted(PeerError):
    """The peer has no membership of the run, or one that has expired or was revoked.

    Cause: the run takes members only, and the membership of one of the two peers is missing, over or withdrawn; a
    wrong clock makes a good one look like that.

    Fix: join again with a new invitation from the run's authority, and check this machine's date and time.

    Attributes:
        reason: ``membership`` (none is valid), ``revoked`` (the authority removed it) or ``busy`` (try again later).
    """

    def __init__(self, text: str, *, reason: str = "membership") -> None:
        super().__init__(text)
        self.reason = reason


class CallRefused(PeerError):
    """The peer answered with an error.

    Cause: the peer is too busy, does not know what it was asked for, or does not want to; its own words are in the
    text.

    Fix: a busy peer answers later. If the message is unknown to it, update colab-swarm on both sides.

    Attributes:
        code: ``unknown`` (no such message), ``invalid`` (undecodable), ``busy`` (a limit is reached),
            ``refused`` (the handler said no) or ``failed`` (the handler has a fault).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ProtocolError(PeerError):
    """The peer broke the protocol; the link is closed.

    Cause: the other side runs another version of colab-swarm, is no peer at all, or means harm.

    Fix: update colab-swarm on both sides. A single peer that does it is left out by itself.
    """


class ExpertError(PeerError):
    """An expert did not answer, or answered what cannot be used; the text names it and says why.

    Cause: the expert's host is gone or busy, or the expert computed values that are not finite.

    Fix: a mixture of experts goes on with those that answer. For one named expert, wait until a peer takes it over, or
    host it: swarm.host_experts(…).

    Attributes:
        retry_s: a busy host's hint when to ask again; None if it is not busy.
    """

    def __init__(self, text: str, *, retry_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_s = retry_s


class InviteError(SwarmError, ValueError):
    """The invitation cannot be used; the text says why and what to do.

    Cause: the link was cut off when it was copied, has expired, was changed, or belongs to another version or purpose.

    Fix: copy the whole https://…#… line again; if that does not help, ask whoever invited you for a new one, which
    swarm.invite() makes.
    """


class JoinError(SwarmError, ConnectionError):
    """No peer named in the invitation could be reached; the text says what was tried.

    Cause: the peers of the invitation have stopped, or no connection to them gets through; on Kaggle the internet is
    off until it is switched on in the notebook's settings.

    Fix: ask whether the run is still on, and for a new invitation. If it is, cs.doctor() tells what this machine's
    network lets through.
    """


class TermsError(SwarmError):
    """The platform's terms may forbid this, and the user has not said to have read them.

    Cause: this machine belongs to a platform whose free plan may not be used for such work.

    Fix: read the platform's terms. If they allow it, say accept_terms=True; if not, cs.simulate(peers=4)
    shows the same in one notebook.
    """


class SecretError(SwarmError, LookupError):
    """A token or password is needed and was found nowhere; the text says where it was sought and how to set it.

    Cause: the secret was not set on this platform, or this notebook was not given access to it.

    Fix: store it under the name in the text: as a secret of Colab or Kaggle (and let this notebook see it), or as an
    environment variable. Never write it into a cell.
    """


class TunnelError(SwarmError, ConnectionError):
    """A tunnel could not be opened; the text says why and what to do.

    Cause: the tunnel's agent is missing, its token is wrong or its plan used up, or the internet is off.

    Fix: do what the text says, or go without a tunnel: a peer that only dials out trains like any other.
    """


class NoExpertsError(SwarmError, LookupError):
    """No expert of the prefix is alive; the text says how many were ever seen, and when.

    Cause: nobody hosts experts of this name, all their hosts have left, or prefix or grid are not those of the hosts.

    Fix: compare prefix and grid with the hosts', or host some: swarm.host_experts("ffn", make, grid=(4, 4)).
    """


class StoreError(SwarmError):
    """The store of a job cannot be opened or used; the text says why and what to do.

    Cause: the store's file is on a full or read-only disk, or its server is down or refuses the password.

    Fix: do what the text says, then coordinate with the same folder: the job goes on where it was.
    """


class StateError(SwarmError):
    """A checkpoint or a peer's training state cannot be used; the text says why.

    Cause: the state is of another model or optimizer, damaged, or nobody could give it before the time was over.

    Fix: build model and optimizer exactly as the swarm's organizer does, then run the cell again. A damaged checkpoint
    is passed over if there is an older one.
    """


class HostError(SwarmError):
    """Another process of this peer's host died, failed or fell out of step; the text says which if it is known.

    Cause: one of the processes that train on this machine together ended or raised; its own output tells why.

    Fix: look for the first traceback among the processes, mend that, and start all of them again.
    """
