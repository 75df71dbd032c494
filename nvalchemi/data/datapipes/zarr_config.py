"""How arrays of a store are chunked and compressed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from nvalchemi.data.datapipes.zarr_holes import WRITES_EMPTY, impossible_fill

# Decoded size of one chunk. Reading one structure at random decodes a whole chunk, so it must be
# small; reaching a chunk through Zarr costs about 0.3 ms whatever its size, so it must not be tiny
# either. Decoding 256 KiB takes about 0.15 ms: smaller chunks would gain nothing and be more files.
CHUNK_BYTES = 2**18


class ZarrArrayConfig(BaseModel):
    """Storage of one array; what is None follows Zarr's defaults.

    Parameters
    ----------
    compressors, filters, serializer
        Codecs, as `zarr.create_array` takes them; an empty tuple for none.
    chunk_size : int, optional
        Rows of the leading axis in one chunk. By default as many (a power of two) as fit in
        256 KiB, whatever the size of the first write.
    shard_size : int, optional
        Rows in one shard (a file that holds several chunks); a multiple of the chunk size.
    write_empty_chunks : bool
        Whether chunks that hold only zeros are written out. Only then is a lost file found out; the
        setting is kept with the array, so it holds for what is appended too.

    Raises
    ------
    ValueError
        If a size is not positive or a shard is no multiple of a chunk.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    compressors: Any = None
    filters: Any = None
    serializer: Any = None
    chunk_size: int | None = Field(default=None, gt=0)
    shard_size: int | None = Field(default=None, gt=0)
    write_empty_chunks: bool = True

    @model_validator(mode="after")
    def _shard_holds_whole_chunks(self) -> "ZarrArrayConfig":
        if self.shard_size and self.chunk_size and self.shard_size % self.chunk_size:
            raise ValueError(
                f"shard_size must be a multiple of chunk_size: {self.shard_size} is none of "
                f"{self.chunk_size}"
            )
        return self

    def arguments(self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> dict:
        """Keyword arguments of `zarr.Group.create_array` for an array of such rows."""
        trailing = tuple(max(1, size) for size in row_shape)
        rows = self.chunk_size or default_chunk_rows(dtype.itemsize * int(np.prod(trailing)))
        given: dict[str, Any] = {
            "chunks": (rows, *trailing),
            "config": {"write_empty_chunks": self.write_empty_chunks},
        }
        given["attributes"] = {WRITES_EMPTY: self.write_empty_chunks}
        fill = impossible_fill(dtype)
        if self.write_empty_chunks and fill is not None:
            given["fill_value"] = fill
        if self.shard_size is not None:
            if self.shard_size % rows:
                raise ValueError(
                    f"shard_size must be a multiple of the chunk size: {self.shard_size} is none "
                    f"of {rows}, the rows in a chunk of {name!r}"
                )
            given["shards"] = (self.shard_size, *trailing)
        for key in ("compressors", "filters", "serializer"):
            if getattr(self, key) is not None:
                given[key] = getattr(self, key)
        return given


class ZarrWriteConfig(BaseModel):
    """Storage of a whole store: by group, and by field where one differs.

    Parameters
    ----------
    meta, core, custom : ZarrArrayConfig
        Pointers and masks; known fields; custom fields.
    field_overrides : dict of str to ZarrArrayConfig
        For single fields by name, instead of that of their group.
    """

    model_config = ConfigDict(extra="forbid")

    meta: ZarrArrayConfig = ZarrArrayConfig()
    core: ZarrArrayConfig = ZarrArrayConfig()
    custom: ZarrArrayConfig = ZarrArrayConfig()
    field_overrides: dict[str, ZarrArrayConfig] = {}

    @classmethod
    def of(cls, config: "ZarrWriteConfig | Mapping[str, Any] | None") -> "ZarrWriteConfig":
        """Make one from what a writer was given."""
        return config if isinstance(config, cls) else cls.model_validate(dict(config or {}))

    def array(self, group: str, name: str) -> ZarrArrayConfig:
        """Storage of one array."""
        by_group = {"meta": self.meta, "core": self.core, "custom": self.custom}
        return self.field_overrides.get(name, by_group[group])


def default_chunk_rows(row_bytes: int) -> int:
    """Rows in a chunk: the largest power of two that stays within 256 KiB, at least one."""
    return 1 << max(0, (CHUNK_BYTES // max(1, row_bytes)).bit_length() - 1)
