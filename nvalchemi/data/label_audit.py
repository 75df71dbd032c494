"""LabelAudit: what a set of structures holds, what is missing, and what looks wrong."""

import html
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from ase.units import Hartree

from nvalchemi.data.labels import (
    STANDARD_KEYS,
    FoundLabels,
    LabelKeys,
    find_labels,
    numeric_keys,
    similar_keys,
)
from nvalchemi.data.pairs import (
    COINCIDENT,
    MAX_CELLS,
    dependent_vectors,
    first_coincident,
    fractional_coordinates,
)

# A resolution of the energy that no longer resolves what a potential is asked to learn.
MAX_ENERGY_LOSS = 1e-4  # eV per structure

# The energy of a neutral atom in Thomas-Fermi theory, which lies below the true one for every
# element: E. H. Lieb, B. Simon, Adv. Math. 23, 22 (1977); constant 0.7687 Hartree.
_THOMAS_FERMI = -0.7687 * Hartree

_UNIT = {"energy": "eV/atom", "forces": "|F|, eV/Angstrom", "dipole": "e*Angstrom", "charges": "e"}
_UNIT |= {"stress": "eV/Angstrom^3", "virial": "eV"}


class LabelAudit:
    """Counts and ranges of the labels of a set of structures; prints as a table with findings.

    Attributes
    ----------
    source : str
        File name, or "structures".
    keys : LabelKeys
        What was asked for.
    num_frames, num_atoms : int
        Structures and atoms seen.
    refused : dict of int to str
        Numbers of the structures that were left out, with the reason.
    counts : dict of str to int
        Structures that have the label, by name in `LabelKeys`.
    ranges : dict of str to (float, float)
        Smallest and largest energy per atom, norm of a force, or element of another label.
    elements : dict of str to int
        Atoms of each element.
    sizes : dict of int to int
        Structures of each number of atoms.
    pbc : dict of str to int
        Structures of each periodicity, "TTT" to "FFF".
    other_keys : dict of str to int
        Keys that hold numbers and were not asked for: structures that have them.
    """

    def __init__(
        self,
        source: str,
        keys: LabelKeys | Mapping[str, str | None],
        units: str = "eV/Angstrom",
    ) -> None:
        self.source = source
        self.keys = keys = LabelKeys.of(keys)
        self.units = units
        self.num_frames = 0
        self.num_atoms = 0
        self.refused: dict[int, str] = {}
        self.counts = {name: 0 for name, _ in keys.wanted()}
        self.ranges: dict[str, tuple[float, float]] = {}
        self.elements: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()
        self.pbc: Counter[str] = Counter()
        self.other_keys: Counter[str] = Counter()
        self.max_energy_loss = 0.0
        self.frames_beyond_thomas_fermi: list[int] = []
        self._absent: dict[tuple[str, str], list[int]] = {}
        self._broken: dict[tuple[str, str], list[int]] = {}
        self._structure: dict[str, list[int]] = {}
        self._shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._zero_forces = self._constrained = 0

    def see(self, atoms: Atoms) -> FoundLabels:
        """Take one more structure into account and return its labels.

        Raises
        ------
        TypeError
            If it is no `ase.Atoms`.
        """
        index = self.num_frames
        if not isinstance(atoms, Atoms):
            raise TypeError(
                f"structure {index} of {self.source} must be an ase.Atoms: got "
                f"{type(atoms).__name__}"
            )
        self.num_frames += 1
        self.num_atoms += len(atoms)
        self.sizes[len(atoms)] += 1
        self.pbc["".join("FT"[int(p)] for p in atoms.pbc)] += 1
        self._constrained += bool(atoms.constraints)
        numbers, counts = np.unique(atoms.numbers, return_counts=True)
        for number, count in zip(numbers, counts, strict=True):
            self.elements[chemical_symbols[number]] += int(count)

        found = find_labels(atoms, self.keys, self.units)
        for reasons, frames in ((found.absent, self._absent), (found.broken, self._broken)):
            for name, reason in reasons.items():
                frames.setdefault((name, reason), []).append(index)
        problem = structure_problem(atoms)
        if problem is not None:
            self._structure.setdefault(problem, []).append(index)
        self._see_values(index, atoms, found)
        self._see_other_keys(atoms)
        return found

    def _see_values(self, index: int, atoms: Atoms, found: FoundLabels) -> None:
        for name, value in found.values.items():
            source = name if name in self.counts else "stress_from_virial"
            self.counts[source] += 1
            low, high = float(value.min(initial=np.inf)), float(value.max(initial=-np.inf))
            if name == "energy":
                low = high = float(value) / max(len(atoms), 1)
            elif name == "forces" and len(atoms):
                norms = np.linalg.norm(value, axis=1)
                low, high = float(norms.min()), float(norms.max())
                # symmetry makes the forces of small cells and lone atoms exactly zero
                self._zero_forces += high == 0.0 and len(atoms) > 2
            before = self.ranges.get(name, (np.inf, -np.inf))
            self.ranges[name] = (min(before[0], low), max(before[1], high))
        if "energy" in found.values:
            energy = float(found.values["energy"])
            self.max_energy_loss = max(self.max_energy_loss, found.energy_resolution)
            limit = _THOMAS_FERMI * float((atoms.numbers.astype(float) ** (7 / 3)).sum())
            if energy < limit:
                self.frames_beyond_thomas_fermi.append(index)

    def _see_other_keys(self, atoms: Atoms) -> None:
        asked = {key for _, key in self.keys.wanted()}
        for key, place in numeric_keys(atoms).items():
            if key not in asked:
                self.other_keys[key] += 1
                self._shapes.setdefault(key, place)

    # What it says.

    @property
    def num_kept(self) -> int:
        """Structures that were not refused."""
        return self.num_frames - len(self.refused)

    @property
    def problems(self) -> list[str]:
        """Sentences on what is missing or broken; empty if nothing is."""
        sentences = self.unusable
        for (name, reason), frames in self._absent.items():
            sentence = f"no {name} in {self._frames(frames)}: {reason}"
            sentences.append(sentence + self._hint(name))
        return sentences

    @property
    def unusable(self) -> list[str]:
        """Sentences on structures and labels that are there and broken."""
        sentences = [
            f"{self._frames(frames)}: {reason}" for reason, frames in self._structure.items()
        ]
        for (name, reason), frames in self._broken.items():
            sentences.append(f"unusable {name} in {self._frames(frames)}: {reason}")
        return sentences

    @property
    def broken_labels(self) -> list[str]:
        """Names in `LabelKeys` of the labels that are broken in some structure."""
        return sorted({name for name, _ in self._broken})

    @property
    def findings(self) -> list[str]:
        """Sentences: the problems, and what is there but looks wrong or was not asked for."""
        sentences = self.problems
        if self.refused:
            sentences.append(f"{len(self.refused)} of {self.num_frames} structures were left out")
        if self.frames_beyond_thomas_fermi:
            sentences.append(self.unit_sentence())
        if self.max_energy_loss > MAX_ENERGY_LOSS:
            sentences.append(precision_sentence(self.max_energy_loss))
        if self._zero_forces:
            sentences.append(
                f"all forces are exactly zero in {self._zero_forces} structures of more than two "
                "atoms: by symmetry, or were they never computed?"
            )
        if self._constrained:
            sentences.append(
                f"{self._constrained} structures have constraints: their forces are read as "
                "stored, those of constrained atoms are not zeroed"
            )
        wanted = {name for name, _ in self.keys.wanted()}
        for name, key in STANDARD_KEYS.wanted():
            if name not in wanted and self.other_keys[key]:
                sentences.append(
                    f"{key!r} is there in {self.other_keys[key]} structures and was not asked "
                    f"for: LabelKeys({name}={key!r}) reads it"
                )
        return sentences

    def unit_sentence(self) -> str:
        """Sentence on energies that can not be in the unit that was said."""
        return (
            f"energy is below any possible energy of the atoms (that of Thomas-Fermi theory) in "
            f"{self._frames(self.frames_beyond_thomas_fermi)}: it can not be in the unit of "
            f"units={self.units!r}; kcal/mol?"
        )

    def _hint(self, name: str) -> str:
        key = dict(self.keys.wanted())[name]
        similar = similar_keys(name, key, self._shapes)
        if similar:
            return f", but {similar[0]!r} (LabelKeys({name}={similar[0]!r}) reads it)"
        virial = similar_keys("virial", "virial", self._shapes) if name == "stress" else []
        if virial:
            return f", but {virial[0]!r} (LabelKeys(stress_from_virial={virial[0]!r}) converts it)"
        return ""

    def _frames(self, frames: Sequence[int]) -> str:
        shown = ", ".join(map(str, frames[:5])) + (", ..." if len(frames) > 5 else "")
        return f"{len(frames)} of {self.num_frames} structures ({shown})"

    def _head(self) -> str:
        if not self.num_frames:
            return f"{self.source}: no structures"
        low, high = min(self.sizes), max(self.sizes)
        elements = ", ".join(f"{symbol} {n}" for symbol, n in sorted(self.elements.items()))
        periodic = ", ".join(f"{flags} {n}" for flags, n in sorted(self.pbc.items()))
        return (
            f"{self.source}: {self.num_frames} structures, {self.num_atoms} atoms ({low} to "
            f"{high} each); atoms of {elements}; periodic along {periodic}"
        )

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = [("label", "key", "structures", "range")]
        for name, key in self.keys.wanted():
            field = "stress" if name == "stress_from_virial" else name
            low, high = self.ranges.get(field, (0.0, 0.0))
            span = f"{low:.6g} to {high:.6g} {_UNIT[field]}" if self.counts[name] else "missing"
            rows.append((name, key, f"{self.counts[name]} of {self.num_frames}", span))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        table = ["  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        lines = [self._head(), *(line.rstrip() for line in table)]
        if self.other_keys:
            lines.append("other numbers: " + ", ".join(sorted(self.other_keys)))
        return "\n".join(lines + [f"- {sentence}" for sentence in self.findings])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = self._rows()
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        lines = [f"<p>{html.escape(self._head())}</p><table><thead><tr>{cells}</tr></thead><tbody>"]
        for row in body:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            lines.append(f"<tr>{cells}</tr>")
        lines.append("</tbody></table>")
        if self.other_keys:
            names = ", ".join(sorted(self.other_keys))
            lines.append(f"<p>other numbers: {html.escape(names)}</p>")
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.findings)
        return "".join(lines) + (f"<ul>{items}</ul>" if items else "")


