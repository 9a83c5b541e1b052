"""The output of the commands: lines for people, or JSON."""

import json
import sys
from typing import Any

from rich.console import Console

from colab_swarm.cli.command import Output
from colab_swarm.events import Event, ReachabilityChanged, RoundFinished, StateReceived, StepFinished
from colab_swarm.markup import count
from colab_swarm.swarm.swarm import Swarm


def say(text: str) -> None:
    """Print a line, with colours for its numbers and links in a terminal."""
    Console(markup=False, emoji=False, soft_wrap=True).print(text)
    sys.stdout.flush()


def report(output: Output, event: str, text: str = "", /, **facts: Any) -> None:
    if output.json_lines:
        print(json.dumps({"event": event, **facts}), flush=True)
    else:
        say(text or f"{event:>9}  {_shown(facts)}")


def _shown(facts: dict[str, Any]) -> str:
    words: list[str] = []
    for name, fact in facts.items():
        if isinstance(fact, float):
            words.append(f"{name} {fact:.4g}")
        elif fact is not None:
            words.append(f"{name} {fact}")
    return "  ".join(words)


def report_event(output: Output, swarm: Swarm, event: Event) -> None:
    match event:
        case StepFinished(step=step, samples=samples, loss=loss):
            snapshot = swarm.snapshot()
            facts = {
                "loss": loss,
                "peers": sum(row.role == "trainer" for row in snapshot.peers),
                "step": step,
                "samples": samples,
                "swarm_samples_per_s": snapshot.samples_per_s,
            }
            report(output, "step", step_line(facts), **facts)
        case RoundFinished(group_size=size, seconds=seconds, spans_lost=lost, kept_local=kept):
            if output.json_lines or lost:  # a step's line is enough for a round without losses
                report(output, "round", peers=size, seconds=seconds, spans_lost=lost, kept_local=kept)
        case ReachabilityChanged(how=how):
            report(output, "reached", how=how)
        case StateReceived(step=step, size_bytes=size, seconds=seconds, donors=donors):
            report(output, "state", step=step, bytes=size, seconds=seconds, donors=len(donors))


def step_line(step: dict[str, Any], last: int = 0) -> str:
    """Return the line of a step; ``last`` is the step at which the training ends, 0 if none is set."""
    loss = "" if step["loss"] is None else f"loss {step['loss']:.3f}   "
    goal = f"/{last}" if last else ""
    speed = ""
    # The speed is known after two rounds.
    if step["swarm_samples_per_s"]:
        speed = f"   {step['swarm_samples_per_s']:.1f} samples/s"
    return f"step {step['step']:>4}{goal}   {loss}{count(step['peers'], 'peer')}{speed}"


def report_facts(output: Output, facts: dict[str, str]) -> None:
    for kind, fact in facts.items():
        report(output, kind, f"{kind:>9}  {fact}", **{kind: fact})
