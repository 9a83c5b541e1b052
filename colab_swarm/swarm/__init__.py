"""The `Swarm` object and how a peer gets one: creating, joining, resuming, simulating.

| what | module |
|---|---|
| `Swarm`, one peer's membership in a run | `colab_swarm.swarm.swarm` |
| its parts: training, rights, session, network, work units | `trained`, `membership`, `session`, `network`, `work` |
| `create`, `join`, `resume` | `colab_swarm.swarm.joining` |
| the folder that saves a peer between sessions | `colab_swarm.swarm.saved` |
| what panels show of it | `colab_swarm.swarm.overview` |
| `simulate`, and simulated runs with controls | `colab_swarm.swarm.simulation`, `lesson` |
| the doctor; a class in one room | `colab_swarm.swarm.doctor`, `classroom` |
"""
