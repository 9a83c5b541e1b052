"""Ready to run: models with their data, the way the papers trained them.

| call | what | source |
|---|---|---|
| `cs.albert("tiny", text="python-docs", swarm=swarm)` | ALBERT on any text, and its batches | DeDLOC, section 4.2 |
| `cs.albert("large", text={…: share}, language="bn", batch_size=None, swarm=swarm)` | sahajBERT | section 4.3 |
| `cs.swav(…)` | image features from pictures without labels | Caron et al. 2020 |
| `cs.parameter_groups(model)` | no decay for biases and layer norms | |
| `python -m colab_swarm.recipes.finetune ner MODEL DATA` | fine-tunes the result | section 4.3 |

Text is streamed, shuffled and mixed by shares (`{"texts/wiki*.parquet": 0.23, "me/web-text:bn": 0.77}`); each
peer reads it in an order of its own. `batch_size=None` takes the micro-batch that should fit your GPU.
`albert_optimizer(model, "large")` has the published settings (`colab_swarm.recipes.hyperparameters`).
`notebooks/sahajbert.ipynb` is the whole run, `notebooks/reproduce` draws the papers' figures anew.
"""
