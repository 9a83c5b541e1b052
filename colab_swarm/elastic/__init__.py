"""Elastic consistency: peers that go on before all gradients are there, inside a bound that is measured.

## What problem it solves

On a line where gradients take longer than the computing, synchronous training waits most of the time. 2 to 16
peers can start the next batch before all gradients are there, if nobody's parameters get too far from what
they ought to be; and how far they are is measured while they train.

## The idea

    alice   |backward t|wait|backward t+1 …        every bucket of a gradient leaves as soon as backward has filled it,
    bob     |  backward t   |backward t+1 …        last layer first
                 ----buckets--->
    at step t apply   1/p ( my g_t  +  what arrived  +  stand-ins for the rest  +  corrections of earlier steps )

What comes late is applied one step late, and nothing twice: once everything has arrived, a peer's parameters
are those of synchronous training. A **scheduler** says when enough is there:

| scheduler | goes on | bound B (Table 1) |
|---|---|---|
| `Synchronous()` (the default) | when everything is there | 0 |
| `NormBounded(beta)` | once a share *beta* of one's own norm is there | (p - 1) M / p |
| `AdaptiveBeta(max_inconsistency)` | likewise; beta follows the meter | (p - 1) M / p |
| `VarianceBounded(timeout_s)` | after a moment, with one's own gradient in the place of what is missing | 3 sigma |
| `BoundedStaleness(tau)` | while nothing is more than *tau* steps late | (p - 1) tau M / p |
| `CrashTolerant(f, timeout_s)` | though up to *f* gradients are missing | f M / p |

The **view** v of a peer lacks what has not arrived. Elastic consistency (definition 1) asks that ``E ||x -
v||^2 <= alpha^2 B^2``, with x the parameters that had everything, alpha the learning rate, M^2 and sigma^2
the gradients' second moment and variance. `swarm.consistency_meter()` shows ``||x - v|| / alpha`` beside B,
and warns when it passes.

## Messages

| message | says |
|---|---|
| `WaitingRecord` | DHT, signed: I wait for a group on these terms |
| the messages of `colab_swarm.averaging.group` | who is in |
| `ElasticLink(prefix, members)` | opens the one stream between two members, for as long as the group lives |
| `Piece(step, bucket, …)` | one bucket; its encoded values (120 KiB at most) are the payload |

## States

    waiting --all are here, terms agree--> formed --state of the first member--> ready --> step 0, 1, 2 …
                                                                          a stream breaks: that member is lost, for good

A group begins complete. All members agree on size, scheduler, codec and layout, or are told what differs
(`ElasticSettings.terms`). The first member, by id, gives parameters and optimizer state to the others.

## Times

| what | value |
|---|---|
| waiting for the others when a group is formed | 300 s (`wait_s`) |
| a step is waited for | as the scheduler says; never longer for a peer that is lost |
| saying goodbye | 5 s |

## What goes wrong

A peer that dies is waited for by nobody: its share of the mean is missing from then on, and the bound grows
by M / p. It does not come back into this group. A gradient that a lossy codec cut stays as a residual and
travels later (error feedback, on by default); without it nothing is known about the bound, and the meter says
so. Where other terms are met, `swarm.elastic_optimizer` raises `ValueError` and names them; who does not come
in time ends in `StateError`.

**Security.** Members are workers of the run (`colab_swarm.trust`) and links are encrypted; what a member
sends is taken for its gradient. Within a data centre, `colab_swarm.elastic.process_group.group_optimizer`
does the same over `torch.distributed` with gloo, unencrypted.

## How to use it

    from colab_swarm.elastic import NormBounded

    optimizer = swarm.elastic_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), peers=2, scheduler=NormBounded(0.8)
    )
    for batch in batches:
        loss_of(model, batch).backward()      # gradients leave while this is still at work
        optimizer.step()                      # goes on once 80 % of the norm is there; the rest is added next time
    swarm.consistency_meter()

`codec="topk:0.01"` or `"onebit"` with error feedback send fewer bytes. Tutorial 08 shows how much may be
missing.

## The paper and the modules

Nadiradze et al., *Elastic Consistency: A General Consistency Model for Distributed Stochastic Gradient
Descent*, [arXiv 2001.05918](https://arxiv.org/abs/2001.05918).

| section | module |
|---|---|
| definition 1, Table 1, lemmas 13 to 16 and 18 | `colab_swarm.elastic.schedulers`, `meter` |
| 4.1: relaxations (crashes, staleness, compression) | `colab_swarm.elastic.schedulers` |
| 5, equation 11: the elastic scheduler, corrections | `colab_swarm.elastic.ledger`, `schedulers`, `steps` |
| 5.2: error feedback | `colab_swarm.tensors.feedback` |
| a beta that follows the meter (ours) | `colab_swarm.elastic.schedulers` |

## Measured

With 2 peers and 5 ms of latency a step at beta 0 takes 0.73 of a synchronous one (beta 0.1: 0.86), and a
synchronous one 0.52 of torch's DistributedDataParallel over gloo. Over 29 schedulers and codecs the measured
inconsistency was at most 0.72 of its bound. Sending 1 % of the gradient costs 0.4 points of accuracy with
error feedback, 2.7 without. `python -m colab_swarm.bench elastic` measures again.
"""

from __future__ import annotations

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
