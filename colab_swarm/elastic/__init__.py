"""Elastic consistency: peers continue before all gradients have arrived, within a measured bound.

## The problem

On a link where gradients take longer than the computation, synchronous training mostly waits. 2 to
16 peers can start the next batch before all gradients have arrived, if no peer's parameters get too
far from the correct ones. That distance is measured during training.

## The idea

    alice   |backward t|wait|backward t+1 …        every bucket of a gradient is sent as soon as backward has filled it,
    bob     |  backward t   |backward t+1 …        last layer first
                 ----buckets--->
    step t applies   1/p ( own g_t  +  received gradients  +  stand-ins for the rest  +  corrections of earlier steps )

Late gradients are applied one step late, and nothing is applied twice. Once everything has arrived,
a peer has the parameters of synchronous training. A **scheduler** decides when enough has arrived:

| scheduler | continues | bound B (Table 1) |
|---|---|---|
| `Synchronous()` (the default) | when everything has arrived | 0 |
| `NormBounded(beta)` | when a share *beta* of the own norm has arrived | (p - 1) M / p |
| `AdaptiveBeta(max_inconsistency)` | the same; beta follows the meter | (p - 1) M / p |
| `VarianceBounded(timeout_s)` | after a timeout, with the own gradient in place of missing ones | 3 sigma |
| `BoundedStaleness(tau)` | while nothing is more than *tau* steps late | (p - 1) tau M / p |
| the same, `stand_in=True` | the same, with the own gradient in place of late ones | c (p - 1) tau sigma / p |
| the same, `single_steps=True` | the same; each gradient is an update of its own | (p - 1) (tau + 1) M |
| `CrashTolerant(f, timeout_s)` | with up to *f* gradients missing | f M / p |
| the same, `stand_in=True` | the same, with the own gradient in place of missing ones | c f sigma / p |

These are rows 2 to 7 of Table 1, which has a row of its own for compression. Row 1, shared memory, is
missing. The paper gives no constant c; ours is 3 up to 5 peers (`colab_swarm.elastic.schedulers.substitution`).
Single steps are its equation 10, with a bound that we derive as it does row 2. `NormBounded` asks
every other peer for *beta*, where the paper asks for it once, of all that was received.

A peer's **view** v lacks the gradients that have not arrived. Elastic consistency (definition 1) requires ``E ||x
- v||^2 <= alpha^2 B^2``. Here x are the parameters with everything applied, alpha is the learning
rate, and M^2 and sigma^2 are the second moment and the variance of the gradients.
`swarm.consistency_meter()` shows ``||x - v|| / alpha`` beside B, and warns when it exceeds B.

## Messages

| message | purpose |
|---|---|
| `WaitingPeer` | DHT record, signed: this peer waits for a group with these terms |
| the messages of `colab_swarm.averaging.group` | agree on the members |
| `ElasticLink(prefix, members)` | opens the one stream between two members, for the life of the group |
| `Piece(step, bucket, …, rates)` | one bucket; its encoded values (120 KiB at most) are the payload |

## States

    waiting --all present, terms agree--> formed --state of the first member--> ready --> step 0, 1, 2 …
                                                                       a stream breaks: that member is lost

A group starts complete. All members agree on size, scheduler, codec, layout, and the optimizer with its options and
learning rates, or get an error that names the difference. The first member, by id, sends its parameters and optimizer
state to the others. Step a scheduler of learning rates yourself, after each `step()`: the first bucket carries the
rates, and a member whose rates of a step are not the first member's gets a `MismatchError`.

| timeout | value |
|---|---|
| forming a group | 300 s (`wait_s`) |
| a step | set by the scheduler; lost peers are not waited for |
| leaving | 5 s |

## Failures

The group continues without a lost peer: its share of the mean is missing, and the bound grows by
M / p; with stand-ins by (d + 1) M / p, d the longest delay, because nobody can correct them.
The gradients that it still owed are not part of the measured distance. The peer cannot
rejoin this group. Error feedback, on by default, sends later the values that a lossy codec cuts
off. Without it the bound is unknown, and the meter says so. `swarm.elastic_optimizer` raises
`ValueError` if peers have different terms, and `StateError` if not enough peers come in time.

**Security.** Members are workers of the run (`colab_swarm.trust`) and links are encrypted. A member's values are taken
as its gradient.

## Usage

    from colab_swarm.elastic import NormBounded

    optimizer = swarm.elastic_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), peers=2, scheduler=NormBounded(0.8)
    )
    for batch in batches:
        loss_of(model, batch).backward()      # gradients are sent during the backward pass
        optimizer.step()                      # continues at 80 % of the norm; adds the rest in the next step
    swarm.consistency_meter()

`compression="topk:0.01"` or `"onebit"` send fewer bytes. Tutorial 08 shows how much may be missing.

## Paper and modules

Nadiradze et al., *Elastic Consistency: A General Consistency Model for Distributed Stochastic
Gradient Descent*, [arXiv 2001.05918](https://arxiv.org/abs/2001.05918).

| section | module |
|---|---|
| definition 1, rows 2 to 7 of Table 1, lemmas 12 to 16, 18; our adaptive beta | `colab_swarm.elastic.schedulers` |
| measured distance, M and sigma | `colab_swarm.elastic.ledger` |
| 5, equations 10 and 11: the elastic scheduler, corrections | `colab_swarm.elastic.ledger`, `steps` |
| 5.2: error feedback | `colab_swarm.tensors.codecs` |
| groups over peer links | `colab_swarm.elastic.group` |

## Measured

Two cores of a shared virtual machine, over loopback, encrypted:

- `elastic.step_time_vs_synchronous`: an elastic step at beta 0 against a synchronous one, 5 ms of latency: **0.73**
- `elastic.synchronous_vs_ddp`: the synchronous one against torch's DistributedDataParallel over gloo: **0.52**
- `elastic.max_bound_ratio`: measured inconsistency over the bound of theory, largest of 44 cases: **0.72**
- `elastic.topk_feedback_drop`: accuracy lost to sending 1 % of the gradient (without feedback: 2.7): **0.4 points**

In a copy of the repository, `python -m tests.benchmarks elastic` measures again.
"""

from colab_swarm.elastic.schedulers import (
    AdaptiveBeta,
    BoundedStaleness,
    CrashTolerant,
    NormBounded,
    Synchronous,
    VarianceBounded,
)

__all__ = [
    "AdaptiveBeta",
    "BoundedStaleness",
    "CrashTolerant",
    "NormBounded",
    "Synchronous",
    "VarianceBounded",
]
