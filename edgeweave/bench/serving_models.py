"""The models of `edgeweave bench serving`, written to a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from edgeweave.bench.serving_peers import Shift, Wide
from edgeweave.inference_server import TensorSpec, export_model

__all__ = [
    "GIN_ARGUMENTS",
    "MAX_BATCH",
    "MOLECULE_EDGES",
    "MOLECULE_NODES",
    "WIDTH",
    "write_molecule_models",
    "write_shift",
    "write_wide",
]

WIDTH: Final = 1024
MAX_BATCH: Final = 64
GIN_ARGUMENTS: Final = {
    "in_channels": 32,
    "hidden_channels": 64,
    "num_layers": 3,
    "out_channels": 64,
}
MOLECULE_NODES, MOLECULE_EDGES = 18, 37


def write_wide(repository: Path, depth: int) -> None:
    """Write `wide`: layers of one width."""
    torch.manual_seed(0)
    arguments = {"width": WIDTH, "depth": depth}
    export_model(
        Wide(**arguments),
        repository,
        "wide",
        arguments=arguments,
        architecture="edgeweave.bench.serving_peers:Wide",
        examples=[torch.zeros(1, WIDTH)],
        options={
            "max_batch_size": MAX_BATCH,
            "warmup": [{"INPUT0": [n, WIDTH]} for n in (1, 8, 32, 64)],
            # As long as LitServe waits here. One thread, since the event loop and the client need
            # processors too; the offline side has all of them.
            "batching": {"max_queue_delay_us": 2000},
            "instances": {"threads": 1},
        },
    )


def write_shift(repository: Path) -> None:
    """Write `shift`: many bytes, next to no work."""
    spec = TensorSpec("INPUT0", "FP32", (-1, -1))
    export_model(
        Shift(),
        repository,
        "shift",
        architecture="edgeweave.bench.serving_peers:Shift",
        inputs=[spec],
        outputs=[TensorSpec("OUTPUT0", "FP32", (-1, -1))],
        options={"max_batch_size": MAX_BATCH},
    )


def write_molecule_models(repository: Path) -> None:
    """Write `molecules`, and `one_molecule`, which takes one graph at a time."""
    from torch_geometric.nn.models import GIN

    torch.manual_seed(0)
    # A budget of one molecule is no batching at all.
    for name, budget in (("molecules", 1 << 16), ("one_molecule", MOLECULE_NODES)):
        export_model(
            GIN(**GIN_ARGUMENTS),
            repository,
            name,
            architecture="torch_geometric.nn.models:GIN",
            arguments=GIN_ARGUMENTS,
            kind="graphs",
            options={
                # One thread: two are no faster on a molecule, and take each other's processor.
                "instances": {"threads": 1},
                "graph": {
                    "features": GIN_ARGUMENTS["in_channels"],
                    "channels": GIN_ARGUMENTS["out_channels"],
                    "readout": "sum",
                    "max_nodes": budget,
                },
            },
        )
