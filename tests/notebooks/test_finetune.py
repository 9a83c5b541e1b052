"""Two friends fine-tune an adapter: alice starts and has TRL, bob joins from Colab, which has none."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.kernel import CellFailed, Kernel, opened

COLAB = (
    'import sys; sys.modules["trl"] = None\nfrom tests.notebooks.cells import stand_in_for_colab as on_colab'
)
FORM = {"MODEL": "", "TARGET_BATCH_SIZE": 32, "MAX_STEPS": 40}
# Else the first one may take all steps before the other one begins.
BEGIN_TOGETHER = """
import pathlib, time
class BothAreThere(hf.TrainerCallback):
    def on_train_begin(self, *arguments, **more):
        here = pathlib.Path({meeting!r})
        (here / swarm.name).touch()
        while len(list(here.iterdir())) < 2:
            time.sleep(0.02)
trainer.add_callback(BothAreThere())
"""
KEEP = """
frozen = [one for one in trainer.model.parameters() if not one.requires_grad]
kept = [one.detach().clone() for one in frozen]
"""
UNTOUCHED = "print(len(kept) > 10 and all(map(torch.equal, kept, frozen)))"
LOSSES = 'print([log["loss"] for log in trainer.state.log_history if "loss" in log])'
TOGETHER = """
from colab_swarm.events import RoundFinished
print(sum(one.group_size == 2 for one in swarm.events.recent(RoundFinished)))
"""


def run_to(kernel: Kernel, line: str, **form: object) -> str:
    """Run cells until the next begins with the ``line``."""
    shown = []
    while not kernel._cells[kernel.next].startswith(line):
        shown.append(kernel.run(**form))
    return "\n".join(shown)


def asked(kernel: Kernel, code: str) -> Any:
    return ast.literal_eval(kernel.execute(code))


def come_in(bob: Kernel, **form: object) -> None:
    bob.execute(f"{COLAB}; on_colab()")
    bob.run()
    bob.run(**form)
    with pytest.raises(CellFailed, match="accept_terms=True"):
        bob.run()
    bob.next -= 1
    bob.run(**form, I_HAVE_READ_THE_TERMS=True)
    assert "Swarm(finetune-together, bob, 1 peer linked)" in bob.run()


def refused_with_another_base(bob: Kernel) -> None:
    bob.execute("frozen[0].data += 1")
    with pytest.raises(CellFailed, match=r"(?s)MismatchError.*frozen base"):
        bob.run()
    bob.execute("frozen[0].data.copy_(kept[0])")


@pytest.mark.slow
def test_friends_with_and_without_trl_train_one_adapter_and_leave_the_base_alone(tmp_path: Path) -> None:
    homes = {name: tmp_path / name for name in ("alice", "bob")}
    for home in homes.values():
        home.mkdir()
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    first, second = (opened("finetune_together", home, HF_HUB_OFFLINE="1") for home in homes.values())
    with first as alice, second as bob:
        assert "finetune-together as worker" in run_to(alice, "FACTS", MY_NAME="alice", **FORM)
        invitation = alice.execute("print(swarm.invite(settings=wanted))").strip()
        come_in(bob, INVITATION=invitation, MY_NAME="bob")
        for kernel in (alice, bob):
            assert "17,408" in run_to(kernel, "from colab_swarm.integrations")
            kernel.execute(KEEP + BEGIN_TOGETHER.format(meeting=str(meeting)))
        alice.run()
        refused_with_another_base(bob)
        assert "from step 0" in bob.run()
        with ThreadPoolExecutor(2) as pool:
            panels = [*pool.map(Kernel.run, (alice, bob))]
        assert all(re.search(r"finetune-together:.{,30}training, step [1-9]", panel) for panel in panels)
        for kernel in (alice, bob):
            losses = asked(kernel, LOSSES)
            assert losses[-1] < losses[0] / 3 and asked(kernel, UNTOUCHED) and asked(kernel, TOGETHER) > 5
            assert "What does the otter eat?" in kernel.run()
        same = "print((optimizer.lineage, optimizer.global_step, after))"
        assert asked(alice, same) == asked(bob, same) and asked(bob, same)[1:] == (
            40,
            asked(alice, "print(after)"),
        )
        assert "The otter eats crayfish" in asked(alice, "print(after)")[0]
        shown = [kernel.run_all(HUB_NAME="me/adapter") for kernel in (alice, bob)]
        assert all("not pushed" in one[0] for one in shown)
    assert all((home / "adapter" / "adapter_model.safetensors").exists() for home in homes.values())
