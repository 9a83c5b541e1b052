import pytest
from transformers import PreTrainedTokenizerFast as Words

from colab_swarm.recipes.text import train_tokenizer
from tests.recipes.test_text import read


@pytest.fixture(scope="session")
def tokenizer() -> Words:
    return train_tokenizer(read("python-docs"), vocabulary=2000)
