"""A training job: what a user writes, the plan that cuts it into units, the training of one unit.

A volunteer needs the model, the loss and the optimizer. Data and validation stay with the
coordinator, which hands out the data in subsets. A job in a file of its own (`Job.load`) can be
sent to remote volunteers, who read it first.
"""

import hashlib
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
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
from colab_swarm.workunits.messages import MAX_CODE_CHARACTERS, NAME, Subset
from colab_swarm.workunits.weights import Schema, moved

Batch: TypeAlias = tuple[Tensor, ...] | dict[str, Tensor]
Array: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = npt.NDArray[np.int64]
KINDS = "biuf"  # NumPy kinds of a column: bool, int, uint, float
MAX_DECODED_BYTES, SMALL_BYTES = 1 << 30, 16 << 20
MAX_RATIO = 1000  # of a subset's size to that of its file; of data that are alike, such as padding, 100
MOST_NORMS = 10  # a unit may move the parameters this many times as far as the first ones are from 0 ...
MOST_BATCHES = 2  # ... or this many times as far as one batch does, for each batch


@dataclass(frozen=True)
class Rows:
    """Samples as ``columns``: arrays (n, …) by name. Batches are dictionaries if ``named``, else tuples."""

    columns: Mapping[str, Array]
    named: bool

    @classmethod
    def of(cls, values: Iterable[tuple[Any, Any]], named: bool) -> "Rows":
        """Return rows of these columns; raise ValueError if of unequal length, or no numbers."""
        columns = {str(name): _array(column) for name, column in values}
        for name, column in columns.items():
            require(column.dtype.kind in KINDS, f"column {name} holds {column.dtype}: tokenize or drop it")
        lengths = {name: column.shape[0] if column.ndim else "none" for name, column in columns.items()}
        require(
            len(set(lengths.values())) <= 1 and "none" not in lengths.values(),
            f"the columns differ in length: {lengths}",
        )
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
        rng, size = np.random.default_rng(seed), min(count, len(self))
        return self.take(np.sort(rng.choice(len(self), size, replace=False)))

    def cut(self, subsets: int, *, seed: int) -> "list[Rows]":
        """Split all samples into ``subsets`` parts whose sizes differ by one at most."""
        order = np.random.default_rng(seed).permutation(len(self))
        return [self.take(part) for part in np.array_split(order, subsets)]

    def batch(self, indices: Indices, device: torch.device) -> Batch:
        tensors = {name: torch.from_numpy(one[indices]).to(device) for name, one in self.columns.items()}
        return tensors if self.named else tuple(tensors.values())

    def encode(self) -> bytes:
        """Return the samples as safetensors, compressed by zstd; raise ValueError if too large."""
        require(self.size_bytes <= MAX_DECODED_BYTES, f"{self.size_bytes:,} bytes: raise plan.subsets")
        names = msgspec.json.encode((list(self.columns), self.named)).decode()  # one key: keys are unordered
        columns = {name: np.ascontiguousarray(column) for name, column in self.columns.items()}
        data = zstandard.ZstdCompressor(level=3).compress(save(columns, metadata={"rows": names}))
        alike = f"{self.size_bytes:,} bytes become {len(data):,}: the samples are alike, check the data"
        require(self.size_bytes <= most_decoded_bytes(data), alike)
        return data

    @classmethod
    def decode(cls, data: bytes) -> "Rows":
        """Read what `encode` wrote; raise ValueError if it is something else, or too large."""
        try:
            size = zstandard.frame_content_size(data)
            require(0 <= size <= most_decoded_bytes(data), f"a subset of {size:,} bytes: too large")
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=most_decoded_bytes(data))
            head_bytes = int.from_bytes(plain[:8], "little")  # safetensors.numpy.load leaves out the metadata
            head = msgspec.json.decode(plain[8 : 8 + head_bytes], type=dict[str, Any])
            names, named = msgspec.json.decode(head["__metadata__"]["rows"], type=tuple[list[str], bool])
            columns = load(plain)
            return cls.of(((name, columns[name]) for name in names), named)
        except (zstandard.ZstdError, SafetensorError, LookupError, msgspec.MsgspecError, TypeError) as error:
            raise ValueError(f"not a subset of data: {error}") from error


