"""Work units: VC-ASGD, training by volunteers who can only make plain HTTPS requests.

## The problem

Volunteers' machines may be preempted at any moment, and may sit behind any firewall that lets a browser through. Only
the coordinator must be reachable. A volunteer that vanishes costs one small piece of work.

    coordinator                                              volunteer (any number, anywhere)
      job = epochs x subsets = units       <--- POST units --- request work
      dispatcher: who trains what          ---- unit, deadline --->
                                           <--- GET data, parameters --- (data once: cached by SHA-256)
      validator                            <--- PUT result --------------  trains its subset
         |
       queue in the store --> parameter server:  W_s <- alpha W_s + (1 - alpha) W_c

Each result moves the server's parameters a little, in whatever order results arrive. With the
paper's `alpha = e/(e+1)` a result weighs one half in the first epoch, and less in each later one.

## Requests

Each carries `Authorization: Swarm2 …`: the version of the requests, the volunteer's membership and a signature over
method, path, digest of the body, nonce and time. It is valid once, for 60 s. Bodies are msgpack, data and parameters
are safetensors files.

| request | answers |
|---|---|
| `GET /api/job` | `JobCard`: the job with its Python code, signed by the coordinator |
| `POST /api/units` | `AskForUnits` -> `GivenUnits`; it also returns units that the volunteer will not train |
| `GET /api/data/SHA256`, `/api/parameters[/EPOCH-SUBSET]` | files, with ranges; parameters compressed on request |
| `PUT /api/results/ASSIGNMENT` | a result -> `Taken`, once it is checked |
| `/`, `/status.json`, `/metrics` | the status page, for people, programs and Prometheus |

## The log

The store's **log** of entries (`colab_swarm.workunits.state`) is the job. A decision of the dispatcher, a pure core,
is a list of entries that takes effect once they are in the log. So a coordinator may be killed between any two steps,
and the same call resumes the job. A parameter server replaces the parameters, logs the assimilation and removes the
result from the queue in one step: exactly once, whichever process is killed.

A unit's deadline is 600 s at first, then follows the times of earlier units, and doubles after each
expiry. A new or unreliable volunteer has 2 units in flight. A volunteer saves its unit every 30 s,
and counts as gone after 600 s of silence.

## Failures

- *A volunteer is preempted.* Its unit expires and goes to another volunteer. Reliable volunteers take such units first,
  others take them last. Restarted with the same folder, the volunteer resumes its unit. At the end of an epoch an idle
  volunteer gets a copy of an overdue unit; the first result counts.
- *Results are not finite, of other shapes, or far off* (`max_change`; at most 10 norms of the first parameters, or
  twice the change by one batch for each batch). They are refused. With `replication=3` a
  majority has to agree. Three bad results in a row, or every fourth, ban the volunteer, ever longer.
- *The connection breaks.* Downloads resume where they ended, uploads start over. A proxy's error page is retried too.
- *The coordinator, a server or the store is down.* Volunteers retry. SQLite and SQL databases lose nothing. In Redis
  two overlapping assimilations may lose one change of the values, as in the paper, but never an entry of the log.

**Security.** The link holds the coordinator's key and a grant (`colab_swarm.trust`). Sizes are
checked before a body is read, nothing of a request becomes a path, nothing is pickled. But:

- A volunteer runs the organizer's program without a sandbox. The code is signed, and you see it
  first. Volunteer for people you trust, or in a notebook that holds no secrets.
- Anyone with the link can join under many identities, hold units until their deadlines, and outvote
  others. Give short links to people you know (`coordinator.invite(hours=2)`).
- Without `https` in front (a tunnel, a proxy) data and parameters can be read on the network.

## How to use it

    %%writefile job.py
    import colab_swarm as cs, torch
    def model(): return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    def load(part): ...  # arrays, a torch Dataset or a datasets.Dataset; volunteers never call it
    job = cs.workunits.Job("my-job", model, data=lambda: load("train"), validation=lambda: load("test"),
                 plan=cs.workunits.WorkPlan(subsets=50, max_epochs=40, alpha="e/(e+1)", target_accuracy=0.9))

    coordinator = cs.workunits.coordinate("job.py", tunnel="cloudflared")     # or url="https://…"
    coordinator.link                                                # a link, a QR code, badges
    volunteer = cs.workunits.volunteer("https://…/#my-job.…", trust_code=True)  # read the code before you trust it
    coordinator.wait()
    model = coordinator.model()

`WorkPlan(needs=cs.workunits.Resources(cpu_cores=4, memory_gb=8, gpu_memory_gb=12))` keeps smaller machines out: such
a volunteer ends and says what it lacks. An older volunteer, which does not say what it has, gets no units then.

In a shell: `colab-swarm coordinate job.py`, `colab-swarm volunteer LINK --trust-code`. Peers of a
swarm use `swarm.coordinate(job)`, `swarm.volunteer()`, and `swarm.contributions()` lists their accepted units;
volunteers by a link see theirs on the status page. `store="redis://…"`, PostgreSQL or MariaDB
hold the state elsewhere (with the extra `workunits`). `job.train_serially()` is the baseline.

## The paper and the modules

Atre, Jha and Rao, *Distributed Deep Learning Using Volunteer Computing-Like Paradigm* (VC-ASGD), [arXiv
2103.08894](https://arxiv.org/abs/2103.08894): equation 1 is in `weights`; work generator, scheduler and validator
(after BOINC) in `job`, `dispatcher`, `weights`; the parameter servers of section III-D in `servers`; eventual and
strong consistency (IV-D) in `redis_store`, `sql_store`; preemptible machines (IV) in `colab_swarm.experiments.vc_asgd`.

## Measured

Two cores of a shared virtual machine, over loopback:

- `store.redis_ms`, `sqlite_ms`, `sql_ms`: assimilating a result of 5 M parameters (VC-ASGD: Redis
  870 ms, MySQL 1,290 ms): **24 ms, 39 ms, 266 ms**
- `workunits.p1c3t8_vs_p3c3t8`: time per epoch with 1 parameter server against 3, which are the bottleneck: **1.36**
- `vc_asgd.serial_minus_best`: accuracy lost to work units after 40 epochs (VC-ASGD: 9 points): **2.0 points**
- `work_ordeal.once`: units assimilated exactly once, 20 kills of the coordinator, 76 of volunteers: **360 of 360**

Those of VC-ASGD are as published. In a copy of the repository, `python -m tests.benchmarks parameter-store`, `vc-asgd`,
`work-ordeal` or `workunits` measures again.
"""

from colab_swarm.workunits.coordinator import coordinate
from colab_swarm.workunits.job import Job, WorkPlan
from colab_swarm.workunits.messages import Resources
from colab_swarm.workunits.volunteering import volunteer

__all__ = ["Job", "Resources", "WorkPlan", "coordinate", "volunteer"]
