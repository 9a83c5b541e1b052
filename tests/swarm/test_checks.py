"""The doctor's checks on made-up facts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import colab_swarm as cs
from colab_swarm.net.reachability import Reachability
from colab_swarm.net.reachability import ReachabilityLevel as Level
from colab_swarm.net.speed import Speed
from colab_swarm.notebook.platforms import COLAB, KAGGLE, PLAIN
from colab_swarm.project import install
from colab_swarm.swarm import calibration
from colab_swarm.swarm import doctor as checks
from colab_swarm.swarm.calibration import Subject
from colab_swarm.swarm.doctor import GREEN, RED, WIDTH, YELLOW, Check, Diagnosis, Gpus, Light
from colab_swarm.training.settings import Due, TrainingSettings
from colab_swarm.training.timing import Turn
from tests.notebook.test_views import parsed

CU128 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
T4 = Gpus("Tesla T4", 1, 14_500_000_000, 15_600_000_000, (7, 5), CU128, bfloat16=False)
P100 = replace(T4, name="Tesla P100", capability=(6, 0))
A100 = replace(T4, name="NVIDIA A100", capability=(8, 0), bfloat16=True)
GB = 10**9
DIRECT = Reachability(Level.DIRECT, addresses=("ws://203.0.113.7:4500",))
LARGE = Subject("ALBERT-large at 512 tokens", 18_105_474, 1_605_894_144.0)


@pytest.mark.parametrize(
    ("found", "light", "fix"),
    [
        (checks.check_platform(PLAIN), GREEN, ""),
        (checks.check_internet(PLAIN, True), GREEN, ""),
        (checks.check_versions({"torch": "2.9.0+cu126"}), GREEN, ""),
        (checks.check_compute(8, 9 * GB, T4, LARGE), GREEN, ""),
        (checks.check_swarm("demo", linked=2, training=2), GREEN, ""),
        (checks.check_reachability(DIRECT), GREEN, ""),
        (checks.check_clock(0.2), GREEN, ""),
        (checks.check_bandwidth(Speed(20e6, 100e6, 0.05)), GREEN, ""),
        (checks.check_platform(COLAB), YELLOW, "accept_terms=True"),
        (checks.check_internet(PLAIN, False), YELLOW, "cs.join()"),
        (checks.check_internet(KAGGLE, False), RED, "switch Internet on"),
        (checks.check_versions({"torch": ""}), RED, install("train")),
        (checks.check_versions({"transformers": ""}), YELLOW, install("train")),
        (checks.check_compute(8, 9 * GB, None, LARGE), YELLOW, "Colab and Kaggle"),
        (checks.check_compute(8, 9 * GB, replace(T4, free_bytes=GB), LARGE), RED, "smaller model"),
        (checks.check_swarm("demo", 0, 0), YELLOW, "swarm.invite()"),
        (checks.check_reachability(Reachability(Level.OUTGOING)), YELLOW, "colab-swarm create"),
        (checks.check_reachability(Reachability(Level.UNVERIFIED)), YELLOW, "run the doctor again"),
        (checks.check_reachability(Reachability(Level.RELAYED, "by 3f")), YELLOW, "nothing to do"),
        (checks.check_clock(-90.0), YELLOW, "set-ntp"),
        (checks.check_clock(900.0), RED, "set-ntp"),
        (checks.check_bandwidth(None), YELLOW, "run the doctor again"),
        (checks.check_bandwidth(Speed(1e6, 1e8, 0.1)), YELLOW, "communication='int8'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_healthy_peer_is_green_and_each_problem_has_its_fix(found: Check, light: Light, fix: str) -> None:
    assert found.light is light and fix in found.fix


@pytest.mark.parametrize(
    ("gpus", "is_rank", "lights"),
    [
        (A100, False, {}),
        (T4, False, {"precision": YELLOW}),
        (replace(T4, count=2), False, {"precision": YELLOW, "GPUs": YELLOW}),
        (replace(T4, count=2), True, {"precision": YELLOW}),
        # torch was not built for it, and nothing else is said
        (replace(P100, count=2), False, {"GPU": RED}),
    ],
)
def test_gpus_that_cannot_do_all_or_idle_are_found(
    gpus: Gpus, is_rank: bool, lights: dict[str, Light]
) -> None:
    assert {check.name: check.light for check in checks.check_gpus(gpus, is_rank=is_rank)} == lights


def test_each_problem_of_a_gpu_says_what_to_run() -> None:
    precision, idle = checks.check_gpus(replace(T4, count=2))
    assert "fp16=True, bf16=False" in precision.fix
    assert "bnb_4bit_compute_dtype=torch.float16" in precision.fix
    assert "torchrun --nproc_per_node=2 train.py" in idle.fix and "2 × Tesla T4" in idle.text
    (unusable,) = checks.check_gpus(P100)
    assert "not for Tesla P100 (sm_60)" in unusable.text and "GPU T4 x2" in unusable.fix


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((6, 0), CU128, False),
        ((6, 0), ["sm_50", "sm_60", "sm_70"], True),
        ((7, 5), ["sm_70"], True),
        ((7, 0), ["sm_75"], False),
        ((8, 9), CU128, True),
        ((9, 0), ["sm_90a"], True),
        ((13, 0), CU128, True),
        ((13, 0), CU128[:-1], False),
        ((9, 4), ["gfx90a", "gfx942"], True),
        ((6, 0), [], True),
    ],
)
def test_code_for_an_architecture_runs_on_later_minor_versions_and_ptx_on_all_later_gpus(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert checks.runs_on(capability, architectures) is runs


RELAYED = Reachability(Level.RELAYED, "by 3fa9c0de", reasons=((Level.DIRECT, "nobody could dial 10.0.0.2"),))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (checks.check_reachability(RELAYED), "relayed by 3fa9c0de; not direct: nobody could dial 10.0.0.2"),
        (
            checks.check_compute(8, 9 * GB, T4, replace(LARGE, samples_per_s=12.34)),
            ": 4, measured speed: 12.3 samples/s",
        ),
        (checks.check_bandwidth(Speed(math.inf, 1e9, 0.0)), "too fast to measure up, 1 Gbit/s down"),
    ],
)
def test_what_was_measured_is_told(found: Check, text: str) -> None:
    assert text in found.text


def turns(*spent: tuple[Due, float, float], copied_bytes: int = 0) -> list[Turn]:
    """What `step()` did, the seconds before it and in it; each copies so many bytes."""
    return [
        Turn(float(index), due, index * copied_bytes, own_s, step_s)
        for index, (due, own_s, step_s) in enumerate(spent)
    ]


def told(alone_s: float, spent: list[Turn], **options: object) -> dict[str, tuple[str, str]]:
    communication = cs.Communication(**options)  # type: ignore[arg-type]
    settings = TrainingSettings("prefix", 256.0, communication=communication)
    return {name: (words, fix) for name, words, fix in calibration.advice(alone_s, spent, settings)}


BATCH = (Due.NOTHING, 0.039, 0.001)
LOCAL = (Due.LOCAL_STEP, 0.038, 0.006)
LOCALLY = {"local_steps": 30, "compression": "sparseloco"}
LARGER = "larger micro-batches"
OTHER = "other work on this machine"


@pytest.mark.parametrize(
    ("alone_s", "usual", "options", "factor", "fix"),
    [
        (0.037, BATCH, {}, "1.08", ""),
        (0.042, LOCAL, LOCALLY, "1.05", ""),
        # the first run on a GPU: a micro-batch's step() took six times as long as computing, a local step ten times
        (0.037, (Due.NOTHING, 0.039, 0.210), {}, "6.73", LARGER),
        (0.042, (Due.LOCAL_STEP, 0.040, 0.400), LOCALLY, "10.48", LARGER),
        # two processes shared the GPU
        (0.037, (Due.NOTHING, 0.063, 0.001), {}, "1.73", OTHER),
        (0.042, (Due.LOCAL_STEP, 0.063, 0.006), LOCALLY, "1.64", OTHER),
        (0.037, (Due.ROUND, 0.039, 2.0), {}, "55.11", ""),
    ],
)
def test_a_step_is_compared_with_one_alone(
    alone_s: float, usual: tuple[Due, float, float], options: dict[str, object], factor: str, fix: str
) -> None:
    words, advised = told(alone_s, turns(*[usual] * 5), **options)["step"]
    assert words.startswith(f"a step here takes {factor} of what it takes alone, {alone_s * 1e3:.0f} ms: ")
    assert (fix in advised) if fix else not advised


SPARSE = "pass cs.Communication('sparseloco', local_steps={}) at all peers (see swarm.plan)"
OVERLAP = f"{SPARSE}, or overlap=True"


@pytest.mark.parametrize(
    ("options", "own_s", "round_s", "fix"),
    [
        ({}, 2.0, 4.0, OVERLAP.format(30)),
        ({"overlap": True}, 2.0, 4.0, SPARSE.format(30)),
        ({"local_steps": 10}, 2.0, 4.0, OVERLAP.format(30)),
        (LOCALLY, 2.0, 4.0, OVERLAP.format(60)),
        ({**LOCALLY, "overlap": True}, 2.0, 4.0, SPARSE.format(60)),
        ({}, 1.0, 0.0, ""),
        ({}, 1.0, 0.3, ""),
        ({}, 1.0, 0.4, OVERLAP.format(30)),
    ],
)
def test_a_round_that_takes_much_of_the_time_is_told_with_the_setting_to_change(
    options: dict[str, object], own_s: float, round_s: float, fix: str
) -> None:
    usual = Due.LOCAL_STEP if "local_steps" in options else Due.NOTHING
    period = [*[(usual, own_s, 0.0)] * 2, (Due.ROUND, own_s, round_s)]
    words, advised = told(own_s, turns(*period * 4, copied_bytes=10**8), **options)["rounds"]
    assert words.startswith(f"a round takes {round_s:.2f} s of every {3 * own_s + round_s:.2f} s")
    assert words.endswith("and copies 275 MB to and from devices")
    assert advised == fix


def test_landing_and_catching_up_count_as_time_of_rounds_and_a_break_of_the_loop_does_not() -> None:
    landing = [(Due.LANDING, 1.0, 0.5), (Due.CATCH_UP, 1.0, 1.3)]
    period = [(Due.LOCAL_STEP, 1.0, 0.0), (Due.ROUND, 1.0, 0.2), *landing]
    spent = turns(*period * 3, (Due.LOCAL_STEP, 600.0, 0.0))
    assert told(1.0, spent, **LOCALLY)["rounds"][0].startswith("a round takes 2.00 s of every 6.33 s")
    assert "rounds" not in told(0.037, turns(BATCH, BATCH)), "there was none"


GOOD = Check("disk", GREEN, "50.0 GB free here")
LOOK = Check("bandwidth", YELLOW, "1 Mbit/s up: slow", "use a cable")
STOP = Check("versions", RED, "torch 2.8 is older than 2.9", 'pip install -U "torch>=2.9"')


def html(*found: Check) -> str:
    return Diagnosis(found)._repr_mimebundle_()["text/html"]


def test_text_shows_each_light_with_its_fix() -> None:
    assert str(Diagnosis((GOOD, LOOK, STOP))).splitlines() == [
        "fix the problems before you train: 1 ✔ good, 1 ▲ warning, 1 ✖ problem",
        " ✔ disk           50.0 GB free here",
        " ▲ bandwidth      1 Mbit/s up: slow",
        "                  → use a cable",
        " ✖ versions       torch 2.8 is older than 2.9",
        '                  → pip install -U "torch>=2.9"',
    ]
    _, first, second, *more = str(Diagnosis((Check("compute", GREEN, "word " * 60),))).splitlines()
    assert all(len(line) <= WIDTH for line in (first, second, *more)) and second.startswith(" " * 18 + "word")


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ((GOOD,), "ready to train: 1 ✔ good"),
        ((GOOD, LOOK), "ready to train, with warnings: 1 ✔ good, 1 ▲ warning"),
        ((STOP,), "fix the problems before you train: 1 ✖ problem"),
    ],
)
def test_the_worst_light_decides(found: tuple[Check, ...], verdict: str) -> None:
    assert repr(Diagnosis(found)) == f"Diagnosis({verdict})"


def test_the_html_has_symbols_words_and_fixes() -> None:
    page = parsed(html(GOOD, LOOK, STOP))
    text = " ".join(page.itertext())
    assert all(fact in text for fact in ("50.0 GB", "use a cable", 'pip install -U "torch>=2.9"'))
    marks = [span.text for span in page.iter("span") if span.text and span.text[0] in "✔▲✖"]
    assert marks == ["✔\xa0good", "▲\xa0warning", "✖\xa0problem"]
    names = [name.attrib["style"] for name in page.iter("b") if name.text == "disk"]
    assert names == ["white-space:nowrap"]


@given(st.floats(0, 1e12), st.integers(1, 10**9), st.floats(1e3, 1e9))
def test_the_suggested_micro_batch_fits_and_twice_as_much_does_not(
    free_bytes: float, parameters: int, sample_bytes: float
) -> None:
    size = calibration.fitting_batch(free_bytes, Subject("model", parameters, sample_bytes))
    room_bytes = calibration.USABLE * free_bytes - calibration.PARAMETER_BYTES * parameters
    assert size * sample_bytes <= max(room_bytes, 0)
    assert size == 512 or max(2 * size, 1) * sample_bytes > room_bytes
