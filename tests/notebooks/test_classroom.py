"""A class of three in one room: the teacher and two pupils run the same notebook, each in a kernel of its own."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel, opened

TRIES = 12
NAMES = "print(*sorted(peer.name for peer in swarm.snapshot().peers))"


def come_in(kernel: Kernel, **form: object) -> str:
    kernel.run()
    kernel.run(**form)
    return kernel.run().splitlines()[-1]


def percent(shown: str) -> int:
    (share,) = re.findall(r"all others: (\d+)%", shown)
    return int(share)


def all_at_once(kernels: list[Kernel], **form: object) -> list[str]:
    with ThreadPoolExecutor(len(kernels)) as pool:
        return list(pool.map(lambda kernel: kernel.run(**form), kernels))


def train_until_it_reads(kernels: list[Kernel], each: int) -> None:
    """Run the cells that train for some steps and print the accuracy, until it is high enough."""
    for _ in range(TRIES):
        steps = each + max(int(kernel.execute("print(optimizer.global_step)")) for kernel in kernels)
        all_at_once(kernels, STEPS=steps)
        shares = [percent(kernel.run()) for kernel in kernels]
        if min(shares) > 60:
            return
        for kernel in kernels:
            kernel.next -= 2
    raise AssertionError(f"step {steps}: {shares}")


@pytest.mark.slow
def test_pupils_with_three_digits_each_learn_all_ten_though_one_sends_nonsense(tmp_path: Path) -> None:
    first, second, third = (opened("classroom", tmp_path) for _ in range(3))
    with first as teacher, second as otter, third as fox:
        come_in(teacher, I_AM_THE_TEACHER=True)
        line = teacher.execute("print(board.address)").strip()
        assert come_in(otter, BOARD=line) == "You are the otter"
        assert come_in(fox, BOARD=line) == "You are the fox"
        kernels = [teacher, otter, fox]
        for kernel in kernels:
            shown = [kernel.run() for _ in range(5)]
            assert percent(shown[-1]) < 40
            kernel.run()
        train_until_it_reads(kernels, 15)
        assert "fox otter teacher" in teacher.execute(NAMES)
        otter.run(INCIDENT="nonsense")
        fox.run(INCIDENT="slow")
        teacher.run()
        train_until_it_reads(kernels, 5)
        assert "not finite" in otter.execute("print(*swarm.events.recent(), sep='\\n')")
        for kernel in reversed(kernels):
            kernel.run_all()
