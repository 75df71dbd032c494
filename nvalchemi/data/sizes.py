"""How many atoms and edges each structure of a batch has, and the pointers that follow."""

from collections.abc import Callable

import torch
from torch import Tensor

from nvalchemi.data.ragged import owners, pointers
from nvalchemi.data.tensor_fields import TensorFields


class StructureSizes(TensorFields):
    """Sizes of the B structures of a batch, with V atoms and E edges in all.

    The counts stay on the CPU, so that reading them never waits for a GPU; what is derived from
    them is made once, on the device of the fields.
    """

    _counts: dict[str, Tensor]
    _cache: dict[str, Tensor]

    @property
    def num_graphs(self) -> int:
        """Number of structures B."""
        return self._counts["atom"].shape[0]

    batch_size = num_graphs

    def __len__(self) -> int:
        return self.num_graphs

    @property
    def num_nodes(self) -> int:
        """Number of atoms V."""
        return self._values["positions"].shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges E."""
        return int(self._counts["edge"].sum())

    @property
    def num_nodes_list(self) -> list[int]:
        """Atoms of each structure."""
        return self._counts["atom"].tolist()

    @property
    def num_edges_list(self) -> list[int]:
        """Edges of each structure."""
        return self._counts["edge"].tolist()

    @property
    def max_num_nodes(self) -> int:
        """Atoms of the largest structure."""
        return int(self._counts["atom"].max())

    @property
    def num_nodes_per_graph(self) -> Tensor:
        """Atoms of each structure, [B] int64 on the device of the batch."""
        return self._cached("num_nodes_per_graph", lambda: self._counts["atom"])

    @property
    def num_edges_per_graph(self) -> Tensor:
        """Edges of each structure, [B] int64 on the device of the batch."""
        return self._cached("num_edges_per_graph", lambda: self._counts["edge"])

    @property
    def batch_idx(self) -> Tensor:
        """Structure of each atom, [V] int32."""
        return self._cached(
            "batch_idx", lambda: owners(self._counts["atom"], self.num_nodes).to(torch.int32)
        )

    @property
    def batch_ptr(self) -> Tensor:
        """First atom of each structure and the end, [B + 1] int32."""
        return self._cached("batch_ptr", lambda: pointers(self._counts["atom"]).to(torch.int32))

    @property
    def edge_ptr(self) -> Tensor:
        """First edge of each atom and the end, [V + 1] int32, for a list sorted by its centres."""

        if "neighbor_list" not in self._values:
            raise AttributeError("edge_ptr needs a neighbor_list: the batch has none")

        def make() -> Tensor:
            centres = self._values["neighbor_list"][:, 0].long()
            return pointers(torch.bincount(centres, minlength=self.num_nodes)).to(torch.int32)

        return self._cached("edge_ptr", make)

    def _cached(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._cache:
            self._cache[name] = make().to(self.device, non_blocking=True)
        return self._cache[name]

    def _edge_offsets(self) -> Tensor:
        """First atom of the structure of each edge, [E, 1], in the dtype of the neighbour list."""
        first = pointers(self._counts["atom"])[:-1]
        edges = self._counts["edge"]
        offsets = torch.repeat_interleave(first, edges, output_size=int(edges.sum()))
        neighbors = self._values["neighbor_list"]
        return offsets.unsqueeze(1).to(neighbors.device, neighbors.dtype)
