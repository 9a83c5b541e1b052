"""The face of work units: coordinate a job, volunteer for one.

`cs.coordinate("job.py")` hands a job out, `cs.volunteer(link)` works for one; `swarm.coordinate` and
`swarm.volunteer` do the same inside a swarm, where peers find the coordinator in the DHT. How it works is on
the page of `colab_swarm.workunits`.

| what | module |
|---|---|
| `cs.coordinate`, its options, its status | `colab_swarm.jobs.coordinator`, `view` |
| `cs.volunteer` | `colab_swarm.jobs.volunteer` |
| the link that lets volunteers in | `colab_swarm.jobs.link` |
| inside a swarm | `colab_swarm.jobs.in_swarm` |
"""
