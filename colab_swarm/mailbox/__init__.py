"""A run in a bucket: its rounds are objects, so no two peers need to be online together.

## The problem

Between two homes neither peer can be reached, and sessions end before the next member has time.
With local steps a peer sends a few hundred kilobytes every few minutes. That needs no link: a
bucket of an object store, or a shared folder, can carry it. All peers that train on must hold the
same parameters, whichever of them is killed at any moment.

## The idea

    alice   | local steps | put |  look  |  mean                    | local steps ...
    bob          | local steps      | put | close |  mean           | local steps ...
                        |  contribution      |  manifest
                        v                    v
    bucket   rounds/00000007-BASE/ALICE, .../BOB, .../manifest-00      states/00000016
                                                  |                         |
    carol    (two days later)                     '--- 16, 17, 18 ... ------'--->  the same parameters

Each peer takes local steps and writes its *contribution*: its pseudo-gradient, compressed and
signed. A *manifest* closes the round. It lists the contributions that count, with their digests,
weights and scales. The bucket keeps the first of two writes (conditional create), so the first
manifest stands. All peers apply the mean ``sum w_i s_i v_i / sum w_i``, in the manifest's order, in
float32: they hold equal bits. No peer is a server: the first contributor that finds the round due
closes it. A late joiner reads the newest state and applies the means since then.

## Objects

The creator of a run writes ``runs/RUN/created/first``. Where that is missing, the run is not: a
peer that joins or resumes is refused, so no history begins anew in a folder that is not mounted.
All other objects are below ``runs/RUN/MODEL/``. Each but a check is a signed statement with its
writer's membership, as msgpack after ``colab_swarm``, the protocol's version in a byte, and its
length in 4 bytes. Values follow it; the statement has their BLAKE3 digest. They are not encrypted.

| path | type | content |
|---|---|---|
| `card/first` | `Card` | what the peers agree on: the model's layout, optimizer, compression |
| `rounds/ROUND-BASE/MEMBER` | `PseudoGradient` | weight, samples, speed, time, name, loss; values |
| `rounds/ROUND-BASE/manifest-ATTEMPT` | `RoundManifest` | entries; the manifest before |
| `rounds/ROUND-BASE/MEMBER-left` | `Farewell` | no round need wait for the member any more |
| `states/ROUND` | `StateHead` | the state before this round; the chain's last digests |
| `checks/RANDOM` | | written twice at the start: does the store keep the first? |

BASE is the digest of the manifest before. So manifests are a chain, and a contribution belongs to
one branch of it. Another member may have written to a place: then a card, contribution or state
goes to the same path with a suffix. Readers take the first one that counts.

## States of a trainer

    syncing --state, means since--> training --contribution--> waiting --manifest that lists it--> training
       ^                              ^                          |  |
       |                              '--not listed after three--'  |
       '------ others went on, and this peer cannot follow them ----'

A peer's part of the samples follows from its speed beside that of the last round's other members,
so all end about the same time. With ``overlap=True`` the waiting peer computes on.

## Rules

What a peer does next is in `view`, which manifest stands in `branches`, and these are the numbers.

- **A round closes** at once when no member of the last round is missing, but those that said
  farewell. With more than half of them it closes after a usual round, half a grace and this peer's
  patience with those that are missing. With fewer it closes two usual rounds and a grace after the
  last manifest. The usual time is the median of what the last round's contributors needed, with
  their uploads: 1 s to 6 h, not more than that round took, but at least a quarter of the one before.
  The grace is a quarter of it, 6 s to 90 s. A peer that waits half a grace beyond the usual time
  says for whom (`Notice`).
- **Patience** (`colab_swarm.net.patience`). A round waits half a usual round longer for a missing
  member, after its first round 2.5 s at least; for a new one it does not. A member that made a round
  wait, or whose manifest could not be followed, is left out (`Waited`): the next round does not wait
  for it, then two do not, then four. A contribution that counts in time ends that.
- **The store's clock counts**, not a peer's: a peer asks for it as it joins, and says by how much
  the clock of its machine is off. In a folder a writer chooses the times of its files. There an
  object's time lies between a peer's last look without it and its first look with it.
- **Exactly once.** A contribution counts in its own round or in one of the two following, in one
  manifest at most, and a manifest lists a member once. A peer that is not listed follows the means
  meanwhile. After the third, it drops its contribution (`BatchDropped`).
- **No member weighs** more than the median one, and longer contributions are scaled down to the
  median length. In a run of two members, one may weigh 16 times as much as the other, and be 4
  times as long.
- **A manifest that cannot be followed** is awaited for two thirds of the grace at most, from its own
  time on; more of them cost no more. A peer that is left without most members goes over to a later
  manifest.
- **States.** The writer of every sixteenth manifest saves the state after it. A peer that saves a
  state deletes what is older than the last one that it wrote or read itself: those of others may be
  false. It is enough that the keys of one member can delete.
- **A state moves nobody that can follow the rounds.** A peer that loads one takes that to whose
  round most members contributed; and another one if that does not load, or leads to other
  parameters than most members have. Of its chain only the digests count.

## Failures

- *A peer is killed.* Its local steps since its last contribution are lost. The contribution counts
  if a manifest lists it within two more rounds. `swarm.leave(hand_over_s=60)` writes one with what
  is left.
- *Members stay away* without a farewell. The next round waits for them once, and later ones do not.
- *An object is damaged, too large or forged.* It does not count, and a `Fault` event names it.
- *A contribution is deleted* before a manifest lists it. Its author says so (`Notice`) and writes it
  again.
- *The bucket does not answer*, or a call into the folder does not return for 30 s. A `Fault` event
  says so, and it is asked again until it does. With ``overlap=True`` local steps go on meanwhile.
  `Swarm.optimizer` raises `BucketAway`.
- *The bucket refuses a peer.* Its keys are wrong or revoked: the trainer's next call raises
  `BucketError`.
- *The store has no conditional writes.* `Swarm.optimizer` raises `BucketError`.

**Security.** A member cannot write in another's name, and cannot count twice in a round. One that
only adds objects neither stops nor moves the others. `colab_swarm.trust` says what one member can
still do. But:

- Members can do what their keys can. Give keys that cannot delete, or use a bucket for the run
  alone.
- A minority may contribute plausible false gradients. Each has the weight and length of the median
  member.
- A false state on the true chain may be a late joiner's first one: it finds out within ten rounds.
- One invitation admits many identities, which can outvote others.
- `swarm.remove_peer` removes nobody here: change the keys.
- The store's owner can read the model.

An address may name only an ``endpoint`` and a ``region``, and never keys. The creator of the run
signs it, and a guest confirms a folder and a foreign endpoint: see `address`.

**Limits.** ``local_steps`` must be a number over 1. ``compression="adaptive"`` is refused, and so
are allowlists. Experts and the leaderboard need links. A manifest lists 256 contributions at most.

## How to use it

    swarm = cs.create("run", mailbox="s3://bucket/folder?endpoint=https://…", state_dir="folder")
    print(swarm.invite())                       # has the address but no keys; valid for 30 days
    # a friend, any time later; only an address with an endpoint, or a folder, needs mailbox=
    swarm = cs.join("swarm://run.…", mailbox="s3://bucket/folder?endpoint=https://…")
    optimizer = swarm.optimizer(adam, target_batch_size=256, local_steps=30, compression="sparseloco")
    cs.simulate(3, mailbox=True)                # in virtual time; simulation.bucket.objects are the objects

In a shell, `colab-swarm create run --mailbox s3://bucket/folder` prints an invitation and ends.
`colab-swarm join INVITATION --local-steps 30 --compression sparseloco` trains.

| store | address | secrets |
|---|---|---|
| S3, R2, MinIO | `s3://bucket/folder?endpoint=…&region=…` | `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` |
| Google | `gs://bucket/folder` | `GOOGLE_SERVICE_ACCOUNT_KEY` |
| Azure | `az://container/folder` | `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY` |
| a shared folder | `file:///mnt/folder` | |

Secrets are environment variables, or secrets of Colab or Kaggle. Tutorial 12 trains in a folder,
and shows keys that can get, put and list objects below one folder, but delete none.

## The papers

DiLoCo, [arXiv 2311.08105](https://arxiv.org/abs/2311.08105), has the local and outer steps.
SparseLoCo, [arXiv 2508.15706](https://arxiv.org/abs/2508.15706), has the error feedback
(`colab_swarm.tensors`); its authors exchange pseudo-gradients through object storage, too.

## Measured

In virtual time, two peers with rounds of 90 s make about 8 requests a round each. With sparseloco a
contribution has 14 bits for every 64th value, and up to 700 bytes of signature and membership: 12 MB
for a model of 440 M parameters. Four peers that contribute 1 MB each to a local S3 server end a
round 0.6 s after the last of them at most, with 9 requests a peer: `python -m tests.benchmarks mailbox`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from colab_swarm.errors import require
from colab_swarm.events import Notice
from colab_swarm.mailbox.bucket import Bucket
from colab_swarm.mailbox.bucket_rounds import BucketRounds
from colab_swarm.mailbox.reader import Statements
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
        card = runtime.call(statements.first_card(lambda place, fault: None))
        agreement = () if card is None else card.agreement
    else:
        trainers, *_ = runtime.call(read_participants(services.dht, prefix))
        agreement = elected_agreement(trainers)
    options = options_by(agreement)
    adopted = ", ".join([f"{name}={value}" for name, value in options.items()])
    services.events.emit(Notice(runtime.time(), f"adopted from the others: {adopted or 'the defaults'}"))
    return options
