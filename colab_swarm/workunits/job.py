"""A training job: the definition that a user writes, the plan that cuts it into units, the training of one unit.

A volunteer needs the job's model, loss and optimizer. The data stay with the coordinator, which hands out the training
data in subsets. If a separate file defines the job (`Job.load`), the coordinator sends this file to remote volunteers,
who read it first.
"""

import hashlib
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

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

from colab_swarm.errors import require
from colab_swarm.markup import settings
from colab_swarm.tensors.statedict import decode_head
from colab_swarm.workunits.messages import MAX_CODE_CHARACTERS, NAME, NOTHING, Resources, Subset
from colab_swarm.workunits.weights import Schema, moved

Batch: TypeAlias = tuple[Tensor, ...] | dict[str, Tensor]
Array: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = npt.NDArray[np.int64]
KINDS = "biuf"
"""NumPy kinds of a column: bool, int, uint, float."""
MAX_DECODED_BYTES = 1 << 30
SMALL_BYTES = 16 << 20
MAX_RATIO = 1000
"""Largest ratio of a subset's size to the size of its compressed file. Uniform data, such as padding, have 100."""
MOST_NORMS = 10
"""A unit may change the parameters by this many times the norm of the first parameters, or as `MOST_BATCHES` allows."""
MOST_BATCHES = 2
"""For each of its batches, a unit may change the parameters by this many times the change that one batch makes."""


@dataclass(frozen=True)
class Rows:
    """Samples as ``columns``: arrays (n, …) by name. Batches are dictionaries if ``named``, else tuples."""

    columns: Mapping[str, Array]
    named: bool

    @classmethod
    def of(cls, values: Iterable[tuple[Any, Any]], named: bool) -> "Rows":
        """Return rows of these columns; raise ValueError if columns are empty, unequal in length, or no numbers."""
        columns = {str(name): _array(column) for name, column in values}
        for name, column in columns.items():
            require(column.dtype.kind in KINDS, f"column {name} holds {column.dtype}: tokenize or drop it")
        lengths: dict[str, int | str] = {}
        for name, column in columns.items():
            lengths[name] = column.shape[0] if column.ndim else "none"
        equal = len(set(lengths.values())) <= 1 and "none" not in lengths.values()
        require(equal, f"the columns differ in length: {lengths}")
        require(sum(map(len, columns.values())), "the data hold no sample or no column")
        return cls(columns, named)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def size_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def take(self, indices: Indices) -> "Rows":
        return Rows({name: column[indices] for name, column in self.columns.items()}, self.named)

    def sample(self, count: int, *, seed: int) -> "Rows":
        rng = np.random.default_rng(seed)
        indices = rng.choice(len(self), min(count, len(self)), replace=False)
        return self.take(np.sort(indices))

    def cut(self, subsets: int, *, seed: int) -> "list[Rows]":
        """Split all samples into ``subsets`` parts whose sizes differ by at most one."""
        order = np.random.default_rng(seed).permutation(len(self))
        return [self.take(part) for part in np.array_split(order, subsets)]

    def batch(self, indices: Indices, device: torch.device) -> Batch:
        tensors = {}
        for name, column in self.columns.items():
            tensors[name] = torch.from_numpy(column[indices]).to(device)
        return tensors if self.named else tuple(tensors.values())

    def encode(self) -> bytes:
        """Return the samples as safetensors, compressed by zstd; raise ValueError if they are too large or alike."""
        require(self.size_bytes <= MAX_DECODED_BYTES, f"{self.size_bytes:,} bytes: raise plan.subsets")
        # all names under one key, because keys have no order
        names = msgspec.json.encode((list(self.columns), self.named)).decode()
        columns = {name: np.ascontiguousarray(column) for name, column in self.columns.items()}
        data = zstandard.ZstdCompressor(level=3).compress(save(columns, metadata={"rows": names}))
        require(
            self.size_bytes <= _most_decoded_bytes(data),
            f"{self.size_bytes:,} bytes become {len(data):,}: the samples are alike, check the data",
        )
        return data

    @classmethod
    def decode(cls, data: bytes) -> "Rows":
        """Return the samples that `encode` wrote; raise ValueError if ``data`` is garbled or too large."""
        try:
            size = zstandard.frame_content_size(data)
            most = _most_decoded_bytes(data)
            require(0 <= size <= most, f"a subset of {size:,} bytes: too large")
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=most)
            # safetensors.numpy.load leaves out the metadata
            _, metadata, _ = decode_head(plain)
            names, named = msgspec.json.decode(metadata["rows"], type=tuple[list[str], bool])
            columns = load(plain)
            return cls.of(((name, columns[name]) for name in names), named)
        except (zstandard.ZstdError, SafetensorError, LookupError, msgspec.MsgspecError, TypeError) as error:
            raise ValueError(f"not a subset of data: {error}") from error


