"""Train what you already train: other libraries' trainers drive the swarm's optimizer.

- `colab_swarm.integrations.transformers`: the Hugging Face `Trainer`, and those of TRL, which inherit it.
- `colab_swarm.integrations.lightning`: automatic and manual optimisation.

accelerate needs no module: ``accelerator.prepare(model, swarm.optimizer(optimizer, batch_size=…, …), loader)``.
Another framework is driven through `SwarmOptimizer.hooks`: ``hooks.next_step(samples=…, loss=…)`` before the ``step()``
that it calls itself, ``hooks.running()`` around its loop, which ends when ``hooks.over``. Instead of accelerate's
``LocalSGD`` pass ``communication="diloco"`` to `Swarm.optimizer`, and instead of ``accelerator.clip_grad_norm_``
``max_grad_norm=1.0``.

Adapters of peft train with ``model=get_peft_model(…)``: only they travel, and a peer with another base is refused.

Each module imports its library, which you have installed.
"""
