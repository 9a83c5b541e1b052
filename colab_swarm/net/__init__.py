"""Bytes between peers: identities, encrypted links with calls and streams, and connections to peers behind NATs.

Does not import torch. Services above see a `colab_swarm.net.node.Node`, which
`colab_swarm.sim` implements as well.

## The problem

Volunteers' machines talk over the open internet, through proxies, tunnels and relays that nobody trusts. So a link is
encrypted from end to end, passes wherever a WebSocket passes, and carries many calls and streams at once.

## Links

    message, payload                                                       handler
      | link.py, mux.py: calls and streams, each with a number,              ^
      v in packets of 124 KiB at most                                        |
      v noise.py: sealed by AES-GCM, with a counter                          |
      v websocket.py: WebSocket messages                                     |
      '---------- direct, relayed, by iroh or through a tunnel ------'

A **peer** is an Ed25519 key; its id is the SHA-256 of the public key (`colab_swarm.net.identity`).
The **handshake** (`colab_swarm.net.handshake`) is Noise XX, revision 34, with X25519 and SHA-256.
Both ends check key, signature, membership (`colab_swarm.net.membership`), run and expected id.

A *call* is one message and its reply. A *stream* carries items both ways: a small message (256 KiB
at most) and a raw payload (1 MiB at most, best 120 KiB: one packet, no copy). Messages are msgspec
structs, which are checked as they are decoded. Nothing is pickled.

If both ends dial at once, both keep the link that the smaller id dialled. A relayed link is left
for a better one: it takes no new calls or streams, and closes when the present ones are over.

| limit or time | value |
|---|---|
| dialling an address, handshake included | 10 s |
| ping; a link silent for three times as long is closed | 10 s |
| unused link closed after | 300 s |
| credit of a stream (sent but unread) | 2 MiB and one item |
| streams, calls that one peer may have open | 256, 1024 |
| links | 256 |

They are fields of `colab_swarm.net.carrier.NodeSettings`, or constants beside the code.

**Security.** Relays and tunnels see sizes and times, no content. Every length is bounded before
memory is allocated. A dialled peer must own the expected key. Handlers state the least `Role` that
they serve; see `colab_swarm.trust`. Not hidden: which peers talk, when, and how much.

## Reachability

Up to three linked peers dial this one back, and it uses the best level that works (`colab_swarm.net.reachability`). It
checks again every 300 s and whenever the network changes. `swarm.reachability.explain()` reports the result.

| level | how others reach the peer | module |
|---|---|---|
| direct | they dial a public address | `colab_swarm.net.node` |
| LAN | peers in the same network dial it | `colab_swarm.net.lan` |
| iroh | QUIC between keys, with hole punching and relays of its own; no account | `colab_swarm.net.iroh` |
| relayed by … | a relay copies its bytes unread | `colab_swarm.net.relay` |
| tunnel … | an ngrok or cloudflared tunnel | `colab_swarm.net.tunnels` |
| outgoing only | it dials others and is called back over these links | |

A peer holds places at the two nearest relays. A ticket is valid for 15 s and once; a circuit that is silent for 120 s
is closed. `cs.RelayQuota` limits bytes and bandwidth of a relay. Two peers behind NATs get a direct
path by iroh only, which punches holes.

**At least one peer must be reachable.** Without one, peers train alone and diverge; when it is
back, one branch wins. A relay that is cut off is noticed after half a minute.

**iroh** (`pip install iroh`; no account, no open port) carries the same sealed bytes in one QUIC stream. With
`cs.NetworkOptions(iroh="public")` a peer waits at one of the free relays that iroh's makers run, until a direct path
is punched. Its relay sees addresses, sizes and times. At most 1 GB a session goes through it. `iroh="https://…"` names
your own iroh relay. A peer that only a relay or a tunnel reaches reduces nothing for others, unless all are like it.

In a local network, swarms announce themselves by multicast DNS; `cs.join()` without an invitation
lists them. Where no machine is reachable, `cs.NetworkOptions(tunnel="ngrok")` makes a notebook
reachable. Its free plan carries 1 GB a month, and you are warned before that is used up.

## Failures

A call raises a `colab_swarm.errors.PeerError` that names the peer: unreachable, lost, timeout,
wrong peer, not admitted, refused, protocol. A stream whose link broke raises `PeerLost`, so a lost
link never looks like the end of the data. A handler is cancelled when its caller is gone. A peer
that breaks the protocol loses its link.

## How to use it

    cs.join(invitation, options=cs.NetworkOptions(port=4500, tunnel="cloudflared", upload_mbit_s=20))
    swarm.reachability.explain()

    colab-swarm relay INVITATION --gb 50 --mbit-s 20
    colab-swarm create my-run --port 4500 --identity backbone.key --announce ws://203.0.113.7:4500

## Measured

Two cores of a shared virtual machine, over loopback, encrypted:

- `link.vs_raw`: bulk throughput, share of a plain asyncio socket's: **55 %**
- `link.cpu_s_per_gb`: CPU seconds per GB, both ends: **0.97**
- `link.rtt_ms_p50`: round trip of a call, median: **0.18 ms**
- `relay.vs_direct`: throughput through a relay, share of the direct link's; three processes: **49 %**
- `relay.idle_mb`, `relay.idle_cpu_percent`: 100 idle circuits at a relay: **7 MB, 0.3 % of a core**

By iroh on loopback, 240 MB/s pass for 6.1 CPU seconds per GB at both ends together, of which iroh alone takes 3.7; a
call takes 0.6 ms.

In a copy of the repository, `python -m tests.benchmarks link` or `relay` measures again.

## Sources

Noise Protocol Framework, revision 34; RFC 6455 (WebSocket).
"""
