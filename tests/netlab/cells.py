"""The four cells of `notebooks/swarm.ipynb`, in a process that shows no form: python -m tests.netlab.cells STEPS."""

import contextlib
import io
import json
import sys
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tests.notebooks.cells import code_cells
from tests.notebooks.kernel import NOTEBOOKS


def main() -> None:
    shell: Any = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for cell in code_cells(NOTEBOOKS / "swarm.ipynb")[:-1]:
            shell.run_cell(cell.replace("max_steps=1000", f"max_steps={sys.argv[1]}")).raise_error()
    swarm, optimizer = shell.user_ns["swarm"], shell.user_ns["optimizer"]
    weights = float(sum(one.double().sum() for group in optimizer.param_groups for one in group["params"]))
    links = {peer.hex()[:8]: swarm.services.peers.way_to(peer) for peer in swarm.services.peers.linked()}
    fact = {"step": optimizer.global_step, "weights": weights, "links": links, "said": said.getvalue()}
    print(json.dumps(fact), flush=True)
    sys.stdin.read()
    swarm.leave()


if __name__ == "__main__":
    main()