def structure_problem(atoms: Atoms) -> str | None:
    """Why a structure can not be used, whatever its labels; None if it can."""
    if len(atoms) == 0:
        return "the structure has no atoms"
    if atoms.numbers.min() < 1:
        return "the structure has dummy atoms (X)"
    if not np.isfinite(atoms.positions).all():
        return "positions are not finite"
    cell, pbc = np.asarray(atoms.cell), np.asarray(atoms.pbc)
    if dependent_vectors(cell[None], pbc[None])[0]:
        flags = "".join("FT"[int(p)] for p in atoms.pbc)
        return (
            f"the structure is periodic along {flags}, but its cell vectors there are zero or "
            "dependent: set the cell, or pbc to False"
        )
    counts = np.array([len(atoms)])
    if (
        np.abs(fractional_coordinates(atoms.positions, cell[None], pbc[None], counts)) > MAX_CELLS
    ).any():
        return "an atom lies more than 2^31 cells away: the trajectory has exploded"
    twice = first_coincident(atoms.positions, cell, pbc)
    if twice is not None:
        first, second = twice
        return f"atoms {first} and {second} lie in one place (closer than {COINCIDENT:g} Angstrom)"
    return None


def precision_sentence(loss: float) -> str:
    """Sentence on energies whose type resolves too little."""
    return (
        f"energies are resolved to {loss:.2g} eV per structure only (limit {MAX_ENERGY_LOSS:g}): "
        "use dtype=torch.float64 with data in double precision, or subtract the energies of the "
        "atoms first"
    )
