"""The exception tree. A mistake in your call raises immediately; a fault of another peer becomes part of a result.

Each docstring gives the cause after ``Cause:`` and what to do after ``Fix:``. `cs.explain` shows both.

SwarmError
├── PeerError             a failure of a peer or the network; services catch it, users rarely see it
│   ├── PeerUnreachable   no known address of the peer answered
│   ├── PeerLost          the link broke, or the stream was reset, before the exchange was over
│   ├── PeerTimeout       the peer did not answer in time (also a TimeoutError)
│   ├── WrongPeer         another peer answered at the peer's address
│   ├── NotAdmitted       a peer of the run, but without a valid membership
│   ├── CallRefused       the peer answered with an error: unknown message, limit, refusal, fault in its handler
│   ├── ExpertError       an expert did not answer, or its answer is unusable
│   └── ProtocolError     the peer broke the protocol: garbled, oversized, replayed or undecodable bytes
├── InviteError           the invitation is mistyped, expired, tampered with or of another version
├── JoinError             no peer named in the invitation could be reached, or its mailbox lacks the run
│   └── TokenNotSent      the run asks for your Hugging Face token, and you did not agree to send it
├── TermsError            the platform's terms may forbid this, and they were not accepted
├── SecretError           a token or password is missing
├── TunnelError           a tunnel could not be opened
├── PortError             a port of this machine is taken (also an OSError)
├── HostError             another process of this peer's host died, failed or fell out of step
├── NoExpertsError        no expert of the prefix is alive, or none answered
├── MismatchError         this peer's model or settings differ from those of the swarm
├── BucketError           the bucket of a run cannot be used, or refuses this peer
│   └── BucketAway        the bucket does not answer now
├── StepError             optimizer.step() lacks the gradient, a number or a name (also a ValueError)
├── StoreError            the store of a job of work units cannot be opened or used
└── StateError            a checkpoint or a peer's training state cannot be used
"""

import sys
import traceback

HIDDEN = {"IPython", "ipykernel", "colab_swarm", *sys.stdlib_module_names}
"""Packages whose lines a notebook leaves out of a traceback."""


def require(condition: object, problem: str, kind: type[Exception] = ValueError) -> None:
    """Raise ``kind(problem)`` unless ``condition`` is true."""
    if not condition:
        raise kind(problem)


class SwarmError(Exception):
    """Base of this package's errors, except a plain ValueError or TypeError for a wrong argument.

    Cause: something that the package needs is missing or wrong; the text of the error names it.
    Fix: follow the text. If it does not help, run cs.doctor() and look for a line that is not green.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the error's text, the lines of your code, and where the package raised it."""
        frames = list(traceback.walk_tb(self.__traceback__))
        rooms = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
        yours = [frame for frame, room in zip(frames, rooms, strict=True) if room not in HIDDEN]
        shown = [f"{type(self).__name__}: {self}", "", *traceback.StackSummary.extract(iter(yours)).format()]
        if rooms and rooms[-1] == "colab_swarm":
            frame, line = frames[-1]
            shown.append(f"raised in {frame.f_globals['__name__']}, line {line}; cs.explain() says more")
        return [line.rstrip("\n") for line in shown]


class PeerError(SwarmError, ConnectionError):
    """A peer or the network failed; the text names the peer and what happened.

    Cause: another peer left, is slow or misbehaves, or the network between you and it is broken.
    Fix: usually nothing, because training continues without that peer. If it happens with every peer, run cs.doctor().
    """


class PeerUnreachable(PeerError):
    """No known address of the peer answered.

    Cause: the peer has left, or a firewall or router in front of it blocks incoming connections.
    Fix: wait: the record of a peer that has left expires within minutes. If you can reach no peer, run cs.doctor().
    A run needs one peer that accepts connections: `colab-swarm create my-run` starts one on any machine.
    """


class PeerLost(PeerError):
    """The link broke, or the stream was reset, before the exchange was over.

    Cause: the peer was closed or killed, its notebook was disconnected, or the connection broke.
    Fix: nothing: the link opens again when the peer comes back. If all links break together, run cs.doctor().
    """


