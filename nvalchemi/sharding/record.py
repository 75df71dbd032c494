"""What the ranks did see: a hook that writes it down as it happens, and the reader of its files.

Each rank appends to a file of its own. A file is a row of blocks, each a few hundred batches with a
checksum, written by one call; what has been written can be read while the training runs and after
it was killed, and a block that was cut off is left out.
"""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from nvalchemi.data.datapipes.order import Indices
from nvalchemi.data.datapipes.weights import check_integer
from nvalchemi.distributed.collectives import get_world_size
from nvalchemi.training.stages import TrainingStage

MAGIC = 0x4E56_5245_4331  # "NVREC1"
# magic, world size, rank, session, batches, indices, bytes of an index, checksum of what follows
HEADER = 8


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
        # the counters have been raised by this batch
        self._where.append((ctx.epoch, ctx.epoch_step_count - 1))
        self._indices.append(np.asarray(metadata["index"].cpu(), dtype=np.int64))
        if len(self._where) >= self.flush_every:
            self.flush()

    def _open(self, world_size: int, rank: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{rank:05d}.record"
        end, session = 0, 0
        if path.exists() and path.stat().st_size:
            blocks, end = read_blocks(path)
            if not end and not path.read_bytes().startswith(MAGIC.to_bytes(8, "little")):
                raise ValueError(
                    f"{path} must be a record of ShardRecorder to be gone on with, and it is none; "
                    "choose another folder"
                )
            session = 1 + max((block.session for block in blocks), default=-1)
        self._file = open(path, "r+b" if end else "wb", buffering=0)
        self._file.truncate(end)  # a block that was cut off would hide those after it
        self._file.seek(end)
        self._place = (world_size, rank, session)
        # the session is known from its first step on, so that ranks can not count differently
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
        header = [MAGIC, *self._place, len(sizes), indices.size, narrow.itemsize, zlib.crc32(body)]
        self._file.write(np.array(header, dtype="<i8").tobytes() + body)

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


def read_blocks(path: Path) -> tuple[list[Block], int]:
    """Whole blocks of a file, and where the last one ends."""
    data = path.read_bytes()
    blocks: list[Block] = []
    position = 0
    while position + 8 * HEADER <= len(data):
        header = np.frombuffer(data, "<i8", HEADER, position).tolist()
        magic, world_size, rank, session, batches, number, width, checksum = header
        if magic != MAGIC or width not in (1, 2, 4, 8) or min(batches, number) < 0:
            break
        start = position + 8 * HEADER
        end = start + 24 * batches + width * number
        if end > len(data) or zlib.crc32(data[start:end]) != checksum:
            break
        where = np.frombuffer(data, "<i8", 2 * batches, start).reshape(-1, 2)
        sizes = np.frombuffer(data, "<i8", batches, start + 16 * batches)
        indices = np.frombuffer(data, f"<u{width}", number, start + 24 * batches)
        blocks.append(Block(world_size, rank, session, where, sizes, indices.astype(np.int64)))
        position = end
    return blocks, position


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
    """
    folder = Path(folder)
    paths = sorted(folder.glob("rank*.record"))
    if not paths:
        raise FileNotFoundError(
            f"no record in {folder}: a folder that ShardRecorder has written to has files "
            "rank*.record"
        )
    found: dict[tuple[int, int], dict[int, list[Block]]] = {}
    for path in paths:  # that of rank 0 first, which has part in every session
        keys: dict[int, tuple[int, int]] = {}
        for block in read_blocks(path)[0]:
            if block.session not in keys:
                same_size = [key for key in keys.values() if key[0] == block.world_size]
                keys[block.session] = (block.world_size, len(same_size))
            found.setdefault(keys[block.session], {}).setdefault(block.rank, []).append(block)
    sessions = [
        Session(size, [join_blocks(parts.get(rank, [])) for rank in range(size)])
        for (size, _), parts in found.items()
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
