"""Who may take part, and who gave how much: the authority, its members, revocation, the contribution ledger.

## What problem it solves

A run is open to people who never met, and there is no server that checks passwords. Peers must know *offline*
whom to let in, put somebody out within a minute, and thank those who helped, without anybody crediting
itself.

## The idea

    authority's key --signs--> membership of a peer's key                      (counted invitations, names)
    authority's key --signs--> grant of an invitation's key --signs--> membership of a peer's key

The peer that creates a run is its **authority**. An invitation has a key pair of its own: the authority signs
what it allows (the *grant*), and its secret is inside the invitation. So a newcomer signs its own membership,
within the grant's limits, while the authority sleeps. Every peer shows its membership in the handshake
(`colab_swarm.net`), and every other checks the chain without asking anybody.

## What an invitation is

One line, `https://…/join#NAME.PAYLOAD`. What stands behind the ``#`` never reaches a web server. The payload
is base64url of a version byte, msgpack and a checksum (`colab_swarm.invite.Invite`): the run's id, three
peers to dial, an end, the access rule, the authority's public key, the invitation's secret, role, number of
uses, suggestions for training. Its text holds a secret, its ``repr`` does not.

| `cs.create(…, access=…)` | whom the run takes |
|---|---|
| `"open"` | everybody who knows an address |
| `"invite"` (default) | whoever has an invitation |
| `"allowlist"`, `allow=cs.Allowlist(users=[…], organisations=[…])` | and has a Hugging Face account on the list |

| role | may |
|---|---|
| guest | ask the authority for a membership, for a minute; nothing else |
| viewer | look things up, watch, download the model |
| reducer | store records, take part in rounds without contributing, relay |
| worker | contribute gradients, host experts, volunteer |
| authority | admit others |

## Messages

| message | says |
|---|---|
| `Membership`, `Grant` | run, role, key, times, signature; shown in the handshake |
| `RequestMembership` -> `IssuedMembership` | to the authority: a first membership, or a fresh one |
| `PresentMembership` -> `Presented` | to linked peers: this is mine from now on |
| `ShareRevoked` | both ways: the newest list of revocations that I know |
| `Revocations` | signed by the authority; the higher version wins; 900 subjects at most |
| `Tally` | DHT, signed: what I saw others give |

## Times

| what | value |
|---|---|
| an invitation is good for | 24 h (`swarm.invite(hours=…)`) |
| a membership lives | 7 days; 4 hours with an allowlist |
| it is renewed from | half of its life on, so the authority may be away for the other half |
| an ended one can be renewed for | 7 days |
| clocks may differ by | 600 s |
| revocations are looked up | every 20 s, and handed on at once |

## Revocation

`swarm.remove_peer("3fa9")` signs a new list. It lies in the DHT under a subkey that only the authority can write,
every peer reads it each 20 s and asks one linked peer, and whoever learns something new tells all it is
linked to. So it reaches everybody within a minute, even where the DHT's key is stuffed. Links to whoever was
put out are closed.

## The contribution ledger

Each peer counts what it *saw others give*, and publishes the tally signed, with its membership. The
leaderboard, `swarm.contributions()`, is the sum over all tallies without what each says of its own writer:

- *samples*: reducer j credits contributor p with ``weight_p * share_j / (1 - share_p)``, so that all credits
  for p add up to its weight;
- *bytes reduced*: every other member credits a reducer with the span that it got means of;
- *bytes relayed*: each end of a circuit credits half; *work units*, *expert calls*: whoever was served.

A tally lives for a day after its writer has left.

## What goes wrong, and what is not promised

The authority may be away: members go on, and invitations of unlimited use admit newcomers. Only counted
invitations and allowlists need it. What it must not forget (who used which invitation, whom it revoked)
stands beside its key file; start it with the same `NetworkOptions(identity=…)` and it is the same run.

- An invitation of unlimited use lets somebody who was revoked come back under a new key, until it ends. Give
  counted ones (`uses=1`), use an allowlist, or revoke the invitation itself by passing its text to
  `swarm.revoke`.
- Members that credit each other cannot be told from members that worked: the leaderboard gives thanks, not
  money.
- Peers are protected from outsiders and from broken peers, not from members who send plausible but false
  gradients.
- An organizer of an allowlist sees the Hugging Face tokens of those who join: make one that may only read.

Who is not let in gets four lines: what was refused, why, what to do, whom to ask
(`colab_swarm.errors.NotAdmitted`, `InviteError`, `JoinError`).

## Modules

| what | module |
|---|---|
| invitations as text | `colab_swarm.invite`, `colab_swarm.trust.access` |
| statements, signatures, the check in the handshake | `colab_swarm.net.membership` |
| the authority and its memory | `colab_swarm.trust.authority`, `book` |
| a peer's own membership, its renewal | `colab_swarm.trust.member` |
| revocation | `colab_swarm.trust.service` |
| the ledger | `colab_swarm.trust.contributions` |
| a clock that is off is told to its user | `colab_swarm.trust.member` |

## How to use it

    swarm = cs.create("class-of-26", options=cs.NetworkOptions(identity="class.key"))
    swarm.invite(role="viewer", hours=2, uses=30)
    swarm.remove_peer("3fa9")          # the beginning of a peer's id, or an invitation's text
    swarm.contributions()

Checking a membership takes up to 0.34 ms, once per peer.
"""
