"""Decentralized mixture of experts (Learning@home): peers host experts, trainers find and call them.

## The problem

A layer larger than any machine is spread over many. Peers host some of its *experts*. For each
input a trainer finds the best live experts, across slow links and without a central list.

    input x --gating--> a score for every index of every dimension of a grid      expert ffn.3.7
       |                        |                                                       ^
       |                 beam search in the DHT: the k best live experts                |
       v                                                                                |
    samples sorted by expert --one call each, in parallel--> host merges calls of many trainers into one batch
       ^                                                                                |
       '---- sum_f w_f f(x), w = softmax of the scores of answering experts <-----------'

`backward` takes the same path, and each expert takes a step of its own optimizer. Experts have
names on a grid, ``prefix.u_0.….u_(d-1)``, so that a few look-ups find the k best of thousands.

## Messages and records

| type | where | content |
|---|---|---|
| `ForwardExpert`, `BackwardExpert` | stream | expert, samples, shape, codec; tensors follow in parts |
| `Part(busy_s)` | stream | values of a tensor; or: busy, call again in ``busy_s`` seconds |
| `GridRecord` | DHT, signed by the host | its experts in a page of the grid, addresses; prefixes that lead to experts |
| `KeepSave`, `LackedChunks`, `StateChunk` | stream | storing a save at another peer |
| `FetchSave`; contacts of holders, `SaveRecord`, indices of saved experts | stream; DHT | finding and fetching saves |

A call is one stream. The trainer keeps its end open until the answer arrives; a broken stream cancels the call.

## States

    host     claim a place --settle--> hosted: served, announced every 20 s, saved every 60 s --> withdrawn, last save
                 ^                                                                  |
                 '------- host dies: another peer takes the place over from its last save

    trainer  unknown prefix --looked up--> cached for 30 s --call--> answered, or banned for 5, 10 … 300 s

If several hosts claim a place, the first claim wins. Calls of one expert, direction and shape are merged; each
device has one thread. An expert steps at once on each backward call, so gradients are stale by the calls in between.
Saves are on the host's disk and at two other peers, in chunks named by their hash: only changes are sent.

## Failures

An expert that is late, silent or answers invalid values is left out, and the weights of the others are renormalised. A
sample without an answer is tried once more with other experts, then passes unchanged. In backward a failed expert
counts as zero gradient for its part. If no expert of the grid is live, or none answers for any sample of a batch, the
layer raises `NoExpertsError`; `swarm.trainer` tries the batch again. Experts of another width are a `ValueError`. A
host that dies loses the steps since its last save.

**Security.** Messages and saves come from strangers: shapes, sizes and hashes are checked, nothing
is pickled. An expert learns from all its callers as their gradients come. A host could send wrong finite
values: `reject_outliers=5` drops answers far from the median of three or more. A host can read its
inputs: do not send it secrets.

## Use

    host = swarm.host_experts("ffn", lambda: cs.moe.FeedForward(512), grid=(16, 16))     # as many as fit

    layer = swarm.mixture_of_experts("ffn", 512, grid=(16, 16), k=4)                 # a torch layer
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), layer, torch.nn.Linear(512, 10))
    trainer = swarm.trainer(model, lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
                            torch.optim.Adam(model.parameters()))
    trainer.fit(batches)                                                             # many batches in flight

`FeedForward` is the paper's. For the rest of its setting, host `cs.moe.PaperTransformerBlock`, with
`rule=cs.moe.PAPER_RULE`: by default a block is pre-norm, without dropout, and gradients are clipped to
norm 1.

Add `0.01 * layer.balance_loss` to your loss to spread the work. Use autocast with bfloat16 and no `GradScaler`: experts
step on the gradients they receive. In a shell: `colab-swarm experts INVITATION ffn --grid 16x16 --dim 512`. Tutorials
05 and 06 show both sides. See `MixtureOfExperts`, `HostPlan`, `DirectorySettings` and `BatchLimits` for all settings.

## Paper and modules

Ryabinin and Gusev, *Towards Crowdsourced Training of Large Neural Networks using Decentralized
Mixture-of-Experts* (Learning@home), [arXiv 2002.04013](https://arxiv.org/abs/2002.04013).

| section | module of `colab_swarm.moe` |
|---|---|
| 3.1, equation 1: the layer; 3.2: gating; load balance | `layer`, `calls` |
| 3.1: the grid; algorithm 1, SelectExperts: beam search | `grid`, `directory` |
| 3.1, 4.2: asynchronous training | `trainer` |
| 3.2: experts with their own optimizers; batching at the host | `expert`, `calls` |
| 4.1: feed-forward and Transformer blocks | `blocks` |
| checkpoints in the swarm; hosting and takeover | `saves`, `host` |

## Measured

Two cores of a shared virtual machine, over loopback, encrypted:

- `experts.vs_local`: forward samples/s with 8 callers, share of the same module's without network: **100 %**
- `experts.samples_per_s`: 4 experts of 256, 4 callers, batches of 128, both ways: **7,858** (hivemind: 2,062)
- `experts.nop_calls_per_s`: calls of 128 KiB each way without computation: **2,049** (hivemind: 86)
- `moe_throughput.retained_at_200ms`: throughput at 200 ms mean delay a block, share of that without delay: **102 %**
- `moe_throughput.vs_model_parallel_at_200ms`: the same against a pipeline that waits (Learning@home: 42): **60**
- `beam.cold_ms_10k`, `warm_ms`: finding the top 4 of 1,024 experts among 10,000 simulated peers
  (Learning@home: 764 ms): **428 ms, 2.5 ms**

Those of hivemind are of version 1.1.12 on the same kind of machine, those of Learning@home as published.
In a copy of the repository, `python -m tests.benchmarks experts`, `moe-throughput`, `moe-convergence`, `moe-transfers`
or `beam-search` measures again.
"""

from colab_swarm.moe.blocks import FeedForward, PaperTransformerBlock, TransformerBlock
from colab_swarm.moe.expert import PAPER_RULE, ExpertRule

__all__ = ["PAPER_RULE", "ExpertRule", "FeedForward", "PaperTransformerBlock", "TransformerBlock"]
