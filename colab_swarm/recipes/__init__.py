"""Models with their data, ready to train with the papers' settings.

| call | model | source |
|---|---|---|
| `cs.recipes.albert("tiny", text="python-docs", swarm=swarm)` | ALBERT on any text | DeDLOC, section 4.2 |
| `cs.recipes.albert("large", text={…: weight}, language="bn", batch_size=None)` | sahajBERT | section 4.3 |
| `cs.recipes.swav(…)` | image features without labels | Caron et al. 2020; section 4.1 |
| `cs.recipes.muon(model)` | Muon for hidden matrices, AdamW for the rest | MuLoCo (arXiv 2505.23725) |
| `cs.recipes.parameter_groups(model)` | no decay for biases and layer norms | |
| `cs.recipes.half_precision(device)` | float16 with a loss scale, or bfloat16, by the GPU | section 4.3 |
| `cs.recipes.evaluate("sahajbert", "ner")` | fine-tunes a model, scored beside Table 2 | section 4.3 |

Text is streamed, shuffled and mixed by weights (`{"texts/wiki*.parquet": 0.23, "me/web-text:bn": 0.77}`); each peer
reads it in a different order. `batch_size=None` chooses the micro-batch that fits your GPU.
`colab_swarm.recipes.masked_lm.albert_optimizer(model, "large")` has the published settings.
`notebooks/sahajbert.ipynb` is the whole run with fine-tuning; `notebooks/reproduce` repeats the papers' figures.
"""

from colab_swarm.recipes.downstream import evaluate
from colab_swarm.recipes.image_features import swav
from colab_swarm.recipes.masked_lm import albert, half_precision, parameter_groups
from colab_swarm.recipes.muon_adamw import muon

__all__ = ["albert", "evaluate", "half_precision", "muon", "parameter_groups", "swav"]