def most_decoded_bytes(data: bytes) -> int:
    """Return how much the file of a subset may unpack to: a small one of a stranger must not fill the memory."""
    return min(MAX_DECODED_BYTES, max(SMALL_BYTES, MAX_RATIO * len(data)))


def rows_of(data: Any) -> Rows:
    """Return a user's data, of any kind that `Job` takes, as rows. Raises ValueError if columns are
    unequal, empty or hold no numbers; TypeError for data that has no rows.
    """
    if callable(data):
        data = data()
    if isinstance(data, Rows):
        return data
    if isinstance(data, Mapping):
        return Rows.of(data.items(), True)
    if isinstance(data, tuple | list) and data and hasattr(data[0], "shape"):
        return Rows.of(enumerate(data), False)
    if hasattr(data, "with_format"):  # datasets.Dataset
        numbers = data.with_format("numpy")
        return Rows.of(((name, numbers[name][:]) for name in data.column_names), True)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):  # of torch's Dataset
        raise TypeError(f"data of type {type(data).__name__} has no rows: give arrays or a Dataset")
    if not (samples := [data[place] for place in range(len(data))]):
        raise ValueError("the data hold no sample")
    named = isinstance(samples[0], Mapping)
    keys: Iterable[Any] = samples[0] if named else range(len(samples[0]))
    return Rows.of(((key, np.stack([_array(one[key]) for one in samples])) for key in keys), named)


def _array(values: Any) -> Array:
    array = np.asarray(values.detach().cpu()) if isinstance(values, Tensor) else np.asarray(values)
    native = array.dtype.newbyteorder("=")  # torch knows no other
    return array.astype(np.float32 if native == np.float64 else native, copy=False)


OPTIONAL = "subsets", "deadline_s", "target_accuracy"  # in a plan, and limits of numbers that are not whole
LIMITS = {"tolerance": math.inf, "max_change": math.inf, "deadline_s": math.inf, "target_accuracy": 1.0}
Alpha: TypeAlias = float | Literal["e/(e+1)"] | Callable[[int], float]


