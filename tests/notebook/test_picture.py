"""The picture in README shows the panel of today."""

import pytest

from tests.browser.picture import KEY, PICTURE, digest


def test_the_picture_shows_the_panel_of_today() -> None:
    Image = pytest.importorskip("PIL.Image")
    with Image.open(PICTURE) as picture:
        assert picture.text.get(KEY) == digest(), "the panel has changed: run `make picture`"
