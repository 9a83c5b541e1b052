"""DeDLOC's averaging: groups, spans, the streaming reducer, one round.

## What problem it solves

Peers on unequal, unreliable lines want the weighted mean of one long vector (a gradient, or a model's
parameters), and all that end a round must hold the same bits, whoever dies on the way.

## The idea

Every member of a group reduces one *span* of the vector for all others (butterfly all-reduce). Contributions
go up, means come back while contributions still flow, in *chunks* of one packet:

                 span 0 (alice)   span 1 (bob)   span 2 (carol)
    alice       [    mine     ]--->[    ]--------->[        ]         up: 1 - my share of the vector
    bob          [   ]<-----------  mine  -------->[        ]         back: the means of the other spans
    carol        [   ]<------------[    ]<---------   mine            a line's time follows from the shares

Who reduces how much is a linear program over what each line was measured to carry
(`colab_swarm.averaging.strategy`): a peer with a slow upload reduces less, one with a fast line more. The
plan says in a sentence what it chose; `RoundFinished.explanation` has it.

## Messages

| message | from, to | says |
|---|---|---|
| `RoundCall(terms)` | organizer to candidate | a round on these terms begins, are you coming? |
| `JoinEta(ready_in_s, group)` | back | ready in so many seconds; not; or: the step has its group already |
| `JoinRound(ticket, contact)` | member to organizer | here I am, with this weight, step, lineage, line and codec |
| `Joined(group, organizer, reason)` | back | the group, or who organizes instead, or why not |
| `ReduceSpan(round_id)` | member to reducer | opens the stream: `Chunk` up, `Chunk` back |
| `RoundPing(round_id)` | any | are you alive? |
| `RecallSpan(round_id, reducer, wanted)` | survivor to survivor | opens the stream of a lost reducer's chunks |

## States of a round

    candidates --rank--> organizer --Gathering--> group --exchange--> means --(recovery)--> RoundResult
                            |                       |                                          |
                     "organized elsewhere"    everybody hands it out            on_round, RoundFinished

- **Who organizes.** Candidates are ranked by SHA-256 of prefix, step and id. The first that is alive and
  willing organizes; nobody negotiates. Organizers whose views differ redirect up the rank, never down.
- **When a group closes.** When everybody who said that they come is here; at the latest after 60 s. Who
  cannot be called but may come by itself has 2 s. A group survives its organizer, since every member hands it
  out.
- **What a group agrees on.** Step, lineage (the history of the parameters, see `colab_swarm.training`),
  layout of the vector, codecs.
- **A chunk** is finished when all members that are still expected have delivered it. Its mean never changes
  after.

## Times

| what | value |
|---|---|
| the whole round, recovery included | 120 s |
| silence after which a contributor is given up | 10 s |
| silence after which a reducer is given up | 25 s |
| dialling a member | 3 s |
| candidate's answer to a call | 10 s |

They are fields of `colab_swarm.averaging.exchange.AveragingSettings` and
`colab_swarm.averaging.group.GroupFormationSettings`. No less than 10 s: a busy notebook stalls its own peer.

## What goes wrong

Rounds never raise for a peer's fault; `RoundResult` tells.

- *A sender vanishes.* It counts in the chunks that it had sent, at everybody, and in no others. Its weight
  leaves the rest.
- *A sender tells nonsense* (NaN, wrong length): banned for this round, what it delivered in good order stays.
- *A reducer vanishes.* The next living reducer in member order becomes the span's coordinator. It asks the
  others for means that have arrived, and has the rest computed anew from the survivors' contributions, as
  float32, so that all end with the same bits (`colab_swarm.averaging.round`).
- *Nobody can give a chunk.* It is kept local and reported; in training, such a peer fetches the state
  afterwards.
- *An organizer lies* (groups that are none, endless refusals): passed over for half an hour.

**Security.** Only a worker's contribution counts; only members take part in a round. A claimed bandwidth
counts for 16 times the median at most, so a liar slows a round only so much. Not guarded against: plausible
but false values.

## Groups in turn: Moshpit

`swarm.average(array, weight=n)` averages any array among all who call at about the same time. The first
caller waits 5 s, those who met before wait only for each other. With many peers, or many failures, they are
laid out on a grid and average along one axis after the other: after one round per axis all have the exact
mean, and a failure costs only its own line (`colab_swarm.averaging.moshpit`, `moshpit`, `assembly`). Codecs
without error feedback lose values here for good.

    mean, result = swarm.average(gradient, weight=len(batch))

In training a round is one group, for all its peers must end with the same bits.

## The paper and the modules

Diskin et al., *Distributed Deep Learning in Open Collaborations* (DeDLOC), [arXiv
2106.10207](https://arxiv.org/abs/2106.10207); Ryabinin et al., *Moshpit SGD*, [arXiv
2103.03239](https://arxiv.org/abs/2103.03239).

| DeDLOC | module |
|---|---|
| section 3.2, equation 1: the linear program | `colab_swarm.averaging.strategy` |
| section 3.2: butterfly all-reduce over spans | `partition`, `reducer`, `exchange`, `pace` |
| section 3.2: recovery of a lost peer's span | `recovery`, `ledger` |
| groups without a fixed leader | `group`, `matchmaking`, `rooms`, `bars` |
| section 3.2 and appendix C: groups in turn | `grid`, `moshpit`, `assembly` |
| auxiliary peers (here: assistants) | `colab_swarm.training.assistant` |

Shares differ from the paper's rates for each pair of peers: a round of ours sends member j its share of every
vector and gets it back, so n shares determine all pairs. The program then needs no solver; limits of single
pairs go to HiGHS.

## Measured

4 peers, 18 M parameters, loopback, encrypted: 0.26 s a round, 2.5 all-reduces of unencrypted gloo. A full
step of 2.4 M values in float16, group included: 0.046 s with 4 processes, 0.103 s with 8 (hivemind 1.1.12:
0.183 s, 0.757 s). Adaptive shares gain 1.92 times over equal ones in DeDLOC's Table 1 C by prediction, 1.81
in simulation. Of averages of 16 processes in groups of 4 all were right (hivemind: 55 %). `python -m
colab_swarm.bench averaging`, `strategy` and `groups` measure again.
"""
