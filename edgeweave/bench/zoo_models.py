"""The models of the zoo: layers and models of PyG, Hugging Face architectures, vision models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from edgeweave.bench.inference_models import ZOO as DENSE
from edgeweave.bench.inference_models import ZooModel
from edgeweave.bench.inference_models import build as build_dense
from edgeweave.bench.zoo_hf import HF
from edgeweave.bench.zoo_layers import BASIC
from edgeweave.bench.zoo_pyg import MORE
from edgeweave.bench.zoo_vision import VISION

__all__ = ["FAMILIES", "Entry", "zoo"]

FAMILIES = ("pyg", "hf", "vision", "tabular")
"""PyG; Hugging Face's text, speech and series; images, by hand or of `transformers`; tables."""

_BATCH = 2
# Of the models that `edgeweave bench inference` brings; the other images are told by their family.
_TEXTS = ("BERT-base", "DistilBERT", "GPT-2")


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        name: As in tables.
        family: One of `FAMILIES`.
        make: Gives the model and the arguments of a call, `(args, kwargs)`; its argument is whether
            small inputs are wanted.
    """

    name: str
    family: str
    make: Callable[[bool], tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]]


def _dense(entry: ZooModel, quick: bool) -> Any:
    return build_dense(entry, _BATCH, quick)


def _family(entry: ZooModel) -> str:
    if entry.name in _TEXTS:
        return "hf"
    return "tabular" if entry.family == "mlp" else "vision"


def zoo() -> dict[str, Entry]:
    """The models of the zoo by name.

    Returns:
        PyG first, then Hugging Face, vision, and models of tables.

    Example:
        >>> from edgeweave.bench.zoo_models import zoo
        >>> zoo()["GCNConv"].family, zoo()["ResNet-50"].family, zoo()["T5"].family
        ('pyg', 'vision', 'hf')
    """
    entries = [Entry(name, "pyg", make) for name, make in {**BASIC, **MORE}.items()]
    for table in (DENSE, HF, VISION):
        for name, entry in table.items():
            family = _family(entry) if table is DENSE else entry.family
            entries.append(Entry(name, family, functools.partial(_dense, entry)))
    entries.sort(key=lambda entry: FAMILIES.index(entry.family))
    return {entry.name: entry for entry in entries}
