"""Train what you already train: other libraries' trainers drive the swarm's optimizer.

- `colab_swarm.integrations.transformers`: the Hugging Face `Trainer`, and those of TRL, which inherit it.
- `colab_swarm.integrations.lightning`: automatic and manual optimisation.
- `colab_swarm.integrations.trackers`: the swarm's metrics to TensorBoard, W&B or trackio.

accelerate needs no more than ``accelerator.prepare(model, swarm.optimizer(optimizer, batch_size=…, …))``; instead of its
``LocalSGD`` pass ``local_steps=8`` to `Swarm.optimizer`. Adapters of peft train with ``model=get_peft_model(…)``: only
they travel, and a peer with another base is refused.

Each module imports its library, which you have installed.
"""
