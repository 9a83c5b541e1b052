"""What this machine can do for a swarm, what stands in the way, and how to mend it.

`cs.doctor(invitation)` or `colab-swarm doctor INVITATION` looks at machine, line, clock, platform and
reachability, predicts speed and traffic, and says for each red light what to do. Probes fill in frozen facts;
the judgement is a pure function.

| what | module |
|---|---|
| the examination | `colab_swarm.diagnosis.doctor` |
| probes of the machine; of a swarm | `colab_swarm.diagnosis.machine`, `swarm` |
| what was found; None: it could not be told | `colab_swarm.diagnosis.facts` |
| traffic lights with their fixes | `colab_swarm.diagnosis.checks` |
| how fast and how large a model is | `colab_swarm.diagnosis.calibration` |
| what training will be like | `colab_swarm.diagnosis.predict` |

The line to a peer is measured by `colab_swarm.net.speed`. What it shows in a notebook is
`colab_swarm.widgets.doctor`.
"""
