"""The `Swarm` object and how a peer gets one: creating, joining, resuming, simulating.

| what | module |
|---|---|
| `Swarm`, one peer's membership in a run | `colab_swarm.swarm.swarm` |
| a peer on the real network, and the end of a platform's session | `colab_swarm.swarm.network` |
| `create`, `join`, and the folder that saves a peer | `colab_swarm.swarm.joining`, `saved` |
| files that travel with an invitation's settings | `colab_swarm.swarm.shared_files` |
| other ways to train: experts, work units, elastic groups | `colab_swarm.swarm.experts`, `work`, `elastic` |
| what panels show of a peer, and what a training loop prints | `colab_swarm.swarm.overview`, `script` |
| what a terminal shows of a peer | `colab_swarm.swarm.logbook` |
| `simulate`, and simulated runs with controls | `colab_swarm.swarm.simulation` |
| the doctor, and how it measures a model | `colab_swarm.swarm.doctor`, `calibration` |
| a class in one room | `colab_swarm.swarm.classroom` |
"""