def _most_decoded_bytes(data: bytes) -> int:
    """Return the most bytes to which a subset's file may unpack. So a small hostile file cannot fill the memory."""
    return min(MAX_DECODED_BYTES, max(SMALL_BYTES, MAX_RATIO * len(data)))


def rows_of(data: Any) -> Rows:
    """Return a user's data, of any kind that `Job` takes, as rows.

    Raises ValueError if columns have unequal lengths, are empty or contain no numbers. Raises TypeError if the data
    have no rows.
    """
    if callable(data):
        data = data()
    if isinstance(data, Rows):
        return data
    if isinstance(data, Mapping):
        return Rows.of(data.items(), True)
    if isinstance(data, tuple | list) and data and hasattr(data[0], "shape"):
        return Rows.of(enumerate(data), False)
    # datasets.Dataset
    if hasattr(data, "with_format"):
        numbers = data.with_format("numpy")
        return Rows.of(((name, numbers[name][:]) for name in data.column_names), True)
    # torch's Dataset
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _rows_of_samples([data[place] for place in range(len(data))])
    raise TypeError(f"data of type {type(data).__name__} has no rows: give arrays or a Dataset")


def _rows_of_samples(samples: list[Any]) -> Rows:
    require(samples, "the data hold no sample")
    named = isinstance(samples[0], Mapping)
    keys: Iterable[Any] = samples[0] if named else range(len(samples[0]))
    columns = []
    for key in keys:
        column = np.stack([_array(sample[key]) for sample in samples])
        columns.append((key, column))
    return Rows.of(columns, named)


def _array(values: Any) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    array = np.asarray(values)
    # torch supports no other byte order
    kind = array.dtype.newbyteorder("=")
    if kind == np.float64:
        kind = np.dtype(np.float32)
    return array.astype(kind, copy=False)


OPTIONAL = ("subsets", "deadline_s", "target_accuracy")
"""Fields of a plan that may be None."""
LIMITS = {"tolerance": math.inf, "max_change": math.inf, "deadline_s": math.inf, "target_accuracy": 1.0}
"""Upper limits of those numbers of a plan that need not be integers."""
MAX_EPOCHS_CHECKED = 1000
MOST_SUBSET_BYTES = 64 << 20
Alpha: TypeAlias = float | Literal["e/(e+1)"] | Callable[[int], float]


