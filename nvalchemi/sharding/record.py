"""What the ranks did see: a hook that writes it down as it happens, and the reader of its files.

Each rank appends to a file of its own. A file is a row of blocks, each a few hundred batches with a
checksum, written by one call; what has been written can be read while the training runs and after
it was killed, and a block that was cut off is left out.
"""

import os
import time
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch.distributed as dist

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.distributed.collectives import get_world_size
from nvalchemi.training.stages import TrainingStage

MAGIC = 0x4E56_5245_4332  # "NVREC2"
# magic, world size, rank, session, batches, indices, bytes of an index, checksum of all others
HEADER = 8
OPENED: Counter[Path] = Counter()  # how often this process has begun a session in a folder


class ShardRecorder:
    """Hook that stores which samples each rank has trained on, in which step and epoch.

    Parameters
    ----------
    folder : path
        Gets one file per rank. A folder with files is gone on with: a resumed run is a further
        session of the record.
    flush_every : int
        Batches after which they are written; a killed training loses at most so many per rank.

    Notes
    -----
    A batch takes 1 to 8 bytes per sample, as its largest number needs, and 24 more. Batches need
    ``metadata["index"]``, which `nvalchemi.data.DataLoader` sets. Read the files with
    `load_record`.
    """

    frequency = 1
    stage = None

    def __init__(self, folder: str | os.PathLike[str], *, flush_every: int = 32) -> None:
        self.folder = Path(folder)
        self.flush_every = check_integer("flush_every", flush_every, 1)
        self._file: IO[bytes] | None = None
        self._place = (1, 0, 0)  # world size, rank, session
        self._where: list[tuple[int, int]] = []
        self._indices: list[Indices] = []

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in (
            TrainingStage.AFTER_BATCH,
            TrainingStage.AFTER_EPOCH,
            TrainingStage.AFTER_TRAINING,
        )

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Note the batch; write at the end of an epoch and of the training."""
        if stage is not TrainingStage.AFTER_BATCH:
            self.flush()
            return
        metadata = getattr(ctx.batch, "metadata", None)
        if metadata is None or "index" not in metadata:
            raise ValueError(
                'ShardRecorder needs batch.metadata["index"], the number of each sample in the '
                f"data set, and this {type(ctx.batch).__name__} has none; use "
                "nvalchemi.data.DataLoader, or keep metadata in the batch transforms"
            )
        if self._file is None:
            manager = getattr(ctx.workflow, "distributed_manager", None)
            self._open(get_world_size(manager), int(ctx.global_rank))
        indices = np.asarray(metadata["index"].cpu(), dtype=np.int64)
        if indices.min(initial=0) < 0:
            raise ValueError(
                'batch.metadata["index"] must be >= 0 to be recorded, the numbers of the samples '
                f"in the data set, got {indices.min()}"
            )
        # the counters have been raised by this batch
        self._where.append((ctx.epoch, ctx.epoch_step_count - 1))
        self._indices.append(indices)
        if len(self._where) >= self.flush_every:
            self.flush()

    def _open(self, world_size: int, rank: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = path_of(self.folder, rank)
        blocks, end, _ = read_blocks(path) if path.exists() else ([], 0, 0)
        session = agreed_session(self.folder)
        if session is None:
            own = 1 + max((block.session for block in blocks), default=-1)
            session = max(own, session_of_others(self.folder, world_size, rank))
        self._file = open(path, "r+b" if end else "wb", buffering=0)
        self._file.truncate(end)  # a block that was cut off would hide those after it
        self._file.seek(end)
        self._place = (world_size, rank, session)
        # the session is known from its first step on, for the other ranks to see
        self._write(np.empty((0, 2), dtype="<i8"), [])

    def flush(self) -> None:
        """Write what has been noted since the last time."""
        if self._file is None or not self._where:
            return
        self._write(np.array(self._where, dtype="<i8"), self._indices)
        self._where.clear()
        self._indices.clear()

    def _write(self, where: Indices, parts: list[Indices]) -> None:
        assert self._file is not None
        indices = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        narrow = indices.astype(np.min_scalar_type(int(indices.max(initial=0))))
        sizes = np.array([part.size for part in parts], dtype="<i8")
        body = where.tobytes() + sizes.tobytes() + narrow.tobytes()
        header = [MAGIC, *self._place, len(sizes), indices.size, narrow.itemsize]
        head = np.array(header, dtype="<i8").tobytes()
        checksum = zlib.crc32(body, zlib.crc32(head))
        self._file.write(head + checksum.to_bytes(8, "little") + body)

    def close(self) -> None:
        """Write the rest and close the file; a further run opens it anew."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class Block:
    """Some consecutive batches of a rank: where they belong, their sizes, and their samples."""

    world_size: int
    rank: int
    session: int
    where: Indices
    sizes: Indices
    indices: Indices


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:05d}.record"


def agreed_session(folder: Path) -> int | None:
    """Number that ranks of a run agree on, higher than those of the runs before; None for one rank.

    The first that comes says the time, by the store of the group: none waits for the others, of
    which not all need to record, and no file of an earlier run has to be there.
    """
    folder = folder.absolute()
    OPENED[folder] += 1
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    store = dist.distributed_c10d._get_default_store()
    key = f"nvalchemi/record/{OPENED[folder]}/{folder}"
    return int(store.compare_set(key, "", str(time.time_ns())))


