"""Ready to run: models with their data, the way the papers trained them.

| call | what | source |
|---|---|---|
| `cs.recipes.albert("tiny", text="python-docs", swarm=swarm)` | ALBERT on any text | DeDLOC, section 4.2 |
| `cs.recipes.albert("large", text={…: share}, language="bn", batch_size=None, swarm=swarm)` | sahajBERT | section 4.3 |
| `cs.recipes.swav(…)` | image features from pictures without labels | Caron et al. 2020 |
| `cs.recipes.parameter_groups(model)` | no decay for biases and layer norms | |

Text is streamed, shuffled and mixed by shares (`{"texts/wiki*.parquet": 0.23, "me/web-text:bn": 0.77}`); each
peer reads it in an order of its own. `batch_size=None` takes the micro-batch that should fit your GPU.
`albert_optimizer(model, "large")` has the published settings (`colab_swarm.recipes.masked_lm`).
`notebooks/sahajbert.ipynb` is the whole run, `notebooks/reproduce` draws the papers' figures anew.
"""

from __future__ import annotations

from colab_swarm.recipes.image_features import swav
from colab_swarm.recipes.masked_lm import albert, parameter_groups

__all__ = ["albert", "parameter_groups", "swav"]
