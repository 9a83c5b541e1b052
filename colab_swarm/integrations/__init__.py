"""Use the swarm's optimizer with the trainers of other libraries.

- `colab_swarm.integrations.transformers`: the Hugging Face `Trainer`, and the trainers of TRL, which inherit it.
- `colab_swarm.integrations.lightning`: automatic and manual optimisation.

accelerate needs no module: ``accelerator.prepare(model, swarm.optimizer(optimizer, batch_size=…, …), loader)``.
Instead of accelerate's ``LocalSGD``, pass ``communication="diloco"`` to `Swarm.optimizer`. Instead of
``accelerator.clip_grad_norm_``, pass ``max_grad_norm=1.0``.

For another framework, use `SwarmOptimizer.hooks`: call ``hooks.next_step(samples=…, loss=…)`` before the framework
calls ``step()``, put ``hooks.running()`` around its loop, and end the loop when ``hooks.over`` is true.

Adapters of peft train with ``model=get_peft_model(…)``. Only the adapters are sent, and a peer with another base model
is refused.

Each module imports its library, which you must have installed.
"""
