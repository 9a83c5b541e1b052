"""Who may join a run, and what each peer contributed: authority, members, revocation, the contribution ledger.

## The problem

A run is open to people who never met, and no server checks passwords. Peers must decide *offline*
whom to admit, remove a peer within a minute, and thank those who helped, without any peer crediting
itself.

## The idea

    authority's key --signs--> membership of a peer's key                      (counted invitations, names)
    authority's key --signs--> grant of an invitation's key --signs--> membership of a peer's key

The peer that creates a run is its **authority**. An invitation has its own key pair: the authority
signs its rights (the *grant*), and its secret is inside the invitation. So a new peer signs its
own membership, within the grant's limits, while the authority is offline. Every peer shows its
membership in the handshake (`colab_swarm.net`), and every other peer checks the chain without any
call, in up to 0.34 ms, once per peer.

An invitation is one line, `swarm://NAME.PAYLOAD` (`colab_swarm.invite.Invite`). PAYLOAD holds the
secret: give the line to the people you invite only. Where a backbone has an https address, the line
is `https://HOST/join#NAME.PAYLOAD`: a page that tells a browser how to join. A browser sends no
server what follows the ``#``.

| `cs.create(…, access=…)` | who may join |
|---|---|
| `"open"` | everyone who knows an address |
| `"invite"` (default) | everyone with an invitation |
| `"allowlist"`, `allow=cs.Allowlist(users=[…], organisations=[…])` | invited ones with a listed Hugging Face account |

| role | may |
|---|---|
| guest | request a membership from the authority, for a minute; nothing else |
| viewer | look things up, watch, download the model |
| reducer | store records, join rounds without contributing values, relay |
| worker | contribute gradients, call and host experts, volunteer |
| authority | admit others |

## Times

| what | value |
|---|---|
| life of an invitation | 24 h (`swarm.invite(hours=…)`) |
| life of a membership | 7 days; 4 hours with an allowlist |
| renewal | from half of its life on, so the authority may be away for the other half |
| an ended membership can be renewed for | 7 days |
| clocks may differ by | 600 s |
| peers look for revocations | every 20 s, and pass new ones on at once; 900 at most |

`swarm.remove_peer("3fa9")` signs a new list of revocations, which reaches all peers within a minute
(`colab_swarm.trust.access`). Links to removed peers close. Each peer counts the contributions that
it *saw*, and publishes this tally signed (`colab_swarm.trust.contributions`). The leaderboard,
`swarm.contributions()`, is their sum. A tally stays for a day after its writer has left.

## Failures

While the authority is away, members continue, and invitations of unlimited use admit new peers.
Only counted invitations and allowlists need it. Its memory (uses of invitations, revocations) is
saved beside its key file: start it with the same `NetworkOptions(identity=…)` and it is the same
run.

- A removed peer can come back under a new key with an invitation of unlimited use, until the invitation ends. Use
  counted ones (`uses=1`) or an allowlist, or revoke the invitation itself: pass its text to `swarm.remove_peer`.
- Counts are reported by other members, who could collude. The leaderboard gives credit; do not pay by it.
- The organizer of an allowlist sees the Hugging Face tokens of those who join: use a read-only token. It is sent only
  with `send_hf_token=True`, in a shell `--send-hf-token`, and never by a look such as `colab-swarm status`.

## Security

Promised while most votes are honest. In each of the named tests the attack is made, and held.

| attack | bound | tests |
|---|---|---|
| delays, silence and refusals at any wait | 5 s a peer, and 1 % of the time | `attacks/test_wild`, `test_organizers` |
| groups of one, a sole reducer | most live peers, by all tickets | `attacks/test_organizers` |
| a viewer acts as a worker | roles are proven in records, and on both sides of calls | `attacks/test_members` |
| identities of one invitation | one vote, but for those that trained with us | `attacks/test_members` |
| a donor gives another state | sketches show it; it is loaded again elsewhere | `training/test_sketch` |
| huge values, weights, counts | by what is usual; within that the mean is exact | `attacks/test_members` |
| a back-dated membership | an ended invitation needs a fresh signature | `attacks/test_members` |
| strangers' connections, garbage | by address; the oldest half-open goes first | `attacks/test_strangers` |
| victims dialled through peers | only where the caller was seen; by target | `attacks/test_strangers` |
| a guest's network, by an invitation | private addresses are dialled from their block only | `net/test_addresses` |
| a guest's token, by an invitation | sent only with consent | `swarm/test_membership` |
| a guest's keys, by an invitation | a foreign endpoint is confirmed | `mailbox/test_address` |
| idle visitors of a page | the fullest network loses its oldest idle one | `notebook/test_page` |
| calls of experts that are never sent | only received bytes count; by voucher | `moe/test_server`, `test_batching` |
| false claims of experts | no claim is older than its first sight | `moe/test_host` |
| streams that nobody reads | 16 MiB of a peer, 256 in all | `net/test_hostile` |
| records without end | one for each owner and key; bytes by owner | `dht/test_storage` |
| mutated messages, huge manifests | refused; nothing grows | `attacks/test_messages` |

Not promised:

- A majority of votes may lead the swarm anywhere. In an open run votes cost nothing.
- One hostile worker can spoil the model: its gradients count as they are, within these bounds, and nobody
  checks the means of the span that it reduces. Invite people you trust, and remove such a peer.
- Members see the model, and what averages tell of others' data.
- A new member may waste a few seconds of some rounds before nobody waits for it, at each of the others.

A peer that is not admitted gets four lines: the refusal, the reason, the fix, the person to ask
(`colab_swarm.errors.NotAdmitted`, `InviteError`, `JoinError`).

## How to use it

    swarm = cs.create("class-of-26", options=cs.NetworkOptions(identity="class.key"))
    swarm.invite(role="viewer", hours=2, uses=30)
    swarm.remove_peer("3fa9")          # the first digits of a peer's id, or an invitation's text
    swarm.contributions()

.. include:: ONE_MEMBER.md
"""
