import pickle
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.notebook.invitation import COPY, MAX_QR_CHARACTERS, Invitation
from tests.notebook.test_views import parsed, tags

LINE = "swarm://my-run.AbCd_-" + "x" * 300


def invitation(line: str = LINE, run: str = "my-run", uses: int | None = 3) -> Invitation:
    return Invitation(line, run=run, role="worker", expires_at=1_800_000_000.0, uses=uses)


def html(shown: Invitation) -> str:
    return str(shown._repr_mimebundle_()["text/html"])


@pytest.mark.parametrize(("uses", "words"), [(None, "any number of times"), (1, "once"), (3, "3 times")])
def test_role_expiry_and_uses_are_shown(uses: int | None, words: str) -> None:
    shown = invitation(uses=uses).described()
    assert shown == f"join my-run as worker, {words}, until 2027-01-15 08:00 UTC"


def test_an_invitation_is_its_text_and_can_be_pickled() -> None:
    assert invitation() == f"{invitation()}" == invitation()._repr_mimebundle_()["text/plain"] == LINE
    travelled = pickle.loads(pickle.dumps(invitation(uses=3)))
    assert travelled == invitation() and travelled.uses == 3 and travelled.role == "worker"


def test_the_html_has_text_code_and_badges_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.project.repository", lambda: "https://github.com/alice/swarm")
    page = html(invitation())
    tree = parsed(page)
    assert LINE in "".join(tree.itertext())
    where = "github.com/alice/swarm/blob/main/notebooks/swarm.ipynb"
    assert [link.attrib["href"] for link in tree.iter("a")] == [
        f"https://colab.research.google.com/{where.replace('.com', '', 1)}",
        f"https://kaggle.com/kernels/welcome?src=https://{where}",
    ]
    assert any(element.tag.endswith("svg") for element in tree.iter())
    assert not re.search(r"<script|src=\"|url\(|<img| on\w+=", page.replace(f' onclick="{COPY}"', "", 1))
    assert all("#" not in link.attrib["href"] for link in tree.iter("a"))  # no secret leaves by a badge


def test_without_a_known_repository_there_are_no_badges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.project.repository", lambda: None)
    assert list(parsed(html(invitation())).iter("a")) == [] and "paste the text" not in html(invitation())


def test_a_warning_is_shown_but_is_not_part_of_the_text() -> None:
    warned = Invitation(LINE, run="my-run", role="worker", expires_at=0.0, warning="Only <here>.")
    assert str(warned) == LINE
    assert warned._repr_mimebundle_()["text/plain"] == f"Only <here>.\n{LINE}"
    assert '<p class="warn">⚠ Only &lt;here&gt;.</p>' in html(warned)
    assert 'class="warn"' not in html(invitation())


def test_without_segno_or_for_a_long_text_words_replace_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at most 1,500 characters" in html(invitation("x" * (MAX_QR_CHARACTERS + 1)))
    monkeypatch.setitem(sys.modules, "segno", None)
    monkeypatch.setattr("colab_swarm.notebook.invitation.find_spec", lambda name: None)
    assert "pip install segno" in html(invitation())


@settings(max_examples=15)
@given(st.text(min_size=1, max_size=60) | st.just('"><script>alert(1)</script>'))
def test_texts_are_escaped(words: str) -> None:
    words = "".join(letter for letter in words if letter.isprintable())
    assert tags(html(invitation(line=words or "x", run=words))) <= tags(html(invitation()))
