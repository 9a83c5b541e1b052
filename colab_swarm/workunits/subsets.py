"""The data of a job as files for volunteers, each named by its SHA-256."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from colab_swarm.workunits.job import Job
from colab_swarm.workunits.messages import Subset
from colab_swarm.workunits.rows import Rows
from colab_swarm.workunits.unit_training import try_out


def lay_out(job: Job, folder: Path) -> tuple[Subset, ...]:
    """Cut the data into subsets and write each to ``folder``; what else lies there goes.

    The same data make the same files, so that volunteers need not fetch them again after a restart.

    Raises:
        ValueError, TypeError: the data cannot be cut, or the job cannot learn from them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = job.rows()
    parts = rows.cut(job.plan.subsets_of(len(rows), rows.size_bytes), seed=job.plan.seed)
    subsets = []
    try_out(job, Rows.decode(parts[0].encode()))  # as volunteers get them
    for part in parts:
        data = part.encode()
        subsets.append(Subset(sha256(data).hexdigest(), len(data), len(part)))
        _write(folder / subsets[-1].sha256, data)
    for name in {file.name for file in folder.iterdir()} - {subset.sha256 for subset in subsets}:
        (folder / name).unlink()
    return tuple(subsets)


def _write(path: Path, data: bytes) -> None:
    half = path.with_suffix(".half")
    half.write_bytes(data)
    os.replace(half, path)  # whole or not at all, whatever a crash left there
