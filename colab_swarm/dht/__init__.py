"""Where to find things: Kademlia with expiring, signed subkey records. Knows no torch.

## What problem it solves

There is no server that knows who trains, how far everybody is, or which peer hosts which expert. A
distributed hash table (DHT) spreads that knowledge over all peers: each record lives at the few peers whose
ids are nearest to its key.

    key = SHA-256 of a name          distance of two ids = their exclusive or, read as a number

    alice wants the records under key K
      asks the 3 nearest peers that she knows  ->  each answers with its records, and with peers nearer still
      asks those                               ->  … until the nearest 3 that are alive have answered
      merges what they said, subkey by subkey: the newest version of each wins

Under a key lie **subkeys**, each with a value, a version and an end of its own. So a hundred peers tell their
progress under one key, each under its own id, and one lookup reads them all.

## Messages

| message | says | answered by |
|---|---|---|
| `FindPeers(target)` | which peers near it do you know? | `FoundPeers` |
| `FindValue(key)` | what do you hold, and which peers near it do you know? | `FoundValue` |
| `Store(key, records)` | hold these | `Stored`, with a reason for each one refused |
| `Fetch(key, relays)` | what do you hold? If nothing, ask on, so many in a row | `Fetched` |

A `Record` has subkey, value, ``expires_at``, version, ``ttl_s`` and, if it is signed, its owner's key and
signature. All are in `colab_swarm.dht.records` and `colab_swarm.dht.records`.

## How it works

- **Who is known.** 256 k-buckets of 20 contacts (`colab_swarm.dht.routing`). Whoever has been there long and
  still answers stays; newcomers wait as replacements. Peers that cannot be dialled look up and store, but are
  never asked.
- **Looking up.** Up to 3 queries at once, without a barrier between rounds (`colab_swarm.dht.routing`). A slow
  peer gives up its place in the line and its rank, until it does answer.
- **Storing.** At the 5 peers nearest to the key; readers hear 3. So a reader meets every write that missed at
  most two of its replicas. Holders store again every 600 s at whoever is nearest by then.
- **Who may write.** Under a subkey that is a peer's id only that peer, by its signature. Elsewhere a signed
  record takes the place of an unsigned one, and the higher version that of the lower, so all holders end with
  the same.
- **Clocks.** ``expires_at`` and version are the writer's swarm time (the own clock, moved by the median
  offset of the linked peers) and are believed with 600 s to spare. The life that is left is counted down on
  the holder's own clock, so skewed clocks neither kill a fresh record nor keep an old one.

## Limits and times

| what | value |
|---|---|
| one query | 5 s, but see *Looking up*: a silent peer costs less |
| a record's life, at most | 24 h |
| a value, a subkey | 32 KiB, 256 bytes |
| all records under one key | 200,000 bytes (one message) |
| all that a peer holds for others | 64 MiB |
| quiet buckets are looked up every | 120 s |

`colab_swarm.dht.records.DHTSettings` has them all.

## What goes wrong

A peer that does not answer twice in a row (once, if a replacement waits) leaves its bucket; one of those that
were lost is tried again every 30 s, and every 2 s by a peer that has nobody left. Nothing raises for a peer's
fault: `store` returns how many peers took the record, `get` what was found. A holder that dies takes one of
five replicas with it.

**Security.** A holder can drop or hide records, and whoever makes many ids near a key can hold all its
replicas: do not store secrets, and trust only what is signed. Nobody can forge another's signed record or
bring an old one back after its end. A key can be stuffed by a malicious member up to its bound; therefore
revocations also go from peer to peer (see `colab_swarm.trust`).

## The paper and the modules

Maymounkov and Mazières, *Kademlia: A Peer-to-peer Information System Based on the XOR Metric*, 2002.

| section | module |
|---|---|
| 2.1 distance, 2.2 buckets | `colab_swarm.dht.routing` |
| 2.3 lookup, replication, republishing | `colab_swarm.dht.routing`, `search`, `service` |
| 2.5 caching along the path | left out: whoever writes its progress each second is to be seen in the next one |
| subkeys, signatures, expiry (after hivemind's DHT) | `colab_swarm.dht.records`, `storage` |

## How to use it

Users rarely do; services call `DHT.store(key, value, subkey=…, ttl_s=…, signed=True)` and `DHT.get`. Here are
a peer's own words, as everybody reads them: `ProgressRecord` (`colab_swarm.training`), `AssistantRecord`,
`WaitingRecord` (`colab_swarm.elastic`), places of experts (`colab_swarm.moe.records`), `Tally` and
`Revocations` (`colab_swarm.trust`).

## Measured

On one machine with 8 processes: 0.83 ms to store, 0.56 ms to get, one at a time, and 4,124 operations a
second concurrently (hivemind 1.1.12: 26 ms, 19 ms, 53). With 10,000 simulated peers of which 20 % are dead,
all records are found, in 2 hops (median). `python -m colab_swarm.bench dht` measures again.
"""
