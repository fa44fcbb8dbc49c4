"""Export a small graph model, serve it in this process, and ask it in every way there is.

Against a server of your own, leave out what comes before the client:

    with Client("127.0.0.1:8001") as client: ...
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch_geometric.nn.models import GCN

from edgeweave.inference_server import (
    AsyncClient,
    BackgroundServer,
    Client,
    ServerSettings,
    export_model,
)

ARGUMENTS = {"in_channels": 8, "hidden_channels": 16, "num_layers": 2, "out_channels": 3}


def export(repository: Path) -> None:
    torch.manual_seed(0)
    x, edge_index = torch.randn(100, 8), torch.randint(0, 100, (2, 400))
    export_model(
        GCN(**ARGUMENTS),
        repository,
        "papers",
        architecture="torch_geometric.nn.models:GCN",
        arguments=ARGUMENTS,
        kind="resident_graph",
        graph=(x, edge_index),
        examples=[x, edge_index],
        options={"graph": {"features": 8, "channels": 3, "hops": 3}},
    )


async def ask_at_once(target: str) -> int:
    async with AsyncClient(target) as client:
        answers = await asyncio.gather(
            *(client.infer("papers", {"NODE_IDS": np.array([node])}) for node in range(20))
        )
    return len(answers)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder))
        settings = ServerSettings(Path(folder), port=0, metrics_port=None, allow_graph_updates=True)
        with BackgroundServer(settings) as server:
            target = f"127.0.0.1:{server.port}"
            with Client(target) as client:
                known = client.infer("papers", {"NODE_IDS": np.array([3, 14, 15])})
                print("classes:", known.outputs["OUTPUT"].argmax(axis=1).tolist())

                # A paper that is not in the graph, with two citations: ids from 100 on are new.
                fresh = client.infer(
                    "papers",
                    {
                        "NODE_IDS": np.array([100]),
                        "NEW_FEATURES": np.zeros((1, 8), np.float32),
                        "NEW_EDGES": np.array([[3, 14], [100, 100]]),
                    },
                )
                print("a new paper:", fresh.outputs["OUTPUT"].shape)

                grown = client.graph_update("papers", add_edges=[[3], [14]])
                after = client.infer("papers", {"NODE_IDS": np.array([14])})
                print("graph version:", grown.graph_version, after.parameters["graph_version"])
            print("answers at once:", asyncio.run(ask_at_once(target)))


if __name__ == "__main__":
    main()
