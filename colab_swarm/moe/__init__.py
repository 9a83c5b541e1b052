"""Learning@home's mixture of experts: peers host experts, trainers find and call them. See README.md here."""

from colab_swarm.moe.blocks import FeedForward, PaperTransformerBlock, TransformerBlock
from colab_swarm.moe.expert import PAPER_RULE, ExpertRule

__all__ = ["PAPER_RULE", "ExpertRule", "FeedForward", "PaperTransformerBlock", "TransformerBlock"]
