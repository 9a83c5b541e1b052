import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast as Words

from colab_swarm.recipes.text import load_tokenizer, train_tokenizer

BENGALI = [
    "আজ সকালে আমি নদীর ধারে হাঁটতে গিয়েছিলাম। আকাশে মেঘ ছিল, বাতাসও ছিল ঠান্ডা।",
    "গ্রামের ছেলেরা মাঠে ফুটবল খেলছিল। তাদের শিক্ষক পাশে দাঁড়িয়ে হাসছিলেন।",
    "বাংলা ভাষায় অনেক সুন্দর গল্প আছে। আমার মা রাতে সেই গল্প শোনাতেন।",
    "বৃষ্টি নামলে আমরা ঘরে ফিরে এলাম। তখন চা আর মুড়ি খেতে খুব ভালো লাগল।",
]
PROGRAM = """
import hashlib
from colab_swarm.recipes.text import train_tokenizer
from tests.recipes.test_text import read
tokenizer = train_tokenizer(reversed(read("python-docs")), vocabulary=2000)
print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""


@pytest.mark.slow
def test_every_process_trains_the_same_tokenizer_whatever_its_order_of_text(tokenizer: Words) -> None:
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == digest


def test_text_is_normalised_and_comes_back(tokenizer: Words) -> None:
    ids = tokenizer("The\u00a0WITH\n\n  statement, ﬁrst", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "the with statement, first"


def test_digits_and_punctuation_stand_alone_and_new_letters_are_unknown(tokenizer: Words) -> None:
    assert {"(", "2", "0", "4", ")"} <= set(tokenizer.tokenize("(2024)"))
    assert tokenizer.unk_token_id in tokenizer("ক", add_special_tokens=False)["input_ids"]


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "garbled.json").write_text("{")
    with pytest.raises(ValueError, match="not a tokenizer file"):
        load_tokenizer(tmp_path / "garbled.json")
    bare = Words(tokenizer_object=Tokenizer(models.Unigram()))
    with pytest.raises(ValueError, match="no pad_token, cls_token, sep_token, mask_token"):
        load_tokenizer(bare)


def test_a_tokenizer_needs_text() -> None:
    with pytest.raises(ValueError, match="no text"):
        train_tokenizer([" ", ""], vocabulary=100)


@pytest.fixture(scope="module")
def bengali() -> Words:
    """Has letters that its pieces lack: the library scores them in random order."""
    first, *more = [train_tokenizer(BENGALI, vocabulary=80, language="bn") for _ in range(4)]
    assert {one.backend_tokenizer.to_str() for one in more} == {first.backend_tokenizer.to_str()}
    return first


def normalised(tokenizer: Words, text: str) -> str:
    return str(tokenizer.backend_tokenizer.normalizer.normalize_str(text))


def test_bengali_full_stops_and_visargas_are_normalised_and_other_languages_are_not(
    bengali: Words, tokenizer: Words
) -> None:
    stops = {normalised(bengali, f"আমি  যাই {typed}") for typed in ("\u0964", "\u09e4", "|", "\u09f7")}
    assert stops == {"আমি যাই \u0964"}
    assert normalised(bengali, "দু:খ অত: ৫:৩০ BBC: \u09e5") == "দুঃখ অতঃ ৫:৩০ bbc: \u0965"
    assert normalised(tokenizer, "A | b: দু:খ") == "a | b: দু:খ"


def test_bengali_text_comes_back_with_its_vowel_signs(bengali: Words) -> None:
    ids = bengali(BENGALI[0])["input_ids"]
    assert (ids[0], ids[-1], len(bengali)) == (2, 3, 80)
    assert bengali.decode(ids, skip_special_tokens=True) == normalised(bengali, BENGALI[0])


def test_the_mask_takes_the_space_before_it(bengali: Words, tmp_path: Path) -> None:
    bengali.save_pretrained(tmp_path)
    for source in (bengali, tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(source)
        assert loaded.get_vocab() == bengali.get_vocab() and loaded.mask_token_id == 4
        before, whole = (
            loaded(text, add_special_tokens=False)["input_ids"] for text in ("আমি", "আমি [MASK] যাই")
        )
        assert whole[: len(before) + 1] == [*before, loaded.mask_token_id]
        assert loaded("ж", add_special_tokens=False)["input_ids"][-1] == loaded.unk_token_id == 1
