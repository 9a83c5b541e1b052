"""Distributed hash table (DHT): Kademlia with expiring, signed records. Does not import torch.

## The problem

No server knows which peers train, their progress, or which peer hosts which expert. The DHT spreads that knowledge over
all peers: each record is stored at the few peers whose ids are nearest to its key.

    key = SHA-256 of a name          distance of two ids = their exclusive or, read as a number

    alice wants the records under key K
      queries the 3 nearest peers that she knows  ->  each answers with its records, and with peers nearer still
      queries those                               ->  … until the nearest 3 that are alive have answered
      merges the answers, owner by owner: the newest version of each wins

Under a key each peer has **one record**, signed, with its own value, version and expiration. So a
hundred peers publish their progress under one key, and one lookup reads them all.

## Modules

| module | content | paper |
|---|---|---|
| `colab_swarm.dht.routing` | k-buckets, lookups | sections 2.1 to 2.3 |
| `colab_swarm.dht.records` | messages, settings, records with owner and expiration | after hivemind's DHT |
| `colab_swarm.dht.service` | `DHT`: store, get, replication, republishing | section 2.3 |

The paper is Maymounkov and Mazières, *Kademlia: A Peer-to-peer Information System Based on the XOR Metric*, 2002. Its
caching along the path (section 2.5) is left out: progress written each second must be seen in the next one.

## How it works

- **Contacts.** 256 k-buckets of 20 contacts. A contact that still answers stays; a full bucket
  takes no new one. Peers that cannot be dialled look up and store, but are never queried.
- **Lookup.** Up to 3 queries at once, without a barrier between rounds. A slow peer frees its place until it answers.
- **Store.** At the 5 peers nearest to the key; readers hear 3. So a reader sees every write that missed at most two of
  its replicas. Holders store records again every 600 s at the peers that are nearest by then.
- **Owners.** Only its owner, by its signature, replaces a record: by one of a higher version, so
  all holders end with the same one.

| limit | value |
|---|---|
| one query | 5 s; a silent peer costs less |
| a record's life | 24 h |
| a value | 32 KiB |
| all records under one key | 200,000 bytes (one message); beyond that a new record displaces the longest |
| all records of one owner, at one peer | 2 MiB |
| all records that a peer holds for others | 64 MiB |
| lookup of quiet buckets | every 120 s |

## Failures

A peer that does not answer twice in a row leaves its bucket. One of the lost peers is queried again
every 30 s, and every 2 s by a peer without any contact. A peer's failure raises nothing: `publish`
returns how many peers hold the record, `get` the values found.

**Security.** A holder can drop or hide records, and a member that makes many ids near a key can
hold all its replicas. So do not publish secrets. No peer can forge another's record or bring back
an expired one. A member that fills a key or a peer displaces its own records first; still,
revocations also travel from peer to peer (see `colab_swarm.trust`).

Services call `DHT.publish(key, value, ttl_s=…)` and `DHT.published` or `DHT.get`; users rarely do.

## Measured

Two cores of a shared virtual machine, over loopback, encrypted:

- `dht.store_ms`: store, one at a time, 8 processes: **0.83 ms** (hivemind: 26 ms)
- `dht.get_ms`: get, one at a time, 8 processes: **0.56 ms** (hivemind: 19 ms)
- `dht.ops_per_s`: concurrent operations per second: **4,124** (hivemind: 53)
- `dht.found_10k`, `dht.hops_10k`: records found among 10,000 simulated peers, 20 % dead; hops: **100 %, 2**

Those of hivemind are of version 1.1.12 on the same kind of machine. In a copy of the repository, `python -m
tests.benchmarks dht` measures again.
"""
