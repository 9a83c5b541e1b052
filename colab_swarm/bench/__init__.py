"""Reproduce every performance claim: ``python -m colab_swarm.bench NAME``.

`all` (or `make bench`) runs every benchmark. `--quick` takes under a minute each and is rougher,
`--json FILE` writes the figures, `--plot PNG` draws those that the papers draw, and
`averaging --vs hivemind --python PATH` compares with hivemind in an environment of its own.

The figures below are from two cores of a shared virtual machine, over loopback, with encryption.
Those of hivemind are of version 1.1.12 on the same kind of machine, those of a paper as published.

## Links and relays (`colab_swarm.net`)

- `link.vs_raw`: bulk throughput, share of a plain asyncio socket's: **55 %**
- `link.cpu_s_per_gb`: CPU seconds per GB, both ends: **0.97**
- `link.rtt_ms_p50`: round trip of a call, median: **0.18 ms**
- `relay.vs_direct`: throughput through a relay, share of the direct link's; three processes: **49 %**
- `relay.idle_mb`, `relay.idle_cpu_percent`: 100 idle circuits at a relay: **7 MB, 0.3 % of a core**

NAT hole punching in network namespaces (`python -m tests.netlab.matrix`: root, iproute2, iptables) succeeds in 40 of 40
tries, 0.29 s after the first call. Pairs with a router that changes ports use a relay after 0.18 s.

## Finding things (`colab_swarm.dht`)

- `dht.store_ms`: store, one at a time, 8 processes: **0.83 ms** (hivemind: 26 ms)
- `dht.get_ms`: get, one at a time, 8 processes: **0.56 ms** (hivemind: 19 ms)
- `dht.ops_per_s`: concurrent operations per second: **4,124** (hivemind: 53)
- `dht.found_10k`, `dht.hops_10k`: records found among 10,000 simulated peers, 20 % dead; hops: **100 %, 2**

## Averaging (`colab_swarm.averaging`)

- `averaging.seconds`, `vs_gloo`: a round of 4 peers, 18 M parameters; in gloo's all-reduces: **0.26 s, 2.5**
- `averaging.success`: rounds that succeeded: **100 %**
- `averaging.step_s_4`, `_8`: a full step, 4 and 8 processes, 2.4 M values, float16: **0.046 s, 0.103 s** (hivemind:
  0.183 s, 0.757 s)
- `averaging.allreduce_s_4`, `_8`: the averaging in it: **0.035 s, 0.078 s**
- `averaging.groups_success`: correct averages of 16 processes in groups of 4: **100 %** (hivemind: 55 %)
- `strategy.speedup_c`: adaptive shares against equal ones, DeDLOC's Table 1 C, predicted (simulated: 1.81): **1.92**
- `strategy.solve_ms_64`: planning a round of 64 peers: **0.5 ms**

## Training (`colab_swarm.training`)

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

## Mixture of experts (`colab_swarm.moe`)

- `experts.vs_local`: forward samples/s with 8 callers, share of the same module's without network: **100 %**
- `experts.samples_per_s`: 4 experts of 256, 4 callers, batches of 128, both ways: **7,858** (hivemind: 2,062)
- `experts.nop_calls_per_s`: calls of 128 KiB each way without computation: **2,049** (hivemind: 86)
- `moe.retained_at_200ms`: throughput at 200 ms mean delay a block, share of that without delay: **102 %**
- `moe.vs_model_parallel_at_200ms`: the same against a pipeline that waits (Learning@home: 42): **60**
- `beam.cold_ms_10k`, `warm_ms`: finding the top 4 of 1,024 experts among 10,000 simulated peers
  (Learning@home: 764 ms): **428 ms, 2.5 ms**

## Work units (`colab_swarm.workunits`)

- `store.redis_ms`, `sqlite_ms`, `sql_ms`: assimilating a result of 5 M parameters (VC-ASGD: Redis
  870 ms, MySQL 1,290 ms): **39 ms, 32 ms, 302 ms**
- `workunits.p1c3t8_vs_p3c3t8`: time per epoch with 1 parameter server against 3, which are the bottleneck: **1.36**
- `vc_asgd.serial_minus_best`: accuracy lost to work units after 40 epochs (VC-ASGD: 9 points): **2.0 points**
- `work_ordeal.once`: units assimilated exactly once, 20 kills of the coordinator, 76 of volunteers: **360 of 360**

## Elastic groups (`colab_swarm.elastic`)

- `elastic.step_time_vs_synchronous`: an elastic step at beta 0 against a synchronous one, 5 ms of latency: **0.73**
- `elastic.synchronous_vs_ddp`: the synchronous one against torch's DistributedDataParallel over gloo: **0.52**
- `elastic.max_bound_ratio`: measured inconsistency over the bound of theory, largest of 29 cases: **0.72**
- `elastic.topk_feedback_drop`: accuracy lost to sending 1 % of the gradient (without feedback: 2.7): **0.4 points**

## In the notebook (`colab_swarm.notebook`)

- `panel.throughput_ratio`: training speed with panel and recorder, share of the speed with neither: **102 %**
- `panel.refresh_ms`, `core_share`: processor time of a refresh, share of a core at four a second: **1.4 ms, 0.6 %**
- `panel.memory_mb`, `notebook_kb`: half an hour of refreshes adds to kernel and saved notebook: **0.3 MB, 0.1 kB**
"""
