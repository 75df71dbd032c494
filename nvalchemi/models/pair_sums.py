"""Sums over neighbours as batched matrix products.

Message passing needs ``sum over j of w_ij x_j`` for several edge weights w and for features x of
the neighbours. Written edge by edge this moves an array [E, features] through memory for every
operation, and twice as often in the backward pass of a loss on forces. As matrix products of the
weights with the features it is several times as fast on a CPU, and exactly the same sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nvalchemi.data.batch import Batch

# Measured on a CPU: a pair of atoms in a dense matrix costs a multiply, an edge in a row of its
# own costs a gathered row of features. Up to this ratio of pairs to edges a dense matrix wins.
_PAIRS_PER_EDGE = 3
# Structures are stacked, padded, with a larger one down to this part of its size.
_FILL = 0.75


class _Block(NamedTuple):
    """A stack of `number` matrices, each of `rows` centres and `columns` sources."""

    number: int
    rows: int
    columns: int


class PairSums:
    """How the edges of a batch fill matrices.

    A small structure is one dense matrix: its atoms are centres and sources both, and the periodic
    images of a pair add up. In a structure of many atoms and few edges every atom is a matrix of
    one row, with its neighbours as sources. Matrices of about the same size are stacked.

    Parameters
    ----------
    batch : Batch
        With a neighbour list.
    """

    def __init__(self, batch: Batch) -> None:
        self._blocks: list[_Block] = []
        layout, entries, columns = self._stack_dense(batch.num_nodes_list, batch.num_edges_list)
        structure = batch.batch_idx.long()
        first, column, width = layout.to(batch.device).index_select(0, structure).unbind(1)
        atom = torch.arange(batch.num_nodes, device=batch.device)
        local = atom - batch.batch_ptr.long().index_select(0, structure)
        centre, neighbor = batch.neighbor_list.long().unbind(1)
        # Of each atom: first entry of its row and number of its row. Of each edge: its entry. Of
        # each column: the atom that it stands for.
        first, self._row = first + local * width, column + local
        self._entry = first[centre] + local[neighbor]
        self._source = atom
        # Structures of one size are one block in the order of the batch: nothing to rearrange.
        everything = [(batch.num_graphs, batch.max_num_nodes, batch.max_num_nodes)]
        self._in_order = self._blocks == everything and columns == batch.num_nodes
        if not self._in_order:
            lone = width == 0
            # Columns of padding show atom 0: their weights are zero.
            self._source = atom.new_zeros(columns).index_copy(0, self._row[~lone], atom[~lone])
            if not all(layout[:, 2].tolist()):
                self._append_lone(batch, lone, entries)

    def _stack_dense(self, sizes: list[int], edges: list[int]) -> tuple[Tensor, int, int]:
        """Choose blocks; for each structure first entry, first column, width (0 if by atom)."""
        dense = [s for s, size in enumerate(sizes) if size**2 <= _PAIRS_PER_EDGE * max(edges[s], 1)]
        dense.sort(key=lambda s: -sizes[s])
        layout = [(0, 0, 0)] * len(sizes)
        entries = columns = 0
        while dense:
            width = sizes[dense[0]]
            count = sum(sizes[s] >= _FILL * width for s in dense)
            self._blocks.append(_Block(count, width, width))
            for s in dense[:count]:
                layout[s] = (entries, columns, width)
                entries, columns = entries + width**2, columns + width
            dense = dense[count:]
        return torch.tensor(layout), entries, columns

    def _append_lone(self, batch: Batch, lone: Tensor, entries: int) -> None:
        """Add the block of atoms with a matrix of their own."""
        centre, neighbor = batch.neighbor_list.long().unbind(1)
        chosen = lone[centre].nonzero().squeeze(1)
        order = chosen[centre[chosen].argsort(stable=True)]
        turn = lone.cumsum(0) - 1
        owner = turn[centre[order]]
        count = int(lone.sum())
        degree = torch.bincount(owner, minlength=count)
        width = max(1, int(degree.max()))
        place = torch.arange(len(order), device=owner.device) - (degree.cumsum(0) - degree)[owner]
        place = owner * width + place

        rows, columns = sum(b.number * b.rows for b in self._blocks), len(self._source)
        self._blocks.append(_Block(count, 1, width))
        self._row = torch.where(lone, rows + turn, self._row)
        self._entry = self._entry.index_copy(0, order, entries + place)
        padded = torch.cat([self._source, self._source.new_zeros(count * width)])
        self._source = padded.index_copy(0, columns + place, neighbor[order])

    def matrices(self, weights: Tensor) -> list[Tensor]:
        """Arrange edge weights [E, K]: for each block [number, rows * K, columns]."""
        kinds = weights.shape[1]
        sizes = [block.number * block.rows * block.columns for block in self._blocks]
        entries = weights.new_zeros(sum(sizes), kinds).index_add(0, self._entry, weights)
        return [
            part.view(*block, kinds).transpose(2, 3).reshape(block.number, -1, block.columns)
            for part, block in zip(entries.split(sizes), self._blocks)
        ]

    def sum(self, matrices: list[Tensor], features: Tensor) -> Tensor:
        """Sum ``w_ij x_j`` over the neighbours j: features [V, F] give [V, K, F]."""
        width = features.shape[1]
        if not self._in_order:
            features = features.index_select(0, self._source)
        parts = features.split([block.number * block.columns for block in self._blocks])
        sums = [
            torch.bmm(matrix, part.reshape(block.number, block.columns, width)).view(
                block.number * block.rows, -1, width
            )
            for matrix, part, block in zip(matrices, parts, self._blocks)
        ]
        together = sums[0] if len(sums) == 1 else torch.cat(sums)
        return together if self._in_order else together.index_select(0, self._row)
