"""Whose a run folder is: taken by one run at a time, gone on with only where that is meant."""

import datetime
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from nvalchemi.training.hooks.run_files import (
    METRICS,
    RANK_FILES,
    STATUS,
    LineFile,
    rank_file,
    read_whole,
)


class Claim(NamedTuple):
    """The number of this session, and on rank 0 the locked file of metrics."""

    session: int
    metrics: LineFile | None


def claim_folder(folder: Path, rank: int, resume: bool, session: int | None) -> Claim:
    """Take the folder for a run: all ranks may, with the same session, or none.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    rank : int
        Of this process. Rank 0 decides and does not wait for the others.
    resume : bool
        Whether a run that is there is gone on with.
    session : int, optional
        Of the caller, who goes on with it; else it is a new one.

    Raises
    ------
    ValueError
        If the folder holds a run that is not to be gone on with, or that is running.
    """
    metrics, refused = None, None
    if rank == 0:
        metrics, refused = _take(folder, resume or session is not None)
    if session is None:
        session = _count_sessions(folder / (METRICS if rank == 0 else rank_file(rank)))
    session, refused = _as_rank_0_says(folder, rank, session, refused)
    if refused is not None:
        raise ValueError(refused)
    return Claim(session, metrics)


def _take(folder: Path, goes_on: bool) -> tuple[LineFile | None, str | None]:
    """The metrics, locked; or why this run may not write here."""
    status = read_whole(folder / STATUS)
    if not goes_on and _holds_steps(folder, status):
        return None, (
            f"{folder} holds a run already ({_describe(status)}): choose another folder, remove "
            "this one, or go on in it with RunFolder(..., resume=True)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    metrics = LineFile(folder / METRICS)
    if metrics.claim():
        return metrics, None
    metrics.close()
    return None, (
        f"{folder} is being written to by another run (process {status.get('pid', 'unknown')} on "
        f"{status.get('host', 'this machine')}, {_describe(status)}): choose another folder, or "
        "stop that run first"
    )


def _holds_steps(folder: Path, status: dict[str, Any]) -> bool:
    """Whether there is something to lose; a run that failed before its first step is none."""
    if status:
        return bool(status.get("step"))
    files = [folder / METRICS, *folder.glob(RANK_FILES)]
    return any(path.exists() and path.stat().st_size for path in files)


def _describe(status: dict[str, Any]) -> str:
    if not status:
        return "without a status"
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(status.get("started", 0))))
    return f"{status.get('state')}, step {status.get('step')}, started {started}"


def _count_sessions(path: Path) -> int:
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(line.startswith(b'{"session":') for line in file)


def _as_rank_0_says(
    folder: Path, rank: int, session: int, refused: str | None
) -> tuple[int, str | None]:
    """Session and refusal of rank 0, by the store of the group; one's own without a group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return session, refused
    store = dist.distributed_c10d._get_default_store()
    name = f"nvalchemi/run/{folder.absolute()}"
    time_asked = store.add(f"{name}/{rank}", 1)  # a later run in the same group asks anew
    key = f"{name}/answer {time_asked}"
    if rank == 0:
        store.set(key, json.dumps([session, refused]))
        return session, refused
    try:
        store.wait([key], datetime.timedelta(seconds=300))
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank 0 does not say whether {folder} may be written to: give RunFolder to the "
            "strategy of every rank, or of rank 0 alone"
        ) from error
    session, refused = json.loads(store.get(key))
    return session, refused
