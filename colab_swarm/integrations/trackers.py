"""The swarm's metrics in TensorBoard, W&B or trackio, from any peer, by one call:

track(swarm, SummaryWriter("runs"))     # TensorBoard
track(swarm, wandb.init(project="…"))   # or trackio, after trackio.init(…)
"""

from collections.abc import Callable
from typing import Any

from colab_swarm.errors import require
from colab_swarm.events import Event, StepFinished
from colab_swarm.swarm.swarm import Swarm


def track(swarm: Swarm, tracker: Any, *, name: str = "model") -> Callable[[], None]:
    """Log loss, samples, speed and peers at each step that the swarm takes with this peer.

    Args:
        tracker: an object with a method ``add_scalar(name, value, step)``, such as TensorBoard's writer, or
            ``log(metrics, step=…)``, such as a run of W&B and the module trackio.
        name: name of the model, as given to `Swarm.optimizer`.

    Returns:
        A function that ends the logging.

    Raises:
        TypeError: the tracker has neither method.
    """
    writes = hasattr(tracker, "add_scalar")
    text = f"{tracker!r} has neither add_scalar nor log: pass a writer or a run"
    require(writes or hasattr(tracker, "log"), text, TypeError)

    def on_event(event: Event) -> None:
        if not isinstance(event, StepFinished) or name not in swarm.optimizers:
            return
        metrics = {**swarm.optimizers[name].metrics(), "swarm_samples": event.samples}
        if event.loss is not None:
            metrics["loss"] = event.loss
        if not writes:
            tracker.log(metrics, step=event.step)
            return
        for key, value in metrics.items():
            tracker.add_scalar(key, value, event.step)

    return swarm.events.listen(on_event)
