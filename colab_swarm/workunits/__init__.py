"""Work units: VC-ASGD, training by volunteers who can only make plain HTTPS requests.

## What problem it solves

Volunteers whose machines may be taken away at any moment, behind anything that lets a browser through: no
open port, no long-lived connection, no peer but one coordinator. What is lost when one vanishes is one small
piece of work.

## The idea

    coordinator                                              volunteer (any number, anywhere)
      job = epochs x subsets = units       <--- POST units --- give me work
      dispatcher: who trains what          ---- unit, deadline --->
                                           <--- GET data, parameters --- (data once: cached by SHA-256)
      validator                            <--- PUT result, in pieces ---  trains its subset
         |
       queue in the store --> parameter server:  W_s <- alpha W_s + (1 - alpha) W_c

Each result moves the server's parameters a little, in whatever order they come. With the paper's `alpha =
e/(e+1)` a result weighs a half in the first epoch, and less in each that follows.

## Requests

All carry `Authorization: Swarm …`: the volunteer's membership and a signature over method, path, body's
digest, nonce and time; one is good once and for 60 s. Bodies are msgpack, data and parameters safetensors
files.

| request | answers |
|---|---|
| `GET /api/job` | `JobCard`: what there is to train, signed by the coordinator |
| `GET /api/code` | the job's Python text; its SHA-256 is in the card |
| `POST /api/units` | `AskForUnits` -> `GivenUnits` |
| `GET /api/data/SHA256`, `/api/parameters[/EPOCH-SUBSET]` | files, with ranges |
| `HEAD`, `PUT /api/results/ASSIGNMENT` | bytes that are here; a piece -> `Taken` |
| `POST /api/return` | `GiveBack`: I will not train these |
| `/`, `/status.json`, `/metrics` | the page, the same for programs, for Prometheus |

## States of a unit

    Assigned -> Accepted -> Assimilated -> Measured                   then EpochEnded, and at last Finished
       |  \\-> Returned -> Accepted | Rejected                        with replicas, until a majority agrees
       |  \\-> Rejected                                               of no use: somebody else
       |---> Expired                                                 its deadline passed: somebody else
       \\---> GaveBack

The store's **log** of these entries is the job. Every decision of the dispatcher (a pure core) is a list of
entries that count once they are in the log, and its state is the log applied from the beginning. So a
coordinator may be killed between any two steps; the same call goes on. A parameter server replaces the
parameters, logs the assimilation and empties the queue's place in one step: exactly once, whoever is killed.

## Times

| what | value |
|---|---|
| a unit's deadline | 600 s at first, then by the times of those before; twice as long after each that expired |
| units in flight of a new or unreliable volunteer | 2 |
| a volunteer that was not heard of is taken to be gone | 600 s |
| a unit is saved on the volunteer's disk | every 30 s |
| a parameter server has a result for itself | 120 s, then another may take it |
| a first ban | 10 minutes, each twice as long as the one before |

## What goes wrong

- *A volunteer is preempted.* Its unit expires and goes to somebody else, the reliable first. Restarted with
  the same folder, it goes on with the unit in hand.
- *Results that are not finite, of other shapes, or far off* (`max_change`) are refused; with `replication=3`
  a majority has to agree. Three bad results in a row, or every fourth, and the volunteer is banned for a
  while.
- *The line breaks.* Uploads and downloads go on where they ended. A proxy's error page is trouble like any
  other.
- *The coordinator, a server or the store is gone.* Volunteers come again later. Nothing is lost in SQLite and
  SQL databases; in Redis two overlapping assimilations may lose one's change of the values, as the paper has
  it, but never an entry of the log.

**Security.** The link holds the coordinator's key and a grant (`colab_swarm.trust`). Sizes are checked before
a body is read, nothing of a request becomes a path, nothing is pickled. But:

- A volunteer runs the program that the job's organizer wrote. It is shown first and its digest is signed;
  nothing fences it in. Volunteer for people you trust, or in a notebook that holds no secrets.
- Whoever has the link can come under many identities, hold units until their deadlines, and outvote others.
  Give links to people you know, and short ones (`coordinator.invite(hours=2)`).
- Without `https` in front (a tunnel, a proxy) data and parameters are seen by whoever listens.

## How to use it

    %%writefile job.py
    import colab_swarm as cs, torch
    def model(): return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    def load(part): ...  # arrays, a torch Dataset or a datasets.Dataset; volunteers never call it
    job = cs.workunits.Job("my-job", model, data=lambda: load("train"), validation=lambda: load("test"),
                 plan=cs.workunits.WorkPlan(subsets=50, max_epochs=40, alpha="e/(e+1)", target_accuracy=0.9))

    coordinator = cs.workunits.coordinate("job.py", tunnel="cloudflared")     # or url="https://…"
    coordinator.link                                                # a line, a QR code, badges
    volunteer = cs.workunits.volunteer("https://…/#my-job.…", trust_code=True)  # read the code before you trust it
    volunteer.watch()
    coordinator.wait()
    model = coordinator.model()

In a shell: `colab-swarm coordinate job.py`, `colab-swarm volunteer LINK --trust-code`. In a swarm
`swarm.coordinate(job)` and `swarm.volunteer()` find each other. `store="redis://…"`, PostgreSQL or MariaDB
keep the state elsewhere (`pip install "colab-swarm[workunits]"`), `servers=3` takes three parameter servers,
else there are as many as the results need. `job.train_serially()` is the baseline;
`colab_swarm.workunits.preemption` reckons what preemptible machines save.

## The paper and the modules

Atre, Jha and Rao, *Distributed Deep Learning Using Volunteer Computing-Like Paradigm* (VC-ASGD), [arXiv
2103.08894](https://arxiv.org/abs/2103.08894).

| section | module |
|---|---|
| equation 1, VC-ASGD | `colab_swarm.workunits.weights`, `parameter_server` |
| III-D: parameter servers, eventual consistency (Redis) | `redis_store`, `crew`, `staffing` |
| IV: preemptible machines, price and time | `colab_swarm.workunits.preemption` |
| IV-D: strong consistency (SQL) | `sql`, `sqlite` |
| work generator, scheduler, validator (after BOINC) | `job`, `dispatcher`, `validator`, `reliability` |

## Measured

Assimilating 5 M parameters takes 39 ms in Redis, 32 ms in SQLite, 302 ms in SQL (paper: Redis 870 ms, MySQL
1,290 ms). After 40 epochs on digits 2.0 points of accuracy are lost against serial training (paper, CIFAR-10:
9). With the coordinator killed 20 times and volunteers 76 times, 360 of 360 units were assimilated exactly
once. `python -m colab_swarm.bench parameter-store`, `vc-asgd`, `work-ordeal` and `workunits` measure again.
"""

from __future__ import annotations

from colab_swarm.workunits.coordinator import coordinate
from colab_swarm.workunits.job import Job, WorkPlan
from colab_swarm.workunits.volunteering import volunteer

__all__ = ["Job", "WorkPlan", "coordinate", "volunteer"]
