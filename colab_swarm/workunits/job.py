"""A training job: the pieces that a user writes, and the plan by which it is cut into work units.

A volunteer needs the model, the loss and the optimizer; data and validation stay with the coordinator, which hands
out the data in subsets. So that volunteers elsewhere can get the pieces, a job lies in a file of its own
(`Job.load`); its text is what the coordinator sends, and what a volunteer reads before running it.
"""

from __future__ import annotations

import hashlib
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from colab_swarm.markup import facts, name_of, settings

if TYPE_CHECKING:
    from colab_swarm.workunits.training import SerialResult


Batch: TypeAlias = tuple[Tensor, ...] | dict[str, Tensor]

Array: TypeAlias = npt.NDArray[Any]

Indices: TypeAlias = npt.NDArray[np.int64]

KINDS = "biuf"

"""NumPy kinds of a column: bool, int, uint, float."""

MAX_DECODED_BYTES = 1 << 30

LEVEL = 3


@dataclass(frozen=True)
class Rows:
    """Samples as columns.

    Attributes:
        columns: arrays (n, …) by name.
        named: whether batches are dictionaries, else tuples in the order of the columns.
    """

    columns: Mapping[str, Array]
    named: bool

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return sum(column.nbytes for column in self.columns.values())

    def take(self, indices: Indices) -> Rows:
        """These samples."""
        return Rows({name: column[indices] for name, column in self.columns.items()}, self.named)

    def sample(self, count: int, *, seed: int) -> Rows:
        """At most ``count`` samples, the same ones for the same seed."""
        if count >= len(self):
            return self
        return self.take(np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False)))

    def cut(self, subsets: int, *, seed: int) -> list[Rows]:
        """All samples in so many parts, of sizes that differ by one at most."""
        order = np.random.default_rng(seed).permutation(len(self))
        return [self.take(part) for part in np.array_split(order, subsets)]

    def batch(self, indices: Indices, device: torch.device) -> Batch:
        """These samples as tensors."""
        tensors = {
            name: torch.from_numpy(column[indices]).to(device) for name, column in self.columns.items()
        }
        return tensors if self.named else tuple(tensors.values())

    def encode(self) -> bytes:
        """As safetensors, compressed by zstd.

        Raises:
            ValueError: they are too many for `decode`.
        """
        names = list(self.columns)
        head = {
            "rows": msgspec.json.encode((names, self.named)).decode()
        }  # one key: their order is by chance
        columns = {name: np.ascontiguousarray(column) for name, column in self.columns.items()}
        if self.size_bytes > MAX_DECODED_BYTES:
            raise ValueError(
                f"a subset of {self.size_bytes:,} bytes: cut the data into more, by plan.subsets"
            )
        return zstandard.ZstdCompressor(level=LEVEL).compress(save(columns, metadata=head))

    @classmethod
    def decode(cls, data: bytes) -> Rows:
        """What `encode` made.

        Raises:
            ValueError: it is something else, or too large.
        """
        try:
            size = zstandard.frame_content_size(data)
            if not 0 <= size <= MAX_DECODED_BYTES:
                raise ValueError(f"a subset of {size:,} bytes: {MAX_DECODED_BYTES:,} at most")
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_DECODED_BYTES)
            head = _metadata(plain)
            names, named = msgspec.json.decode(head["rows"], type=tuple[list[str], bool])
            columns = load(plain)
            rows = cls({name: columns[name] for name in names}, named)
            _check(rows)
        except (zstandard.ZstdError, SafetensorError, LookupError, msgspec.MsgspecError, TypeError) as error:
            raise ValueError(f"not a subset of data: {error}") from error
        return rows


class _Head(msgspec.Struct, rename={"metadata": "__metadata__"}):
    metadata: dict[str, str]


def _metadata(plain: bytes) -> dict[str, str]:
    """What `safetensors.numpy.load` leaves out."""
    size = int.from_bytes(plain[:8], "little")
    return msgspec.json.decode(plain[8 : 8 + size], type=_Head).metadata


def rows_of(data: Any) -> Rows:
    """Samples from what a user has: see `Job`.

    Raises:
        ValueError: there are no samples, or the columns differ in length or hold no numbers.
        TypeError: it is of a kind that has no rows.
    """
    if callable(data):
        data = data()
    if isinstance(data, Rows):
        return data
    if isinstance(data, Mapping):
        rows = Rows({str(name): _array(column) for name, column in data.items()}, named=True)
    elif isinstance(data, tuple | list) and data and hasattr(data[0], "shape"):
        rows = Rows({str(place): _array(column) for place, column in enumerate(data)}, named=False)
    elif hasattr(data, "column_names") and hasattr(data, "with_format"):  # datasets.Dataset
        numbers = data.with_format("numpy")
        rows = Rows({name: _array(numbers[name][:]) for name in data.column_names}, named=True)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):  # torch's Dataset
        rows = _stacked([data[place] for place in range(len(data))])
    else:
        raise TypeError(
            f"data of type {type(data).__name__} has no rows: give arrays, a torch Dataset or a datasets.Dataset"
        )
    _check(rows)
    return rows


