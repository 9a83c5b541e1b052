"""Plain English, one word for each thing, one class of each name; the files that the architecture names exist."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / ".github/ARCHITECTURE.md").read_text(encoding="utf-8")
GLOSSARY = {
    term.strip(): [word.strip() for word in re.sub(r"\(.*?\)", "", words).split(",") if word.strip()]
    for term, _, words in re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|([^|]*)\|$",
        PAGE.partition("## Glossary")[2],
        re.MULTILINE,
    )
}
REJECTED = {word: term for term, words in GLOSSARY.items() for word in words if word not in ("not", "node")}


def texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [
        ROOT / name
        for name in listed.split()
        if name.endswith((".py", ".md", ".ipynb", ".html"))
        and name not in {"tests/test_words.py", ".github/ARCHITECTURE.md"}
    ]


def found(pattern: str) -> list[str]:
    matcher = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in texts()
        if path.exists()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if matcher.search(line)
    ]


@pytest.mark.parametrize("word", REJECTED)
def test_there_is_one_word_for_a_thing(word: str) -> None:
    assert found(re.escape(word)) == [], f"the glossary calls it {REJECTED[word]}"


def test_no_two_public_classes_share_a_name() -> None:
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "colab_swarm").rglob("*.py"))]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def test_the_files_named_in_the_architecture_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    homes = (ROOT, ROOT / "colab_swarm")
    assert named and not [name for name in named if not any((home / name).exists() for home in homes)]