class PeerTimeout(PeerError, TimeoutError):
    """The peer did not answer in time.

    Cause: the peer or the connection to it is too slow or overloaded, or the peer's laptop sleeps.
    Fix: try again. If this machine is busy, leave one of its cores free, or send less, as with communication="int8".
    """


class WrongPeer(PeerError):
    """Another peer answered at the peer's address.

    Cause: the address now belongs to another peer, for example because the peer restarted with a new key, or because
    its tunnel's address was given to another peer.
    Fix: ask for a new invitation. A peer that keeps its key (NetworkOptions(identity="peer.key")) stays the same one.
    """


class NotAdmitted(PeerError):
    """The peer has no membership of the run, or one that has expired or was revoked.

    Cause: your membership or the peer's is missing, expired or revoked. A wrong clock makes a valid one look expired.
    Fix: join again with a new invitation from the run's authority, and check this machine's date and time.

    Attributes:
        reason: ``membership`` (none is valid), ``revoked`` (the authority removed it) or ``busy`` (try again later).
    """

    def __init__(self, text: str, *, reason: str = "membership") -> None:
        super().__init__(text)
        self.reason = reason


class CallRefused(PeerError):
    """The peer answered with an error.

    Cause: the peer is too busy, does not know the message, or refuses it; the text quotes its reason.
    Fix: a busy peer answers later. If it does not know the message, update colab-swarm on both sides.

    Attributes:
        code: ``unknown`` (no such message), ``invalid`` (undecodable), ``busy`` (a limit is
            reached), ``refused`` (by the handler) or ``failed`` (a fault in the handler).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ProtocolError(PeerError):
    """The peer broke the protocol; the link is closed.

    Cause: the other side runs another version of colab-swarm, is not a peer, or is hostile.
    Fix: update colab-swarm on both sides. A single peer that breaks the protocol is left out automatically.
    """


class ExpertError(PeerError):
    """An expert did not answer, or its answer is unusable; the text names the expert and the reason.

    Cause: the expert's host left or is busy, or the expert computed values that are not finite.
    Fix: wait until a peer takes the expert over, or host it: swarm.experts.host(…). A mixture of experts continues
    with its other experts.

    Attributes:
        retry_s: seconds after which a busy host can be called again; None if the host is not busy.
    """

    def __init__(self, text: str, *, retry_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_s = retry_s


class InviteError(SwarmError, ValueError):
    """The invitation cannot be used; the text says why and what to do.

    Cause: the link was cut off when it was copied, has expired, was changed, or belongs to another version or purpose.
    Fix: copy the whole line again. If that does not help, ask the person who invited you for a new one
    (swarm.invite()).
    """


class JoinError(SwarmError, ConnectionError):
    """No peer named in the invitation could be reached; the text lists the attempts.

    Cause: those peers have stopped, or connections are blocked. On Kaggle the internet is off until you switch it on.
    Fix: ask the person who invited you whether the run still exists. If it has ended, start a new one with
    cs.create(…). If it still exists, ask for a new invitation; cs.doctor() tests this machine's network.
    """


class TokenNotSent(JoinError):
    """The run asks for your Hugging Face token, and you did not agree to send it; nothing was sent.

    Cause: the run admits only the Hugging Face accounts on its list. Its organizer needs your token to find out your
    account, and receives the whole token.
    Fix: make a token that may only read, save it as HF_TOKEN, and pass send_hf_token=True if you trust the organizer.
    """


class TermsError(SwarmError):
    """The platform's terms may forbid this, and you have not accepted them.

    Cause: this machine belongs to a platform whose free plan may not be used for such work.
    Fix: read the platform's terms. If they allow it, pass accept_terms=True. If not, cs.simulate(peers=4) shows the
    same on one machine.
    """


class SecretError(SwarmError, LookupError):
    """A token or password is missing; the text says where it was looked for and how to set it.

    Cause: the secret was not set on this platform, or this notebook may not read it.
    Fix: store it under the name in the text, never in a cell: as a secret of Colab or Kaggle (and allow this notebook
    to read it), or as an environment variable.
    """


class TunnelError(SwarmError, ConnectionError):
    """A tunnel could not be opened; the text says why and what to do.

    Cause: the tunnel's program is missing, its token is wrong, its plan is used up, or the internet is off.
    Fix: follow the text, or use no tunnel: a peer that accepts no connections can train as well.
    """


class PortError(SwarmError, OSError):
    """A port of this machine cannot be used; the text names it and says what to do.

    Cause: another program, or an earlier run of this cell, listens on that port.
    Fix: choose another port, or port=0 for a free one. Or stop the program that uses the port.
    """


class NoExpertsError(SwarmError, LookupError):
    """No expert of the prefix is alive, or none answered a batch; the text says which, and why.

    Cause: no peer hosts experts of this prefix, all their hosts have left, or your prefix or grid differs from theirs.
    Fix: compare your prefix and grid with those of the hosts, or host experts yourself: swarm.experts.host("ffn",
    make, grid=(4, 4)). If the hosts are away for a moment, try the batch again, as swarm.experts.trainer(…) does.
    """


class StepError(SwarmError, ValueError):
    """``optimizer.step()`` lacks the gradient, the number of its samples or its weight, or the name of a value.

    Cause: one of these. step() got no samples=. Or it got a value without its name, although only a closure needs no
    name. Or it got weight=, but the optimizer has no weight_unit=. Or the optimizer has a weight_unit=, so that each
    gradient needs its own weight=. Or there was no backward() since the last step(), which clears the gradients.
    Fix: for each batch: loss.backward(), then optimizer.step(samples=len(batch)). With batch_size=16 in
    swarm.optimizer(…), optimizer.step() is enough. With weight_unit="target tokens" in swarm.optimizer(…), the same
    at all peers, call optimizer.step(samples=16, weight=number), where the loss is the mean of that number of units.
    """


class StoreError(SwarmError):
    """The store of a job cannot be opened or used; the text says why and what to do.

    Cause: the store's file is on a full or read-only disk, or its server is down or refuses the password.
    Fix: follow the text, then start the coordinator again with the same folder: the job continues where it stopped.
    """


class BucketError(SwarmError):
    """The bucket of a run cannot be used, or refuses this peer; the text says why.

    Cause: the bucket's keys are missing, wrong or revoked, it has no conditional writes, or obstore is not installed.
    Fix: follow the text, then run the cell again: this peer's steps since the last round still count.
    """


class BucketAway(BucketError, ConnectionError):
    """The bucket of a run does not answer now. Training continues where it can, and tries the bucket again.

    Cause: the internet is off, the bucket's server is down, or its folder is not mounted.
    Fix: wait, or mount the folder again: nothing is lost until then.
    """


class MismatchError(SwarmError, ValueError):
    """This peer's model or settings differ from those of the swarm; the text names both values.

    Cause: the peers run different scripts: another model, frozen base, optimizer, learning rate or batch size.
    The averages of such peers would be wrong without an error.
    Fix: use the swarm's value, or pass another name=… to swarm.optimizer(…) to train a model of your own. If no peer
    with the swarm's value is alive, wait a minute until the record of that value expires.
    """


class StateError(SwarmError):
    """A checkpoint or a peer's training state cannot be used; the text says why.

    Cause: the state belongs to another model or optimizer, is damaged, or no peer could send it in time.
    Fix: build model and optimizer exactly as the other peers do, then run the cell again. A damaged checkpoint is
    skipped if there is an older one.
    """


class HostError(SwarmError):
    """Another process of this peer's host died, failed or fell out of step; the text says which one if it is known.

    Cause: one of the processes that train on this machine together ended or raised an error. Its output says why.
    Fix: find the first traceback among the processes, fix its cause, and start all of them again.
    """