@dataclass(frozen=True)
class WorkPlan:
    """How a job is cut into units, and how their results are merged.

    Attributes:
        subsets: number of parts of the data, which is the number of units in an epoch. By default it follows from the
            size of the data and ``expected_volunteers``.
        expected_volunteers: number of volunteers, for the default of ``subsets``.
        local_epochs: number of passes over its subset that a volunteer makes in one unit.
        batch_size: number of samples of one local step.
        max_epochs: the job ends after this many epochs.
        target_accuracy: the job ends when the mean accuracy of an epoch reaches this value. None sets no target.
        alpha: weight of the server's parameters W_s in ``W_s <- alpha W_s + (1 - alpha) W_c``, where W_c is a result
            (VC-ASGD, equation 1): a number in [0, 1), ``e/(e+1)``, or a function of the epoch e, counted from 1.
        replication: how many volunteers train each unit. If it is more than 1, a majority of the results must agree.
        tolerance: largest distance of two replicas that agree, relative to the larger change that they make.
        deadline_s: if a unit does not come back within this time, it goes to another volunteer. By default this follows
            the times of earlier units.
        in_flight: most units that a volunteer may hold.
        max_change: a result may change the parameters by at most this many times the usual change.
        needs: least resources of a volunteer's machine, such as ``Resources(memory_gb=8)``.
        validation_samples: most samples for measuring the accuracy after each assimilation.
        seed: seed of the subsets, of the order of samples and of the first parameters.
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
    needs: Resources = NOTHING
    validation_samples: int = 1000
    seed: int = 0

    def __repr__(self) -> str:
        return settings(self)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            left_out = value is None and name in OPTIONAL
            if name in ("alpha", "needs") or left_out:
                continue
            if name in LIMITS:
                rule = f"over 0, and at most {LIMITS[name]}"
                valid = 0 < value <= LIMITS[name]
            else:
                least = 0 if name == "seed" else 1
                rule = f"a whole number, {least} at least"
                valid = isinstance(value, int) and value >= least
            require(valid, f"{name}={value}: it must be {rule}")
        require(
            isinstance(self.needs, Resources),
            f"needs={self.needs!r}: write cs.workunits.Resources(memory_gb=8)",
            TypeError,
        )
        # alpha may be a function that fails only in some epochs
        for epoch in {*range(1, min(self.max_epochs, MAX_EPOCHS_CHECKED)), self.max_epochs}:
            self.alpha_of(epoch)

    def alpha_of(self, epoch: int) -> float:
        """Return the weight of the server's parameters in ``epoch``; raise ValueError if it is not in [0, 1)."""
        alpha = self.alpha(epoch) if callable(self.alpha) else self.alpha
        if alpha == "e/(e+1)":
            alpha = epoch / (epoch + 1)
        text = f"alpha is {alpha} in epoch {epoch}: 'e/(e+1)', or at least 0 and below 1"
        require(not isinstance(alpha, str) and 0 <= alpha < 1, text)
        return float(alpha)

    def subsets_of(self, rows: int, size_bytes: int) -> int:
        """Return the number of subsets; raise ValueError if there are fewer samples than ``subsets``."""
        if self.subsets is not None:
            require(rows >= self.subsets, f"subsets={self.subsets}, but there are only {rows} samples")
            return self.subsets
        # several subsets for each volunteer, so that a slow volunteer does not delay the epoch
        wanted = 4 * self.expected_volunteers
        most = max(1, rows // (4 * self.batch_size))
        least = math.ceil(size_bytes / MOST_SUBSET_BYTES)
        return min(rows, max(min(wanted, most), least))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of ``model(inputs)``, for batches of (inputs, labels)."""
    return F.cross_entropy(model(batch[0]), batch[1])


def share_correct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Return the fraction of samples whose largest output belongs to their label, for batches of (inputs, labels)."""
    correct = model(batch[0]).argmax(-1) == batch[1]
    return float(correct.float().mean())


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam with a learning rate of 0.001, as in the paper (section IV-A)."""
    return torch.optim.Adam(parameters, lr=1e-3)


@dataclass(frozen=True)
class Job:
    """A model to train by work units.

    Attributes:
        name: the job's name for people, 1 to 63 characters of a-z, 0-9, ``.``, ``_`` and ``-``.
        model: a function that returns a new model. Integer buffers travel as float32, and are rounded on arrival.
        data: the training data, or a function that loads them. The data are a tuple or dictionary of arrays or tensors
            with one row per sample, a torch ``Dataset`` of finite length, or a ``datasets.Dataset``.
        validation: the validation data for the accuracy, in the same forms.
        loss: a function that returns the mean loss of a model on a batch. A batch has the columns of the data, as a
            tuple or a dictionary.
        optimizer: a function that returns an optimizer of the model's parameters. Each unit gets a new optimizer, so
            that replicas agree. The paper does not say whether its units get new optimizers.
        accuracy: a function that returns the accuracy of a model on a batch, between 0 and 1.
        plan: how the job is cut into units.
        code: text of the file that defines the job. Volunteers run it.
    """

    name: str
    model: Callable[[], nn.Module] = field(repr=False)
    data: Any = field(repr=False)
    validation: Any = field(repr=False)
    loss: Callable[[nn.Module, Any], Tensor] = field(default=cross_entropy, repr=False)
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = field(default=adam, repr=False)
    accuracy: Callable[[nn.Module, Any], float] = field(default=share_correct, repr=False)
    plan: WorkPlan = WorkPlan()
    code: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        require(NAME.fullmatch(self.name), f"{self.name!r} is no job name: 1 to 63 of a-z0-9._-")

    @classmethod
    def load(cls, path: str | Path) -> "Job":
        """Return the ``job = cs.workunits.Job(…)`` of a Python file. Volunteers will run this file."""
        return cls.from_code(Path(path).read_text(encoding="utf-8"), str(path))

    @classmethod
    def from_code(cls, code: str, origin: str) -> "Job":
        """Run Python ``code`` of the file ``origin`` and return its ``job``; raise ValueError if there is none."""
        text = f"{origin}: {len(code):,} characters, {MAX_CODE_CHARACTERS:,} at most"
        require(len(code) <= MAX_CODE_CHARACTERS, text)
        digest = hashlib.sha256(code.encode()).hexdigest()
        module = ModuleType(f"colab_swarm_job_{digest[:12]}")
        module.__file__ = origin
        # classes in the code look up their module there
        sys.modules[module.__name__] = module
        linecache.cache[origin] = (len(code), None, code.splitlines(keepends=True), origin)
        exec(compile(code, origin, "exec"), module.__dict__)
        job = getattr(module, "job", None)
        if not isinstance(job, cls):
            raise ValueError(f"{origin} defines no job: end it with job = cs.workunits.Job(…)")
        return replace(job, code=code)

    def with_plan(self, **changes: Any) -> "Job":
        """Return a copy of the job with other settings of the plan: ``job.with_plan(alpha=0.95, subsets=50)``."""
        return replace(self, plan=replace(self.plan, **changes))

    def first_model(self) -> nn.Module:
        """Return the model with its first parameters, which are the same at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.plan.seed)
            return self.model()

    def train_serially(self) -> tuple[nn.Module, list[float]]:
        """Train on all data in one place with one optimizer and without units, as a baseline.

        Returns the trained model and its accuracies. As with units, an epoch is ``plan.local_epochs`` passes over the
        data.
        The plan's ``alpha`` and ``subsets`` are not used.
        """
        plan = self.plan
        model = self.first_model()
        rows = self.rows().cut(1, seed=plan.seed)[0]
        validation = self.validation_rows()
        optimizer = self.optimizer(model.parameters())
        accuracies: list[float] = []
        for epoch in range(1, plan.max_epochs + 1):
            seed = unit_seed(plan.seed, epoch, 0)
            UnitTraining(self, rows, seed=seed, model=model, optimizer=optimizer).finish()
            accuracies.append(measure(self, model, validation))
            if plan.target_accuracy is not None and accuracies[-1] >= plan.target_accuracy:
                break
        return model, accuracies

    def rows(self) -> Rows:
        return rows_of(self.data)

    def validation_rows(self) -> Rows:
        """Return at most ``plan.validation_samples`` samples, the same samples at each call."""
        return rows_of(self.validation).sample(self.plan.validation_samples, seed=self.plan.seed)


