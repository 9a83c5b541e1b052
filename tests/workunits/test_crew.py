"""Parameter servers come, go and are replaced."""

from __future__ import annotations

from colab_swarm.workunits.assimilation import WorkerPool, code_of_servers
from colab_swarm.workunits.job import Job


class Fellow:
    """A server that lives until it is dismissed or killed."""

    def __init__(self, name: str) -> None:
        self.name, self.living, self.waited = name, True, False

    def alive(self) -> bool:
        return self.living

    def stop(self) -> None:
        self.living = False

    def wait(self, timeout_s: float) -> None:
        self.waited = True


class Scene:
    def __init__(self) -> None:
        self.hired: list[Fellow] = []
        self.crew = WorkerPool(self._hire)

    def _hire(self, name: str) -> Fellow:
        self.hired.append(Fellow(name))
        return self.hired[-1]

    def living(self) -> list[str]:
        return [fellow.name for fellow in self.hired if fellow.living]


def test_as_many_work_as_are_wanted() -> None:
    scene = Scene()
    for wanted, names in ((2, ["server-1", "server-2"]), (1, ["server-1"]), (2, ["server-1", "server-3"])):
        scene.crew.keep(wanted, now=0.0)
        assert scene.living() == names and scene.crew.size == wanted
    assert scene.crew.deaths == 0


def test_the_dead_are_replaced_after_ever_longer_rests() -> None:
    scene = Scene()
    scene.crew.keep(1, now=0.0)
    rests = []
    now = 0.0
    for _ in range(8):
        scene.hired[-1].living = False
        died_at = now
        scene.crew.keep(1, now=now)
        while not scene.crew.size:
            now += 1.0
            scene.crew.keep(1, now=now)
        rests.append(now - died_at)
    assert rests == [2, 4, 8, 16, 32, 60, 60, 60] and scene.crew.deaths == 8


def test_all_are_waited_for_at_the_end() -> None:
    scene = Scene()
    scene.crew.keep(3, now=0.0)
    scene.crew.close()
    assert scene.living() == [] and all(fellow.waited for fellow in scene.hired)
    assert scene.crew.size == 0


def test_servers_measure_by_the_plan_that_the_coordinator_has_not_by_the_files() -> None:
    code = "import torch\nimport colab_swarm as cs\njob = cs.workunits.Job('tiny', torch.nn.Identity, (), ())"
    job = Job.from_code(code, "job.py").with_plan(seed=7, validation_samples=5)
    found = Job.from_code(code_of_servers(job), "job.py of servers").plan
    assert (found.seed, found.validation_samples) == (7, 5)
