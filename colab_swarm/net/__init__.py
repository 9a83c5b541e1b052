"""Bytes between peers: identity, encrypted links, calls and streams, and the way to peers behind routers.

Knows no torch. Two protocols live here: *links*, and *reachability*.

## Links: what problem they solve

Volunteers' machines must talk over the open internet, through proxies, tunnels and relays that nobody trusts.
So a link is encrypted from end to end, passes wherever a WebSocket passes, and carries many conversations at
once.

    message, payload                                                       handler
      | mux.py: calls and streams, each with a number                        ^
      v frames.py: packets of 124 KiB at most                                | the same
      v noise.py: sealed by AES-GCM, with a counter                          | upwards
      v websocket.py: WebSocket messages                                     |
      '------------- direct, punched, relayed or through a tunnel -----------'

A **peer** is an Ed25519 key; its id is the SHA-256 of the public key (`colab_swarm.net.identity`). The
**handshake** is Noise XX (revision 34, X25519, SHA-256, checked against published test vectors), see
`colab_swarm.net.hello`:

    initiator                                   responder
      e, digest of protocol and run  ------->     another run or version is refused here, in words
      <-------  e, ee, s, es  + Hello
      s, se  + Hello                 ------->     both check: key, signature, membership, expected id

| message | says |
|---|---|
| `Hello` | Ed25519 key, signature over the Noise key and the handshake's hash, addresses, clock, membership |
| `Opening` | begins a call or a stream: the name of the message's class, and the message |
| `Failure` | why a call failed or a stream was reset |

After that everything is a **frame** of a kind: `CALL`, `REPLY`, `ERROR`, `CANCEL` for calls; `OPEN`, `ITEM`,
`END`, `RESET`, `CREDIT` for streams; `PING`, `PONG`, `LEAVING` for the link. A *call* is one message there
and one back. A *stream* carries items both ways; an item is a small message (256 KiB at most) and a raw
payload (1 MiB at most, best 120 KiB: one packet, no copy). Messages are msgspec structs: decoding checks
them. Nothing is pickled.

**States of a link:** dialling, handshake, open, leaving (no new calls or streams; it closes when the present
ones are over), closed. Of two links that both ends dialled at once, both keep the one that the smaller id
dialled. A relayed link is left for a better one, and ends when its streams are over.

| limit or time | value |
|---|---|
| dialling an address, handshake included | 10 s |
| ping; silent for three times as long: closed | 10 s |
| unused link closed after | 300 s |
| credit of a stream (what may be under way unread) | 2 MiB and one item |
| streams, calls that one peer may have open | 256, 1024 |
| links | 256 |

They are fields of `colab_swarm.net.settings.NodeSettings`, or constants beside the code.

**What goes wrong.** A call ends in a `colab_swarm.errors.PeerError` that names the peer: unreachable, lost,
timeout, wrong peer, not admitted, refused, protocol. A stream whose link broke raises `PeerLost`: an end that
nobody said is never taken for the end. A handler whose caller is gone is cancelled. A peer that breaks the
protocol loses its link.

**Security.** Relays and tunnels see sizes and times, no content. Every length is bounded before memory is
taken. Whoever answers at an address must own the expected key. Handlers state the least role that they serve
(`Role`); see `colab_swarm.trust`. Not hidden: who talks to whom, when, and how much.

## Reachability: how others dial a peer behind a router

Each peer asks up to three others to dial it back, and takes the best level that works
(`colab_swarm.net.reachability`, tried again every 300 s and whenever the network changes):

    direct          others dial it at a public address                              Reachability in words:
    LAN             others in the same network dial it                              swarm.reachability.explain()
    punched         links begin at a relay and go on directly, through both routers
    relayed by …    a relay passes its bytes on, unread
    tunnel …        an ngrok or cloudflared tunnel that the user asked for
    outgoing only   it dials others and is called back over these links

| message | says |
|---|---|
| `DialBack`, `DialledBack` | try these addresses of mine; where you are seen, and why each failed |
| `Moved`, `Noted` | from now on I am dialled there |
| `Reserve`, `Reserved` | keep a place for me at this relay, for 300 s |
| `OpenCircuit`, `CircuitTicket`, `CircuitOffer`, `Accepted` | I want to reach that peer; a ticket for each end |
| `Upgrade`, `Ready` | let us find a better way than this relayed link |

    bob (cannot be dialled)          relay                      alice
         | Reserve ------------------->|                          |
         |                             |<---- OpenCircuit(bob) ---|
         |<-- CircuitOffer(ticket) ----|--- CircuitTicket ------->|
         |=== ticket =================>|<================ ticket =|   then it copies bytes, unread
         |<------------- Noise handshake, end to end ------------>|
         |<------------- Upgrade, Ready: a common moment -------->|
         |<======= both dial at once: the holes meet ============>|   the relayed link drains, no stream is lost

A peer holds places at two relays, the nearest. A ticket is good for 15 s and once; a circuit that is silent
for 120 s is closed. A punch takes 4 s at most; it is agreed half a measured round trip ahead. Pairs in which
one router takes a new port for every connection cannot be punched, unless the other is a full cone; on
Windows nothing is punched. `cs.RelayQuota` bounds what a relay gives: places, circuits, bytes, bandwidth.

**At least one peer must be reachable.** If the only one is away, peers that just dial out train alone and
diverge; one branch wins when it is back. A relay that is cut off without a word is noticed after half a
minute.

In a local network swarms announce themselves by multicast DNS (`colab_swarm.net.lan`): the run's id, who
announces it, and where. Nothing of that is trusted before the handshake. `cs.join()` without an invitation
lists them. Where no machine is reachable at all, `cs.NetworkOptions(tunnel="ngrok")` makes one of a notebook;
its free plan carries 1 GB a month, and you are warned before that is used up.

## How to use it

    cs.join(invitation, options=cs.NetworkOptions(port=4500, tunnel="cloudflared", upload_mbit_s=20))
    swarm.reachability.explain()

    colab-swarm relay INVITATION --gb 50 --mbit-s 20
    colab-swarm backbone my-run --port 4500 --identity backbone.key --announce ws://203.0.113.7:4500

Services above see only the interface `colab_swarm.net.peers.Peers`, which `colab_swarm.sim` implements as
well.

## Measured

Bulk throughput is 55 % of a plain asyncio socket's, for 0.97 CPU seconds per GB at both ends together; a call
takes 0.18 ms (median); a relay carries 49 % of the direct link's throughput and 100 idle circuits cost it 7
MB. In network namespaces (`python -m tests.netlab.matrix`: root, iproute2, iptables; 20 ms round trip, 40
tries a pair) routers that keep ports, full cones and those that answer strangers by RST are punched in 40 of
40 tries, 0.29 s after the first call (median); pairs with a router that changes ports are relayed after 0.18
s. `python -m colab_swarm.bench link` and `relay` measure again.

## Sources

Noise Protocol Framework, revision 34; RFC 6455 (WebSocket); RFC 9293 section 3.5 (simultaneous open).
"""