class UnitTraining:
    """Trains ``model`` in place on one subset, one batch at a time. ``done`` of ``batches`` batches are trained.

    Another process can resume from the state dict. The ``seed`` determines the order of samples and the model's random
    numbers, so replicas agree.
    """

    def __init__(
        self,
        job: Job,
        rows: Rows,
        *,
        seed: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._job = job
        self._rows = rows
        self._batch_size = job.plan.batch_size
        self._seed = seed
        self._device = device or torch.device("cpu")
        self.model = model.to(self._device)
        self._optimizer = optimizer or job.optimizer(self.model.parameters())
        self._per_epoch = math.ceil(len(rows) / self._batch_size)
        self.done = 0
        self.batches = self._per_epoch * job.plan.local_epochs
        # the local epoch, and the order of samples in it
        self._order: tuple[int, Indices] | None = None

    def step(self) -> float:
        """Train on the next batch and return its loss; raise IndexError if the unit is done."""
        require(self.done < self.batches, "the unit is done", IndexError)
        rows = self._next_indices()
        # do not change the random numbers of the user's code
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((self._seed * 1_000_003 + self.done) % (1 << 63))
            self.model.train()
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._job.loss(self.model, self._rows.batch(rows, self._device))
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self.done += 1
        return float(loss.detach())

    def _next_indices(self) -> Indices:
        epoch, batch = divmod(self.done, self._per_epoch)
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._order = (epoch, rng.permutation(len(self._rows)))
        start = batch * self._batch_size
        return self._order[1][start : start + self._batch_size]

    def finish(self) -> None:
        while self.done < self.batches:
            self.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "seed": self._seed,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; raise ValueError if the state belongs to another unit."""
        fits = state.get("seed") == self._seed and 0 <= state.get("done", -1) <= self.batches
        require(fits, "this was saved in another unit")
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]


def unit_seed(seed: int, epoch: int, subset: int) -> int:
    """Return the seed of a unit. It is the same for all replicas of the unit, and after a restart."""
    sequence = np.random.SeedSequence((seed, epoch, subset))
    return int(sequence.generate_state(1, np.uint32)[0])


def measure(job: Job, model: nn.Module, rows: Rows, *, batch_size: int = 256) -> float:
    """Return the mean accuracy of ``model`` over ``rows``, between 0 and 1."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(rows), batch_size):
            indices = np.arange(start, min(start + batch_size, len(rows)))
            accuracy = float(job.accuracy(model, rows.batch(indices, device)))
            total += accuracy * len(indices)
    return total / len(rows)


def lay_out(job: Job, folder: Path) -> tuple[tuple[Subset, ...], float]:
    """Cut the data into files in ``folder``, and delete all other files there. Equal data give equal files.

    Returns the files, and the largest change of the parameters by a unit (L2 norm). Raises ValueError or TypeError if
    the data cannot be cut, or if the job cannot learn from them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = job.rows()
    parts = rows.cut(job.plan.subsets_of(len(rows), rows.size_bytes), seed=job.plan.seed)
    # encoded and decoded, as volunteers get the data
    first = Rows.decode(parts[0].encode())
    norm, change = _try_out(job, first)
    batches = job.plan.local_epochs * math.ceil(len(first) / job.plan.batch_size)
    most = max(MOST_NORMS * norm, MOST_BATCHES * batches * change)
    subsets = []
    for part in parts:
        data = part.encode()
        subset = Subset(hashlib.sha256(data).hexdigest(), len(data), len(part))
        # also overwrite a file that a crash may have left incomplete
        (folder / subset.sha256).write_bytes(data)
        subsets.append(subset)
    names = {subset.sha256 for subset in subsets}
    for file in list(folder.iterdir()):
        if file.name not in names:
            file.unlink()
    return tuple(subsets), most


def _try_out(job: Job, rows: Rows) -> tuple[float, float]:
    """Train one batch and measure the accuracy, to find faults before volunteers do.

    Returns the L2 norm of the first parameters, and the L2 norm of the change by the batch.
    """
    model = job.first_model()
    schema = Schema.of(model)
    first = schema.flatten(model)
    with _failing("one batch could not be trained"):
        UnitTraining(job, rows, seed=0, model=model).step()
    with _failing("the accuracy could not be measured"):
        validation = job.validation_rows().sample(job.plan.batch_size, seed=0)
        accuracy = measure(job, job.first_model(), validation)
    require(0 <= accuracy <= 1, f"the accuracy is {accuracy:g}: it must be between 0 and 1")
    return float(np.linalg.norm(first)), moved(schema.flatten(model), first)


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn any error of the job's code into a ValueError whose text begins with ``what``."""
    try:
        yield
    except Exception as error:
        reason = traceback.format_exception_only(error)[-1].strip()
        raise ValueError(f"{what}: {reason}") from error
