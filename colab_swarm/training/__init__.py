"""Collaborative training: progress, optimizer, state sharing, checkpoints, LAMB.

## What problem it solves

Peers of any speed train one model as a single machine with the joined batch would: each computes gradients of
its own data at its own pace, and all take the same step when the swarm together has the target batch. Peers
come late, fall asleep, die; nobody waits for them, and nobody ends up with other parameters.

## The idea

    alice   |batch|batch|batch|.                       n_a samples
    bob     |  batch  |  batch  |                      n_b            n_a + n_b + n_c >= target_batch_size:
    carol   |    batch     |                           n_c            a round, one step for all
                                 \\______ averaging ______/  sum n_i g_i / sum n_i

Each peer tells in the DHT how far it is. Everybody adds up and knows when the batch is full; who is asked
computes its present micro-batch to the end and comes. See `colab_swarm.averaging` for the round itself.

## Records and messages

| type | where | says |
|---|---|---|
| `ProgressRecord` | DHT, signed, own subkey | step, lineage, samples so far, speed, syncing or not, addresses, loss |
| `AssistantRecord` | DHT, signed | I reduce and hand on the state for these collaborations |
| `DescribeState` -> `Manifest` | call | whose state, its plain part, digests of its chunks |
| `FetchChunks` -> `ChunkOf` … | stream | chunks of the snapshot with this root |

## States of a trainer

    syncing --(nobody else, or equal parameters)--> training --batch full--> round --mean--> training
       ^                                                |                     |
       '------------- behind: catch up <----------------'---- values kept local

- **Lineage.** A digest (BLAKE3), chained over the first parameters and every mean applied since. Equal
  lineages mean equal parameters. A round admits only peers of one step and one lineage.
- **Branch.** The highest step that at least half of the training peers have reached, and on it the lineage
  that most hold. So one liar, one clock or one lucky minority never moves the swarm. Peers that cannot be
  dialled have no vote while others can; peers that could not give the state they claim have none for 300 s.
- **Catching up.** The state comes in chunks of 256 KiB or more, from four donors at once, each chunk checked
  by its SHA-256; donors train on meanwhile. While it is on its way the newcomer follows the rounds with
  weight 0 and keeps their means; then it applies these in order and is level, however long the download took.
- **Counts of others are a moment old**, so they are carried on at the peer's speed, for 3 s at most.

## Times

| what | value |
|---|---|
| two progress records of a peer, at most | 60 s apart; forgotten after four times as long |
| a round waits for peers that do not answer | 5 s (`matchmaking_s`) |
| and for those that said they finish a batch | 60 s |
| matchmaking and averaging of one round | 180 s |

See `colab_swarm.training.settings.TrainingSettings`.

## What goes wrong

A gradient that is not finite is left out (`BatchDropped`), and the peer goes on. A round that fails changes
nothing: the samples stay and go into the next. A peer whose mean is incomplete fetches the state from the
others. A peer alone trains on correctly and is the origin for whoever comes. All trainers gone: a backbone
(`colab_swarm.backbone`) has the newest checkpoint. An interrupt (■) stops the cell and not the peer. **Not
guarded against:** members that send plausible but false gradients.

**If no peer can be reached by the others** they need an *assistant* (DeDLOC's auxiliary peer): it trains
nothing, organizes and reduces. `swarm.serve_as_reducer()`, `colab-swarm peer INVITATION --reduce-only` or a backbone;
no GPU, no data, no PyTorch.

## How to use it

    optimizer = swarm.optimizer(cs.Lamb(model.parameters(), lr=1e-2), target_batch_size=256)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step(samples=len(batch["input_ids"]), loss=loss.item())
    optimizer.save(cs.CheckpointFolder("checkpoints"))

All begin with equal parameters: build the model from the same seed. What helps on slow lines:

| argument | what it does |
|---|---|
| `codec="float16"`, `"int8"`, `"adaptive"` | fewer bytes a value; adaptive: 8 bits, but 16 for small tensors |
| `mean_codec=` | the same for the way back |
| `error_feedback=True` | what compression cut off travels later: nothing is lost in the long run |
| `codec="onebit"`, `"topk:0.01"` | an eighth, or a twentieth, of a byte a value; only with error feedback |
| `delayed=True` | compute on while a round runs; the update comes exactly one step late |
| `local_steps=8` or `"auto"` | every peer takes steps alone, then the swarm averages where they led (DiLoCo) |
| `budget=cs.TrafficBudget(gb_per_hour=2)` or `mbit_s=10` | reduces less, sends 8 bits, takes local steps |

`swarm.leave(hand_over_s=60)` waits for a last round that takes what was accumulated. Several GPUs in one
machine are one peer: start the script with `torchrun`, join on rank 0 only, and use `cs.host_optimizer(swarm
if rank == 0 else None, optimizer, target_batch_size=…)` on all ranks, without `DistributedDataParallel` and
without a `GradScaler`; tested with gloo on CPUs, not yet with NCCL.

## The paper and the modules

| DeDLOC ([arXiv 2106.10207](https://arxiv.org/abs/2106.10207)) | module |
|---|---|
| section 3.1: accumulate at one's own pace, one step per target batch | `colab_swarm.training.progress`, `tempo` |
| section 3.2: delayed updates (after ZeRO-Offload) | `colab_swarm.training.optimizer`, `replica` |
| auxiliary peers | `colab_swarm.training.assistant`, `mirror` |
| newcomers get the state from peers | `colab_swarm.training.state`, `catch_up` |
| section 4.3: sahajBERT | `colab_swarm.recipes`, `notebooks/sahajbert.ipynb` |

LAMB: [arXiv 1904.00962](https://arxiv.org/abs/1904.00962). LARS: [arXiv
1708.03888](https://arxiv.org/abs/1708.03888). DiLoCo: [arXiv 2311.08105](https://arxiv.org/abs/2311.08105).

## Measured

A swarm of one trains at 98 % of a bare loop's speed; an idle peer takes 18 MiB beside torch (hivemind 1.1.12:
531 MiB in 5 processes). From joining to the first counted sample with 18 M parameters: 7.1 s. In 20 simulated
hours with churn 95 % of the ideal number of steps are taken. `python -m colab_swarm.bench overhead`, `soak`,
`join` and `albert` measure again.
"""
