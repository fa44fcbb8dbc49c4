"""Molecules of the examples: the first thousands of the NCI's collection, which RDKit carries."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgeweave.bench.packaged import DataUnavailableError, find_files

__all__ = ["Molecule", "load_molecules"]

ELEMENTS = (6, 7, 8, 9, 15, 16, 17, 35, 53)
"""Atomic numbers that have a feature of their own; all others share one."""

ATOM_FEATURES = len(ELEMENTS) + 1 + 5
BOND_FEATURES = 6
_FOLDER, _FILE = "Data/NCI", "first_5K.smi"


@dataclass(frozen=True)
class Molecule:
    """One molecule as a graph, without its hydrogens.

    Attributes:
        smiles: What it was read from.
        x: fp32 `[atoms, 15]`: element, neighbours, charge, hydrogens, aromatic, in a ring.
        edge_index: int64 `[2, 2 * bonds]`, each bond in both directions, side by side.
        edge_attr: fp32 `[2 * bonds, 6]`: single, double, triple, aromatic, conjugated, in a ring.
        log_p: Crippen's estimate of the octanol-water partition coefficient.
    """

    smiles: str
    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    log_p: float


def load_molecules(limit: int = 2_000) -> list[Molecule]:
    """Reads molecules from the file of the installed RDKit.

    Args:
        limit: How many at most; those that RDKit does not understand, or that have no bond, are
            left out.

    Returns:
        The molecules, in the order of the file.

    Raises:
        DataUnavailableError: If RDKit is not installed; the message names the pip command.

    Example:
        >>> from edgeweave.bench.molecules import load_molecules
        >>> first = load_molecules(1)[0]
        >>> first.smiles, first.x.shape, first.edge_index.shape
        ('CC1=CC(=O)C=CC1=O', torch.Size([9, 15]), torch.Size([2, 18]))
    """
    folder = find_files("rdkit", _FOLDER, (_FILE,))
    if folder is None:
        raise DataUnavailableError(
            "load_molecules: package rdkit must be installed, got none with the NCI's molecules; "
            "pip install 'edgeweave[demo]'"
        )
    # By name: the types that RDKit ships do not have all of its functions.
    chem = importlib.import_module("rdkit.Chem")
    crippen = importlib.import_module("rdkit.Chem.Crippen")
    log = importlib.import_module("rdkit.RDLogger")
    log.DisableLog("rdApp.*")  # it says of each molecule what is unusual about it
    found: list[Molecule] = []
    for line in (folder / _FILE).read_text().splitlines():
        if len(found) == limit:
            break
        smiles = line.split()[0]
        parsed = chem.MolFromSmiles(smiles)
        if parsed is not None and parsed.GetNumBonds():
            found.append(_as_graph(smiles, parsed, float(crippen.MolLogP(parsed))))
    return found


def _as_graph(smiles: str, parsed: Any, log_p: float) -> Molecule:
    atoms = []
    for atom in parsed.GetAtoms():
        number = atom.GetAtomicNum()
        element = [float(number == known) for known in ELEMENTS]
        atoms.append(
            [
                *element,
                float(not any(element)),
                atom.GetDegree() / 4,
                float(atom.GetFormalCharge()),
                atom.GetTotalNumHs() / 4,
                float(atom.GetIsAromatic()),
                float(atom.IsInRing()),
            ]
        )
    ends, bonds = [], []
    for bond in parsed.GetBonds():
        first, last = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        order = bond.GetBondTypeAsDouble()  # 1.5 for an aromatic bond
        kinds = [float(order == known) for known in (1.0, 2.0, 3.0, 1.5)]
        ends += [(first, last), (last, first)]
        bonds += [[*kinds, float(bond.GetIsConjugated()), float(bond.IsInRing())]] * 2
    return Molecule(
        smiles,
        torch.tensor(atoms),
        torch.tensor(ends).t().contiguous(),
        torch.tensor(bonds),
        log_p,
    )
