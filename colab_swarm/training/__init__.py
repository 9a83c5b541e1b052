"""Collaborative training: progress, optimizer, state sharing, checkpoints, LAMB.

## The problem

Peers of any speed train one model as a single machine with the joined batch would. Each computes gradients of its own
data at its own pace, and all take the same step when the swarm together has the target batch. Peers may join late,
sleep or die; the others do not wait for them, and all end with equal parameters.

## The idea

    alice   |batch|batch|batch|.                       n_a samples
    bob     |  batch  |  batch  |                      n_b            n_a + n_b + n_c >= target_batch_size:
    carol   |    batch     |                           n_c            a round, one step for all
                                 \\______ averaging ______/  sum w_i g_i / sum w_i

*Samples* n fill the batch. The *weight* w of a gradient in the mean is n, or what ``step(weight=…)`` says: with the
number of target tokens, ragged texts give exactly the gradient of one process with the joined batch. With ``model=``
tensors are matched by name, and the change of the model's statistics (BatchNorm's) is averaged beside the gradient,
by the same weights. Other buffers, in modules with an integer or a flag, each peer keeps; a late joiner takes them
from its donor, and so frozen parameters that change, such as a teacher's.

One peer, the *organizer*, hands out the batch: each peer is granted so many samples of it, by what it has shown, so
that all end at about the same time. A peer reports what it has counted; what one that vanished or paused had not
counted is granted to the others. When the batch is full the group has formed. `colab_swarm.averaging` describes this,
and the round itself. Each peer also publishes a record in the DHT: those that join, and those that lost the organizer,
find the others by it.

## Records and messages

| type | where | content |
|---|---|---|
| `ProgressRecord` | DHT | step, lineage, samples, speed, syncing, paused, organizer, addresses, loss, agreement |
| `AssistantRecord` | DHT, signed | this peer reduces and passes on the state for these collaborations |
| `DescribeState` -> `Manifest` | call | step and lineage of the state, its size, digests of its chunks |
| `FetchState` -> `StateChunk` … | stream | chunks of the snapshot with this root |

## What a trainer does

    catching up --(no other peer, or equal parameters)--> computing --share used up--> ready --group--> contributing
       ^                                                   ^    ^                        |                  |
       |                                                   |    '--- granted more -------'                  |
       '------------------ behind --------------------------'--------------- the mean, or none -------------'

- **Lineage** and **branch** name the parameters that most of the swarm holds: see `view`. A round admits one step of
  one lineage. A trainer that computes nothing is soon awaited no more. Its peer follows the rounds meanwhile, and it
  takes the missed steps before it trains on.
- **Agreement.** A record says, in words, what must be equal at all peers: the trained tensors with their names, a
  digest of the frozen ones, an adapter's scale, optimizer, learning rate, batch size, unit of weight, compression. A
  peer that differs from most peers on the branch is refused with both values before it trains (`MismatchError`). Once
  it has averaged with others, no record can refuse it. The agreement is in each round's schema, so peers that differ
  never share a round.
- **Catching up.** The state arrives in chunks of 256 KiB or more, from four donors at once, each chunk checked by its
  hash; donors train on meanwhile. The late joiner follows the rounds with weight 0, however long the
  download takes.

## Times

A peer publishes a record every 2 s at first, then every half second for each peer, from 2 to 30 s; it is forgotten
after four times as long, a minute at least. It reports to the organizer each second while it computes. A peer whose
count stands still for longer than it has shown (5 s while nothing is known) is not awaited. Averaging takes 120 s at
most or, over slow lines, three times its forecast.

## Failures

- A gradient that is not finite is left out (`BatchDropped`), and the peer continues.
- A round that fails changes nothing: the samples go into the next one.
- A peer whose mean is incomplete fetches the state from the others.
- A peer alone trains correctly, and late joiners get its state.
- If all trainers are gone, a backbone (`colab_swarm.backbone`) has the newest checkpoint.
- An interrupt (■) stops the cell and not the peer.
- **Not guarded against:** members that send plausible but false gradients.

**If no peer can be reached by the others** they need an *assistant* (DeDLOC's auxiliary peer), which trains nothing,
organizes and reduces: `swarm.serve_as_reducer()`, `colab-swarm join INVITATION --reduce-only` or a backbone. It needs
no GPU, no data and no PyTorch. Or a bucket carries the rounds: `colab_swarm.mailbox`.

## How to use it

    adam = torch.optim.AdamW(model.parameters(), 1e-3)
    optimizer = swarm.optimizer(adam, target_batch_size=256, model=model)
    for batch in swarm.batches(loader, optimizer, max_steps=1000):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step(loss=loss)
    optimizer.save(cs.CheckpointFolder("checkpoints"))

`colab_swarm.integrations` has the Hugging Face Trainer, TRL, accelerate and Lightning. Models that were initialised
differently take the state of the peer that began. Options for slow links:

| argument | effect |
|---|---|
| `compression="float16"`, `"int8"`, `"adaptive"` | fewer bytes a value; adaptive: 8 bits, but 16 for small tensors |
| `mean_compression=` | the same for the way back |
| `error_feedback=True` | what compression cut off is added to the next gradient |
| `compression="onebit"` | an eighth of a byte a value; only with error feedback |
| `compression="topk:0.01"`, `"sparseloco"` | a twentieth, or a 36th, of a byte; only with error feedback |
| `overlap=True` | compute during a round; the update comes exactly one step late |
| `local_steps=8` | every peer takes steps alone, then the swarm averages the parameters (DiLoCo) |
| `local_steps=3, compression="sparseloco"` | 440 times fewer bytes sent than each step's float32 (SparseLoCo) |
| `local_steps=30, compression="sparseloco"` | 4,000 times fewer; after a few hundred steps the loss is higher |
| `local_steps=30, overlap=True` | a round hides behind the local steps, which go on from its result |

`swarm.plan(model, step_s=12)` forecasts ways to communicate on the measured line in one table, and chooses one, of
those within ``gb_per_hour=2`` if you pass it: `swarm.optimizer(…, communication=plan)`. Who joins passes
``communication="auto"``, and does as the others. `cs.doctor(swarm, step=…)` compares a step here with one alone.

`swarm.leave(hand_over_s=60)` waits for a last round that takes the accumulated samples. Several GPUs of one machine are
one peer: start the script with `torchrun`, join on rank 0 only, and call `cs.host_optimizer(swarm if rank == 0 else
None, optimizer, target_batch_size=…)` on all ranks, without `DistributedDataParallel`. With float16, each rank has a
`GradScaler` of its own: `scaler.step(optimizer, samples=…)`, then `scaler.update()`. A rank whose gradient overflows
adds nothing to that step. The ranks sum where their models are: by NCCL if all are on GPUs, else by gloo. This is
tested with gloo on CPUs, not yet with NCCL.

## Checkpoints

`optimizer.save` writes one safetensors file, which `colab_swarm.training.state.load_checkpoint` reads: what late
joiners get, this peer's `feedback` and `positions` in its data, and `together`. There is a position for each loader, in
the order in which `swarm.batches` first got them. `together` is the last step at which this peer's state was bit-equal
with the swarm's, as far as it knows.

## The paper and the modules

| DeDLOC ([arXiv 2106.10207](https://arxiv.org/abs/2106.10207)) | module |
|---|---|
| section 3.1: own pace, one step per target batch | `colab_swarm.averaging.grants`, `gradients`, `trainer` |
| section 3.2: rounds, delayed updates (after ZeRO-Offload) | `link_rounds`, `trainer`, `replica` |
| auxiliary peers | `assistant`, `state` |
| late joiners get the state from peers | `state`, `link_rounds` |
| section 4.3: sahajBERT | `colab_swarm.recipes`, `notebooks/sahajbert.ipynb` |

`layerwise` has LAMB, [arXiv 1904.00962](https://arxiv.org/abs/1904.00962), and LARS, [arXiv
1708.03888](https://arxiv.org/abs/1708.03888). `host` makes one peer of several processes. DiLoCo: [arXiv
2311.08105](https://arxiv.org/abs/2311.08105).

## Memory

A peer's vectors are as long as the model, in float32. Beside the parameters and the optimizer's state it
has at most three: autograd's gradients, their sum, and the mean of the last round, which others may still
recover. A round scales the sum in place, replaces it by the mean, and takes memory for the span that this
peer reduces. Delayed updates take one vector more, and so does an optimizer that may change gradients in
place. SGD, Adam, AdamW, Lamb and Lars do not, unless with ``foreach=True`` or a hook. With `max_grad_norm`
a mean that is clipped is copied.

## Measured

Two cores of a shared virtual machine, over loopback, encrypted:

- `albert.load_balancing_gain`, `auxiliary_gain`: section 4.2 of DeDLOC, simulated, with delayed updates: **1.74, 1.85**
- `overhead.throughput_ratio`: local training speed, share of a bare loop's: **98 %**
- `overhead.memory_mib`: memory of an idle peer, without torch: **18 MiB, no process** (hivemind: 531 MiB, 5 processes)
- `scale.memory_vectors_124m`: memory of a peer beside parameters and optimizer, in vectors of 124 M values: **3.0**
- `scale.step_over_round_124m`, `vs_gloo_124m`: a step by its averaging round; that round by gloo's: **1.36, 2.7**
- `mailbox.s3_beyond_s`, `s3_requests`: a round in a local bucket, 4 peers, 1 MB each: seconds beyond the last member,
  requests a peer: **at most 0.6 s, 9.4**
- `loss_per_byte.often_vs_float32_bytes`, `_loss`: SparseLoCo with a round each 3 steps beside gradients of each step,
  600 steps of 867,000 values, 4 peers, one seed: **257 times fewer, 1.01 times the loss**
- `loss_per_byte.sparse_vs_float32_bytes`, `_loss`: the same with a round each 30 steps: **2,454, 1.22**
- `loss_per_byte.lora_round_kb`: sent by a peer in a round of LoRA, rank 8, in a model of 1.1 billion: **85 kB**
- `soak.step_share`: steps in 20 simulated hours with churn, share of the ideal: **95 %**
- `overhead.join_s`: until a peer is constructed: **0.3 s** (hivemind: 7.6–9.9 s)
- `join.counted_s`: from pasting the invitation into the notebook to a sample that others count: **6.3 s**

Those of hivemind are of version 1.1.12 on the same kind of machine. In a copy of the repository, `python -m
tests.benchmarks overhead`, `scale`, `soak`, `join`, `albert`, `mailbox` or `loss-per-byte` measures again.
"""