@dataclass(frozen=True)
class WorkPlan:
    """How a job is cut into units, and how their results are merged.

    Attributes:
        subsets: parts of the data, which are the units of an epoch; None: by the data's size and the volunteers.
        expected_volunteers: number of volunteers, for the default of ``subsets``.
        local_epochs: passes over its subset that a volunteer makes in one unit.
        batch_size: samples of one local step.
        max_epochs: the job ends after this many epochs.
        target_accuracy: the job ends when the mean accuracy of an epoch reaches this; None: never.
        alpha: weight of the server's parameters in ``W_s <- alpha W_s + (1 - alpha) W_c``: a number
            in [0, 1), ``e/(e+1)``, or a function of the epoch e, from 1 (VC-ASGD, equation 1).
        replication: volunteers that train each unit; beyond 1 a majority has to agree.
        tolerance: distance of two replicas that agree, as a share of the change that training made.
        deadline_s: a unit that is not back by then goes to another volunteer; None: by the times of earlier units.
        in_flight: units that a volunteer may hold.
        max_change: a result is refused if training moved it more than this many times as far as usual.
        validation_samples: most samples used to measure the accuracy after each assimilation.
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
        for name, value in vars(self).items():
            if name == "alpha" or (value is None and name in OPTIONAL):
                continue
            if name in LIMITS:
                valid, rule = 0 < value <= LIMITS[name], f"over 0, and at most {LIMITS[name]}"
            else:
                valid, rule = (
                    isinstance(value, int) and value >= (name != "seed"),
                    f"a whole number, {int(name != 'seed')} at least",
                )
            require(valid, f"{name}={value}: it must be {rule}")
        for epoch in {*range(1, min(self.max_epochs, 1000)), self.max_epochs}:  # alpha may be a function
            self.alpha_of(epoch)

    def alpha_of(self, epoch: int) -> float:
        """Return the server's weight in ``epoch``, from 1; raise ValueError if it is not in [0, 1)."""
        alpha = self.alpha(epoch) if callable(self.alpha) else self.alpha
        if alpha == "e/(e+1)":
            alpha = epoch / (epoch + 1)
        require(
            not isinstance(alpha, str) and 0 <= alpha < 1,
            f"alpha is {alpha} in epoch {epoch}: 'e/(e+1)', or at least 0 and below 1",
        )
        return float(alpha)

    def subsets_of(self, rows: int, size_bytes: int) -> int:
        """Return the number of subsets; raise ValueError if there are fewer samples."""
        if self.subsets is None:
            wanted = 4 * self.expected_volunteers  # so that a slow one does not delay the epoch
            most = max(1, rows // (4 * self.batch_size))
            return min(rows, max(min(wanted, most), -(-size_bytes // (64 << 20))))
        require(rows >= self.subsets, f"subsets={self.subsets}, but there are only {rows} samples")
        return self.subsets


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of ``model(inputs)``, for batches of (inputs, labels)."""
    return F.cross_entropy(model(batch[0]), batch[1])


def share_correct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Return the share of samples whose highest output is their label's, for (inputs, labels)."""
    return float((model(batch[0]).argmax(-1) == batch[1]).float().mean())


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam with a learning rate of 0.001, as in the paper (section IV-A)."""
    return torch.optim.Adam(parameters, lr=1e-3)


@dataclass(frozen=True)
class Job:
    """A model to train by work units.

    Attributes:
        name: shown to people.
        model: returns a new model. Integer buffers travel as float32 and are rounded.
        data: the training data, or a function that loads it: a tuple or dictionary of arrays or tensors with one row
            per sample, a torch ``Dataset`` of finite length, or a ``datasets.Dataset``.
        validation: the same, for the accuracy.
        loss: mean loss of a model on a batch; a batch has the columns of the data, as a tuple or a dictionary.
        optimizer: over the model's parameters; each unit gets a new one, as in the paper.
        accuracy: of a model on a batch, between 0 and 1.
        plan: how the job is cut into units.
        code: text of the file that the job was loaded from; volunteers run it.
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
        """Return the ``job = cs.workunits.Job(…)`` of a Python file, which volunteers will run."""
        return cls.from_code(Path(path).read_text(encoding="utf-8"), str(path))

    @classmethod
    def from_code(cls, code: str, origin: str) -> "Job":
        """Run Python ``code`` of the file ``origin`` and return its ``job``; raise ValueError if there is none."""
        require(
            len(code) <= MAX_CODE_CHARACTERS,
            f"{origin}: {len(code):,} characters, {MAX_CODE_CHARACTERS:,} at most",
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

    def with_plan(self, **changes: Any) -> "Job":
        """Return the job with other settings of the plan: ``job.with_plan(alpha=0.95, subsets=50)``."""
        return replace(self, plan=replace(self.plan, **changes))

    def first_model(self) -> nn.Module:
        """Return the model with its first parameters, the same at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.plan.seed)
            return self.model()

    def train_serially(self) -> tuple[nn.Module, list[float]]:
        """Train on all data in one place with one optimizer, without units: the baseline.

        Return the trained model, and its accuracy after each epoch of ``plan.local_epochs`` passes.
        The plan's alpha and subsets play no part.
        """
        plan, model = self.plan, self.first_model()
        rows, validation = self.rows().cut(1, seed=plan.seed)[0], self.validation_rows()
        optimizer, accuracies = self.optimizer(model.parameters()), list[float]()
        for epoch in range(1, plan.max_epochs + 1):
            UnitTraining(
                self, rows, seed=unit_seed(plan.seed, epoch, 0), model=model, optimizer=optimizer
            ).finish()
            accuracies.append(measure(self, model, validation))
            if plan.target_accuracy is not None and accuracies[-1] >= plan.target_accuracy:
                break
        return model, accuracies

    def rows(self) -> Rows:
        return rows_of(self.data)

    def validation_rows(self) -> Rows:
        """Return at most ``plan.validation_samples`` samples, always the same ones."""
        return rows_of(self.validation).sample(self.plan.validation_samples, seed=self.plan.seed)


class UnitTraining:
    """Train ``model`` in place on one subset, a batch at a time, ``done`` of ``batches``; a save
    resumes elsewhere. The ``seed`` orders samples and draws the model's random numbers: replicas
    agree.
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
        self._job, self._rows, self._batch_size, self._seed = job, rows, job.plan.batch_size, seed
        self._device = device or torch.device("cpu")
        self.model = model.to(self._device)
        self._optimizer = optimizer or job.optimizer(self.model.parameters())
        self._per_epoch = math.ceil(len(rows) / self._batch_size)
        self.done, self.batches = 0, self._per_epoch * job.plan.local_epochs
        self._order: tuple[int, Indices] | None = None  # of the samples in the local epoch

    def step(self) -> float:
        """Train on the next batch and return its loss; raise IndexError if the unit is done."""
        require(self.done < self.batches, "the unit is done", IndexError)
        epoch, place = divmod(self.done, self._per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))
        indices = self._order[1][place * self._batch_size : (place + 1) * self._batch_size]
        # leave the user's own random numbers alone
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed((self._seed * 1_000_003 + self.done) % (1 << 63))
            self.model.train()
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._job.loss(self.model, self._rows.batch(indices, self._device))
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self.done += 1
        return float(loss.detach())

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
        """Resume from a saved state; raise ValueError if it is of another unit."""
        fits = state.get("seed") == self._seed and 0 <= state.get("done", -1) <= self.batches
        require(fits, "this was saved in another unit")
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]


def unit_seed(seed: int, epoch: int, subset: int) -> int:
    """Return the seed of a unit: the same for its replicas and after a restart."""
    return int(np.random.SeedSequence((seed, epoch, subset)).generate_state(1, np.uint32)[0])


def measure(job: Job, model: nn.Module, rows: Rows, *, batch_size: int = 256) -> float:
    """Return the mean accuracy of ``model`` over ``rows``, between 0 and 1."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(rows), batch_size):
            indices = np.arange(start, min(start + batch_size, len(rows)))
            total += float(job.accuracy(model, rows.batch(indices, device))) * len(indices)
    return total / len(rows)


def lay_out(job: Job, folder: Path) -> tuple[tuple[Subset, ...], float]:
    """Cut the data into files of ``folder``, the same ones for the same data; delete all others in
    it. Return the files, and how far a unit may move the parameters (L2 norm). Raises ValueError or
    TypeError if data cannot be cut, or the job cannot learn from them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = job.rows()
    parts = rows.cut(job.plan.subsets_of(len(rows), rows.size_bytes), seed=job.plan.seed)
    norm, change = _try_out(job, Rows.decode(parts[0].encode()))  # as volunteers get them
    batches = job.plan.local_epochs * math.ceil(len(parts[0]) / job.plan.batch_size)
    subsets = []
    for part in parts:
        data = part.encode()
        subsets.append(Subset(hashlib.sha256(data).hexdigest(), len(data), len(part)))
        (folder / subsets[-1].sha256).write_bytes(data)  # also over what a crash left there
    for name in {file.name for file in folder.iterdir()} - {subset.sha256 for subset in subsets}:
        (folder / name).unlink()
    return tuple(subsets), max(MOST_NORMS * norm, MOST_BATCHES * batches * change)


def _try_out(job: Job, rows: Rows) -> tuple[float, float]:
    """Train one batch and measure the accuracy, to find faults before volunteers do.

    Return the L2 norms of the first parameters and of the change by the batch.
    """
    doing, plan, model = "one batch could not be trained", job.plan, job.first_model()
    first = (schema := Schema.of(model)).flatten(model)
    try:
        UnitTraining(job, rows, seed=0, model=model).step()
        doing = "the accuracy could not be measured"
        accuracy = measure(job, job.first_model(), job.validation_rows().sample(plan.batch_size, seed=0))
    except Exception as error:  # whatever it is, with its traceback
        raise ValueError(f"{doing}: {traceback.format_exception_only(error)[-1].strip()}") from error
    require(0 <= accuracy <= 1, f"the accuracy is {accuracy:g}: it must be between 0 and 1")
    return float(np.linalg.norm(first)), moved(schema.flatten(model), first)
