"""Decentralized mixture of experts (Learning@home): peers host experts, trainers find them in the DHT.

## What problem it solves

A layer larger than any machine lives on many. Whoever has a GPU, or idle cores, hosts some of its *experts*;
whoever trains finds, for each input, the best of those that are alive, across slow lines and without a list
that anybody keeps.

## The idea

    input x --gating--> a score for every index of every dimension of a grid      expert ffn.3.7
       |                        |                                                       ^
       |                 beam search in the DHT: the k best that are alive              |
       v                                                                                |
    samples sorted by expert --one call each, all at once--> host merges calls of many trainers into one batch
       ^                                                                                |
       '---- sum_f w_f f(x), w = softmax of the scores of those that answered <---------'

`backward` walks the same road, and each expert takes a step of its own optimizer. Experts have names on a
grid, ``prefix.u_0.….u_(d-1)``, so that k good ones of thousands are found by a few look-ups.

## Messages and records

| type | where | says |
|---|---|---|
| `ForwardExpert`, `BackwardExpert` | stream | expert, samples, shape, codec; tensors follow in parts |
| `Part(busy_s)` | items | values of a tensor; or: ask again in so many seconds |
| `Row`, `Branch` | DHT, signed by the host | my experts in this row, and my address; below here something lives |
| `HolderRecord`, `KeepSave`, `SavePiece`, `LackedPieces`, `SaveKept`, `SettleSave` | | keeping saves of others |
| `FetchPieces`, `SaveRecord`, `SavedIndices` | | finding them again |

A call is one stream. The trainer keeps its end open until it is answered; a stream that breaks takes the call
back.

## States

    host     claim a place --settle--> hosted: served, announced every 20 s, saved every 60 s --> withdrawn, last save
                 ^                                                                  |
                 '------- host dies: another takes the place over from its last save

    trainer  unknown prefix --looked up--> believed for 30 s --call--> answered, or left out for 5, 10 … 300 s

- **Places.** Of several hosts of one place it belongs to who claimed first. What lies under one DHT key is
  bounded by the grid, never by the size of the swarm.
- **Batching.** Calls of one expert, direction and shape are merged; the one that waits longest comes first;
  whoever has calls here already may hold as much as is still free (`colab_swarm.moe.batching`). One thread
  owns the accelerator.
- **Staleness.** An expert steps at once on each backward; gradients are stale by the calls that came in
  between.
- **Saves** lie on the host's disk and at two other peers, in chunks named by their hash, so what did not
  change is not sent again.

## Times

| what | value |
|---|---|
| an announcement lives | 60 s |
| what was looked up is believed; that nothing is there | 30 s; 3 s |
| answers beyond `k_min` are waited for | 5 s more (`grace_s`) |
| a call at the host, at most | 60 s |
| two saves; two looks for experts of dead hosts | 60 s; 20 s |
| a save that nobody wanted is dropped after | a day |

`MixtureOptions` and `HostOptions` (`colab_swarm.moe.host`), `DirectorySettings`, `BatchLimits` have them.

## What goes wrong

Who is late, silent, or answers nonsense is left out, and the weights are shared out among the rest. A sample
that nobody answered is tried once more with other experts, then passes unchanged (the experts that ship are
residual). In backward an expert that fails counts as zero gradient for its part. If no expert of the grid
lives, `NoExpertsError` says how many were ever seen, and when. A host that dies loses the steps since its
last save.

**Security.** Messages and saves come from strangers: shapes, sizes and hashes are checked, nothing is
pickled. A host could answer finite nonsense: `reject_outliers=5` drops answers far from the median of three
or more. Nobody can stop a host from learning what its inputs are: do not send it secrets.

## How to use it

    host = swarm.host_experts("ffn", lambda: cs.moe.FeedForward(512), grid=(16, 16))     # as many as fit

    layer = swarm.mixture_of_experts("ffn", 512, grid=(16, 16), k=4)                 # a layer like any other
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), layer, torch.nn.Linear(512, 10))
    trainer = swarm.trainer(model, lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
                            torch.optim.Adam(model.parameters()))
    trainer.fit(batches)                                                             # many batches in flight

Add `0.01 * layer.balance_loss` to your loss and work spreads over the experts. Use autocast with bfloat16,
and no `GradScaler`: experts step on the gradients they are sent. Experts better have neither dropout nor
`BatchNorm`: each call is computed twice, at forward and again at backward. In a shell: `colab-swarm experts
INVITATION ffn --grid 16x16 --dim 512`. Tutorials 05 and 06 show both sides, `swarm.experts_panel` who lives
where and how much each is used (`colab_swarm.moe.watch`).

## The paper and the modules

Ryabinin and Gusev, *Towards Crowdsourced Training of Large Neural Networks using Decentralized
Mixture-of-Experts* (Learning@home), [arXiv 2002.04013](https://arxiv.org/abs/2002.04013).

| section | module |
|---|---|
| 3.1, equation 1: the layer | `colab_swarm.moe.layer`, `dispatch`, `remote` |
| 3.1: the grid; asynchronous training | `colab_swarm.moe.grid`, `trainer` |
| 3.2: gating; experts that learn by themselves | `colab_swarm.moe.layer`, `expert`, `compute` |
| algorithm 1, SelectExperts: beam search | `colab_swarm.moe.grid`, `directory`, `records`, `cache` |
| batching at the host | `colab_swarm.moe.server`, `batching`, `device` |
| checkpoints in the swarm | `colab_swarm.moe.copies`, `holders`, `chunks`, `checkpoints`, `hosting` |
| balance of the load | `colab_swarm.moe.layer` |

The search is optimistic: what has not been looked up is taken to be alive, so in a grid that is well filled
all look-ups are one wait instead of one for each dimension.

## Measured

A host with 8 callers gives all of the throughput that the same module has on the device thread alone (batches
of 2,048 x 1,024). In hivemind's setting (4 experts of 256, 4 callers, batches of 128): 7,858 samples/s
forward and backward, against 2,062. At 200 ms mean delay a block, throughput is 102 % of that without delay
(Transformer blocks: 99 %), 60 times that of a pipeline that waits. The top 4 of 1,024 experts among 10,000
simulated peers are found in 428 ms at first (paper: 764 ms), 2.5 ms later. `python -m colab_swarm.bench
experts`, `moe-throughput`, `moe-convergence` and `beam-search` measure again.
"""

from __future__ import annotations

from colab_swarm.moe.expert import ExpertRule, FeedForward, TransformerBlock

__all__ = ["ExpertRule", "FeedForward", "TransformerBlock"]
