"""The arithmetic of the doctor's prediction and of its memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.net.metering import Speed
from colab_swarm.notebook.checks import PARAMETER_BYTES, USABLE, Prediction, Subject, fitting_batch, predict

MODEL = Subject("model", 1_000_000, sample_bytes=1.0, micro_batch=8, samples_per_s=10.0)
HOME = Speed(upload_bps=20e6, download_bps=100e6, rtt_s=0.05)


def predicted(others: tuple[float, ...], *, reduces: bool = True) -> Prediction:
    return predict(MODEL, 256, 2e6, others, HOME, reduces=reduces)


def test_two_equal_peers_take_half_of_a_step_each() -> None:
    found = predicted((10.0,))
    assert found.share == 0.5
    assert found.averaging_s == pytest.approx(
        2 * 0.05 + 8 * 2e6 / 20e6
    )  # 2 (n-1)/n of 2 MB, at the slower way
    assert found.step_s == pytest.approx((256 + 2 * 8) / 20 + found.averaging_s)
    assert found.gb_per_hour == pytest.approx(2 * 2e6 * 3600 / found.step_s / 1e9)


def test_a_late_joiner_first_downloads_the_state() -> None:
    found = predicted((10.0,))
    assert found.first_sample_s == pytest.approx(0.1 + 12e6 * 8 / 100e6 + 8 / 10)


def test_a_peer_alone_moves_nothing_and_fills_the_batch_by_itself() -> None:
    found = predict(replace(MODEL, micro_batch=10), 96, 4e3)
    assert (found.step_s, found.averaging_s, found.gb_per_hour, found.share) == (10.0, 0.0, 0.0, 1.0)


def test_a_peer_that_only_dials_out_sends_its_vector_once() -> None:
    reducer = predicted((10.0,) * 9)
    dialler = predicted((10.0,) * 9, reduces=False)
    assert (reducer.averaging_s - 0.1) / (dialler.averaging_s - 0.1) == pytest.approx(2 * 9 / 10)


@settings(deadline=None)
@given(
    st.floats(0, 1e12), st.floats(0, 1e12), st.lists(st.floats(0.01, 1e4), max_size=50), st.floats(0.01, 1e4)
)
def test_any_bandwidth_gives_finite_predictions(
    upload_bps: float, download_bps: float, others: list[float], own: float
) -> None:
    subject = replace(MODEL, samples_per_s=own)
    found = predict(subject, 256, 2e6, tuple(others), Speed(upload_bps, download_bps, 0.1))
    assert 0 < found.step_s < math.inf
    assert 0 < found.first_sample_s < math.inf
    assert 0 < found.share <= 1


@settings(deadline=None)
@given(st.floats(0, 1e12), st.integers(1, 10**9), st.floats(1e3, 1e9))
def test_the_suggested_micro_batch_fits_and_twice_as_much_does_not(
    free_bytes: float, parameters: int, sample_bytes: float
) -> None:
    size = fitting_batch(free_bytes, Subject("model", parameters, sample_bytes))
    room_bytes = USABLE * free_bytes - PARAMETER_BYTES * parameters
    assert size * sample_bytes <= max(room_bytes, 0)
    assert size == 512 or max(2 * size, 1) * sample_bytes > room_bytes