def _stacked(samples: Sequence[Any]) -> Rows:
    if not samples:
        raise ValueError("the data hold no sample")
    if isinstance(samples[0], Mapping):
        return Rows({str(name): _column(one[name] for one in samples) for name in samples[0]}, named=True)
    width = len(samples[0])
    return Rows({str(place): _column(one[place] for one in samples) for place in range(width)}, named=False)


def _column(values: Iterable[Any]) -> Array:
    return np.stack([_array(value) for value in values])


def _array(values: Any) -> Array:
    array = np.asarray(values.detach().cpu()) if isinstance(values, Tensor) else np.asarray(values)
    native = array.dtype.newbyteorder("=")  # torch knows no other
    return array.astype(np.float32 if native == np.float64 else native, copy=False)


def _check(rows: Rows) -> None:
    if not rows.columns:
        raise ValueError("the data have no column")
    for name, column in rows.columns.items():
        if column.dtype.kind not in KINDS:
            raise ValueError(f"column {name} holds {column.dtype}: rows are numbers, tokenize or drop it")
    lengths = {name: column.shape[:1] for name, column in rows.columns.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        raise ValueError(
            f"the columns differ in length: { {name: n[0] if n else 'none' for name, n in lengths.items()} }"
        )
    if not len(rows):
        raise ValueError("the data hold no sample")


NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

MAX_CODE_CHARACTERS = 1 << 20

UNITS_PER_VOLUNTEER = 4

"""Of an epoch, where the plan names no number of subsets: enough that a slow volunteer does not hold up the rest."""

BATCHES_PER_UNIT = 4

MAX_SUBSET_BYTES = 64 << 20

EPOCHS_TRIED = 1000

"""So many are asked of a function for alpha before the job begins."""

Alpha: TypeAlias = float | Literal["e/(e+1)"] | Callable[[int], float]


@dataclass(frozen=True)
class WorkPlan:
    """How a job is cut into units, and how their results are taken.

    Attributes:
        subsets: parts of the data, which are the units of an epoch; None: of the data's size and the volunteers.
        expected_volunteers: how many, for the default of ``subsets``.
        local_epochs: how often a volunteer goes through its subset in a unit.
        batch_size: samples of one local step.
        max_epochs: the job ends then.
        target_accuracy: or when the mean accuracy of an epoch reaches this; None: never.
        alpha: weight of the server's parameters in ``W_s <- alpha W_s + (1 - alpha) W_c``: a number in [0, 1),
            ``e/(e+1)``, or a function of the epoch e, from 1 (VC-ASGD, equation 1).
        replication: volunteers that train each unit; beyond 1 a majority has to agree.
        tolerance: distance of two replicas that agree, as a share of the change that training made.
        deadline_s: a unit that is not back then goes to somebody else; None: by the times of the units before.
        in_flight: units that a volunteer may hold.
        max_change: a result is refused if training moved it more than so many times as far as it usually does.
        validation_samples: bound on those whose accuracy is measured after each assimilation.
        seed: of the subsets, of the order of samples and of the first parameters.
    """

    subsets: int | None = None
    expected_volunteers: int = 4
    local_epochs: int = 1
    batch_size: int = 32
    max_epochs: int = 10
    target_accuracy: float | None = None
    alpha: Alpha = "e/(e+1)"
    replication: int = 1
    tolerance: float = 0.05
    deadline_s: float | None = None
    in_flight: int = 8
    max_change: float = 10.0
    validation_samples: int = 1000
    seed: int = 0

    def __repr__(self) -> str:
        return settings(self)

    def __post_init__(self) -> None:
        counts = (
            "expected_volunteers",
            "local_epochs",
            "batch_size",
            "max_epochs",
            "replication",
            "in_flight",
            "validation_samples",
        )
        for name in (*counts, "subsets", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) and (name, value) != ("subsets", None):
                raise ValueError(f"{name}={value}: it must be a whole number, such as {name}=int(…)")
            if name in counts and value < 1:
                raise ValueError(f"{name}={value}: it must be 1 at least")
        if self.subsets is not None and self.subsets < 1:
            raise ValueError(f"subsets={self.subsets}: it must be 1 at least, or None for a default")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(
                f"deadline_s={self.deadline_s}: it must be over 0, or None to follow the volunteers"
            )
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise ValueError(f"target_accuracy={self.target_accuracy}: a share between 0 and 1")
        if not (self.tolerance > 0 and self.max_change > 0):
            raise ValueError(f"tolerance={self.tolerance}, max_change={self.max_change}: both must be over 0")
        for epoch in {*range(1, min(self.max_epochs, EPOCHS_TRIED)), self.max_epochs}:
            self.alpha_of(epoch)

    def alpha_of(self, epoch: int) -> float:
        """The weight of the server's parameters in ``epoch``, from 1.

        Raises:
            ValueError: it is not in [0, 1).
        """
        if callable(self.alpha):
            alpha = float(self.alpha(epoch))
        elif self.alpha == "e/(e+1)":
            alpha = epoch / (epoch + 1)
        elif isinstance(self.alpha, str):
            raise ValueError(f"alpha={self.alpha!r}: a number, 'e/(e+1)' or a function of the epoch")
        else:
            alpha = float(self.alpha)
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha is {alpha} in epoch {epoch}: it must be at least 0 and below 1")
        return alpha

    def subsets_of(self, rows: int, size_bytes: int) -> int:
        """How many subsets ``rows`` samples of ``size_bytes`` are cut into.

        Raises:
            ValueError: there are fewer samples than subsets.
        """
        if self.subsets is None:
            wanted = self.expected_volunteers * UNITS_PER_VOLUNTEER
            most = max(1, rows // (BATCHES_PER_UNIT * self.batch_size))
            return min(rows, max(min(wanted, most), -(-size_bytes // MAX_SUBSET_BYTES)))
        if rows < self.subsets:
            raise ValueError(f"subsets={self.subsets}, but there are only {rows} samples: fewer subsets")
        return self.subsets


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of ``model(inputs)`` with the labels, for batches of (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def share_correct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Share of samples whose highest output is their label's, for batches of (inputs, labels)."""
    inputs, labels = batch
    return float((model(inputs).argmax(-1) == labels).float().mean())


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Adam with a learning rate of 0.001, as the paper has it (section IV-A)."""
    return torch.optim.Adam(parameters, lr=1e-3)


@dataclass(frozen=True)
class Job:
    """A model to train by work units.

    Attributes:
        name: of the job, for people.
        model: makes the model. Integer buffers travel as float32 and are rounded.
        data: what it learns, or a function that loads it: a tuple or dictionary of arrays or tensors with one row
            per sample, a torch ``Dataset`` of finite length, or a ``datasets.Dataset``.
        validation: the same, for the accuracy.
        loss: mean loss of a model on a batch; a batch has the columns of the data, as a tuple or a dictionary.
        optimizer: made anew for each unit (the paper's clients do the same), over the model's parameters.
        accuracy: of a model on a batch, between 0 and 1.
        plan: how the job is cut into units.
        code: text of the file that the job was loaded from; volunteers run it.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Any = field(repr=False)
    validation: Any = field(repr=False)
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adam
    accuracy: Callable[[nn.Module, Any], float] = share_correct
    plan: WorkPlan = WorkPlan()
    code: str = field(default="", repr=False)

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.plan!r})"

    def _repr_html_(self) -> str:
        makers = {part: getattr(self, part) for part in ("model", "loss", "optimizer", "accuracy")}
        told = {part: name_of(maker) for part, maker in makers.items()}
        return facts(f"Job {self.name}", told | {"plan": repr(self.plan)})

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is no job name: use up to 63 of a-z, 0-9, '.', '_', '-', such as 'digits-mlp'"
            )

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Return the ``job = cs.workunits.Job(…)`` that a Python file defines.

        In a notebook, ``%%writefile job.py`` makes the file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it defines no job, or is too long.
        """
        return cls.from_code(Path(path).read_text(encoding="utf-8"), str(path))

    @classmethod
    def from_code(cls, code: str, origin: str) -> Job:
        """Run ``code``, and take the ``job`` that it defines.

        Args:
            code: Python.
            origin: where it is from, for messages and tracebacks.

        Raises:
            ValueError: it defines no job, or is too long.
        """
        if len(code) > MAX_CODE_CHARACTERS:
            raise ValueError(
                f"{origin} has {len(code):,} characters: a job takes {MAX_CODE_CHARACTERS:,} at most"
            )
        module = ModuleType(f"colab_swarm_job_{hashlib.sha256(code.encode()).hexdigest()[:12]}")
        module.__file__ = origin
        sys.modules[module.__name__] = module  # classes in it look themselves up there
        linecache.cache[origin] = (len(code), None, code.splitlines(keepends=True), origin)
        exec(compile(code, origin, "exec"), module.__dict__)
        job = getattr(module, "job", None)
        if not isinstance(job, cls):
            raise ValueError(f"{origin} defines no job: end it with job = cs.workunits.Job(…)")
        return replace(job, code=code)

    def with_plan(self, **changes: Any) -> Job:
        """The same job with other settings of the plan: ``job.with_plan(alpha=0.95, subsets=50)``."""
        return replace(self, plan=replace(self.plan, **changes))

    def first_model(self) -> nn.Module:
        """The model with the first parameters, the same at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.plan.seed)
            return self.model()

    def train_serially(self, *, on_epoch: Callable[[int, float], None] | None = None) -> SerialResult:
        """Train on all data in one place, without units: the baseline; see `colab_swarm.workunits.training`.

        Args:
            on_epoch: told each epoch, from 1, and its accuracy.
        """
        from colab_swarm.workunits.training import train_serially

        return train_serially(self, on_epoch=on_epoch)

    def rows(self) -> Rows:
        """The data.

        Raises:
            ValueError, TypeError: it cannot be cut into rows.
        """
        return rows_of(self.data)

    def validation_rows(self) -> Rows:
        """The validation data: as many samples as the plan says, always the same ones."""
        rows = rows_of(self.validation)
        return rows.sample(self.plan.validation_samples, seed=self.plan.seed)
