"""DeDLOC's averaging: groups, spans, the streaming reducer, one round.

## The problem

Peers on unequal, unreliable links need the weighted mean of one long vector: a gradient, or a model's parameters. All
peers that finish a round must hold the same bits, even if peers die on the way.

## The idea

Every member of a group reduces one *span* of the vector for all others (butterfly all-reduce).
Contributions go up, and means come back while contributions still flow, in *chunks* of one packet:

                 span 0 (alice)   span 1 (bob)   span 2 (carol)
    alice       [    mine     ]--->[    ]--------->[        ]         up: 1 - my share of the vector
    bob          [   ]<-----------  mine  -------->[        ]         back: the means of the other spans
    carol        [   ]<------------[    ]<---------   mine            the shares determine each link's time

A linear program over the measured bandwidths decides the shares: a peer with a slow upload reduces less, one with a
fast link more. `RoundFinished.explanation` gives the reason in one sentence.

## Messages

| message | from, to | content |
|---|---|---|
| `Attend(contact, key, terms, target)` | peer to organizer | opens the stream on which it stands there |
| `StepReport(step, lineage, counted, ticket)` | peer to organizer | what it holds, has counted, and offers |
| `News(key, granted, group, organizer)` | back | a grant, the group, another organizer, or the first step here |
| `Whereabouts(prefix, key)` | peer to peer | where do you stand, and do you have the group after this one? |
| `ReduceSpan(round_id)` | member to reducer | opens the stream: `Chunk` up, `Chunk` back |
| `RecallSpan(round_id, reducer, wanted)` | survivor to survivor | opens the stream of a lost reducer's chunks |

## States of a round

    Attend --> organizer --Formation--> group --exchange--> means --(recovery)--> RoundResult
                                          |                                          |
                              all that stand there get it                on_round, RoundFinished

- **Organizer.** A group names the organizer of the next one (`rendezvous`). Before the first group it is the peer that
  came first and can be dialled, by the DHT records. If it is lost, all go to the next one of the last group's order.
- **Closing a group.** In training a group closes when its batch is full (`grants`, `forming`). A meeting closes when
  its units are there, or 5 s after its first ticket (`assembly`).
- **Agreement.** All members have the same step, lineage (`colab_swarm.averaging.group`), layout of
  the vector, and codecs.
- **A chunk** is finished when all members that are still expected have delivered it. Its mean never
  changes afterwards.

## Times

Each member of a round has the limit of what it has shown: the median time of its parts and five median deviations, at
least twice the median and 2 s, 5 s while nothing is known (`colab_swarm.net.patience`). It counts from when something
came of the member, so a slow line is not late. A few round trips are added, and where bandwidths are known, three times
the forecast.

A member that exceeds its limit is dropped from the round and left out for 60 s, twice as long each further time, at
most 30 min: `events.Waited`. Later rounds do not wait for it, but count what comes before the others are done. One
counted contribution ends it. Where more than half of the members are late, nobody is left out, as this peer's own line
is the likely cause; nor where this process was stopped.

A round takes 120 s at most, or three times its forecast, recovery included. Dialling a member takes 3 s at most. An
organizer of which no byte came for 5 s is asked whether it is there, and has 3 s for the answer. Nobody's count of
samples is late while its round, or the organizer's own, is not over.

## Failures

Rounds never raise for another peer's failure; `RoundResult` shows it.

- *A sender vanishes.* It counts in the chunks that it has sent, at all members, and in no others.
  Its weight leaves the rest.
- *A sender sends invalid data* (NaN, values 10,000 times larger than the median of the last ten means, wrong
  length): it is dropped from this round, and its valid chunks stay.
- *A reducer vanishes.* The next live reducer in member order becomes the span's coordinator. It
  collects the means that have arrived, and recomputes the rest from the survivors' contributions as
  float32.
- *No member can give a chunk.* Its values stay local and are reported. In training, such a peer
  then fetches the state.
- *A reducer misbehaves.* A mean that is not finite, or as much too large, counts as lost, and so does a stream that
  breaks off before the last mean. Nobody checks other means. But each member takes the digests of the means that came,
  on a pool thread beside the exchange: one that got another mean has another lineage.
- *An organizer vanishes, or its group is invalid.* Peers leave it out for 15 s, doubled up to a minute, and go to the
  next one.

**Security.** Only a worker's contribution counts, and only members take part in a round. A claimed bandwidth counts for
16 times the median at most, and a 16th at least. Not guarded against: plausible but false values, of a contribution or
of a reducer's mean (`colab_swarm.trust`).

## Several groups: Moshpit averaging

`colab_swarm.averaging.moshpit` averages a vector among all peers that call at about the same time.
It closes 5 s after the first caller; peers that met before, or that came too late, wait only for
each other. Many peers, or unreliable ones, are arranged on a grid and average along one axis after
the other. After one round per axis all have the exact mean, and a failed peer costs only its own
line. Codecs without error feedback lose values for good here.

In training a round is one group, because all its peers must end with the same bits.

## The papers and the modules

Diskin et al., *Distributed Deep Learning in Open Collaborations* (DeDLOC), [arXiv
2106.10207](https://arxiv.org/abs/2106.10207); Ryabinin et al., *Moshpit SGD*, [arXiv
2103.03239](https://arxiv.org/abs/2103.03239).

| DeDLOC | module |
|---|---|
| section 3.2, equation 1: the linear program | `colab_swarm.averaging.strategy` |
| section 3.2: butterfly all-reduce over spans | `group`, `exchange`, `reducer` |
| section 3.2: recovery of a lost peer's span | `recovery` |
| groups without a fixed leader | `rendezvous`, `forming`, `grants` |
| section 3.2 and appendix C: several groups | `assembly`, `moshpit` |
| auxiliary peers (here: assistants) | `colab_swarm.training.assistant` |

Here member j gets its share of every vector and returns it, so n shares determine the paper's rates
of all pairs, and the program needs no solver.

## Measured

Two cores of a shared virtual machine, over loopback, encrypted:

- `averaging.seconds`, `vs_gloo`: a round of 4 peers, 18 M parameters; in gloo's all-reduces: **0.26 s, 2.5**
- `averaging.success`: rounds that succeeded: **100 %**
- `averaging.step_s_4`, `_8`: a full step, 4 and 8 processes, 2.4 M values, float16: **0.046 s, 0.103 s** (hivemind:
  0.183 s, 0.757 s)
- `averaging.allreduce_s_4`, `_8`: the averaging in it: **0.035 s, 0.078 s**
- `averaging.groups_success`: correct averages of 16 processes in groups of 4: **100 %** (hivemind: 55 %)
- `strategy.speedup_c`: adaptive shares against equal ones, DeDLOC's Table 1 C, predicted (simulated: 1.81): **1.92**
- `strategy.solve_ms_64`: planning a round of 64 peers: **0.5 ms**

Those of hivemind are of version 1.1.12 on the same kind of machine. In a copy of the repository,
`python -m tests.benchmarks averaging`, `strategy` or `groups` measures again. ``averaging --vs hivemind --python PATH``
compares with hivemind in an environment of its own.
"""