def session_of_others(folder: Path, world_size: int, rank: int) -> int:
    """Number of this session by the file of another rank, where ranks can not be asked.

    A rank has missed those on fewer ranks, and those in a file that was lost. Rank 0 has part in
    every session; it looks at another file only if its own is not there.
    """
    path = path_of(folder, 0)
    if rank == 0 and not path.exists():
        path = next(iter(sorted(folder.glob("rank*.record"))), path)
    elif rank == 0:
        return 0
    blocks = read_blocks(path)[0] if path.exists() else []
    if not blocks:
        return 0
    # rank 0 has begun this session already, or will
    begun = rank > 0 and blocks[-1].world_size == world_size
    return blocks[-1].session + (0 if begun else 1)


def read_blocks(path: Path) -> tuple[list[Block], int, int]:
    """Whole blocks of a file, where the last one ends, and bytes before it that are damaged.

    Raises
    ------
    ValueError
        If it is no record, or one of another rank.
    """
    data = path.read_bytes()
    start_of_any = MAGIC.to_bytes(8, "little")
    if not start_of_any.startswith(data[:8]) and start_of_any not in data:
        raise ValueError(
            f"{path} must be a record of ShardRecorder to be read or gone on with, and it is none; "
            "remove it or choose another folder"
        )
    blocks: list[Block] = []
    position = end = damaged = 0
    while position >= 0:
        block, after = read_block(data, position)
        if block is None:  # goes on behind what is damaged
            position = data.find(start_of_any, position + 1)
            continue
        if path.name != path_of(path.parent, block.rank).name:
            raise ValueError(
                f"{path} must be of the rank in its name, and it is a record of rank {block.rank}; "
                "put back the file that was there, or remove this one"
            )
        damaged += position - end
        blocks.append(block)
        position = end = after
    return blocks, end, damaged


def read_block(data: bytes, position: int) -> tuple[Block | None, int]:
    """The block at a position and where it ends; None if there is no whole one."""
    start = position + 8 * HEADER
    if start > len(data):
        return None, position
    header = np.frombuffer(data, "<i8", HEADER, position).tolist()
    magic, world_size, rank, session, batches, number, width, checksum = header
    if magic != MAGIC or width not in (1, 2, 4, 8) or min(batches, number) < 0:
        return None, position
    end = start + 24 * batches + width * number
    head = zlib.crc32(data[position : start - 8])
    if end > len(data) or zlib.crc32(data[start:end], head) != checksum:
        return None, position
    where = np.frombuffer(data, "<i8", 2 * batches, start).reshape(-1, 2)
    sizes = np.frombuffer(data, "<i8", batches, start + 16 * batches)
    indices = np.frombuffer(data, f"<u{width}", number, start + 24 * batches)
    return Block(world_size, rank, session, where, sizes, indices.astype(np.int64)), end


@dataclass(frozen=True)
class RankLog:
    """What one rank consumed in one session, in its order.

    Attributes
    ----------
    epochs, steps : int64 arrays, shape (n,)
        Of each batch; steps count from 0 in each epoch.
    offsets : int64 array, shape (n + 1,)
        Where the samples of each batch begin and end in `indices`.
    indices : int64 array
    """

    epochs: Indices
    steps: Indices
    offsets: Indices
    indices: Indices

    def __len__(self) -> int:
        return len(self.epochs)

    def batch(self, number: int) -> Indices:
        return self.indices[self.offsets[number] : self.offsets[number + 1]]


@dataclass(frozen=True)
class Session:
    """One run, or one part of a run between a resume and the next.

    Attributes
    ----------
    world_size : int
    ranks : list of RankLog
        One for each rank; empty for a rank that wrote nothing.
    """

    world_size: int
    ranks: list[RankLog]

    def __repr__(self) -> str:
        epochs = sorted({int(e) for log in self.ranks for e in np.unique(log.epochs)})
        batches = ", ".join(str(len(log)) for log in self.ranks[:8])
        more = ", ..." if len(self.ranks) > 8 else ""
        return f"Session({self.world_size} ranks, epochs {epochs}, batches {batches}{more})"


@dataclass(frozen=True)
class Record:
    """All sessions of a folder, in the order in which they ran."""

    folder: Path
    sessions: list[Session]

    def __repr__(self) -> str:
        return f"Record({str(self.folder)!r}, {self.sessions})"


def load_record(folder: str | os.PathLike[str]) -> Record:
    """Read what `ShardRecorder` wrote, also while it writes and after it was killed.

    Raises
    ------
    FileNotFoundError
        If the folder has no records.
    ValueError
        If a file is no record, or one of another rank than its name says, or nothing was written.

    Warns
    -----
    UserWarning
        If a part in the middle of a file is damaged; the batches in it are missing then.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("rank*.record"))
    if not paths:
        raise FileNotFoundError(
            f"no record in {folder}: a folder that ShardRecorder has written to has files "
            "rank*.record"
        )
    found: dict[tuple[int, int], dict[int, list[Block]]] = {}
    for path in paths:
        blocks, _, damaged = read_blocks(path)
        if damaged:
            warnings.warn(f"{damaged} bytes of {path} are damaged and left out", stacklevel=2)
        for block in blocks:
            key = (block.session, block.world_size)
            found.setdefault(key, {}).setdefault(block.rank, []).append(block)
    if not found:
        raise ValueError(f"no record in {folder}: its files rank*.record have no whole block yet")
    sessions = [
        Session(size, [join_blocks(parts.get(rank, [])) for rank in range(size)])
        for (_, size), parts in sorted(found.items())
    ]
    return Record(folder, sessions)


def join_blocks(blocks: list[Block]) -> RankLog:
    if not blocks:
        none = np.empty(0, dtype=np.int64)
        return RankLog(none, none, np.zeros(1, dtype=np.int64), none)
    where = np.concatenate([block.where for block in blocks])
    sizes = np.concatenate([block.sizes for block in blocks])
    return RankLog(
        epochs=where[:, 0],
        steps=where[:, 1],
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        indices=np.concatenate([block.indices for block in blocks]),
    )
