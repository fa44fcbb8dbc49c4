"""The bench's model under LitServe; imported only where that is installed.

A module of its own, since LitServe's worker processes import the class by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import litserve
import torch
from torch import Tensor

from edgeweave.bench.serving_peers import Wide

__all__ = ["WideApi"]


class WideApi(litserve.LitAPI):  # type: ignore[misc]
    """Decodes JSON, batches, infers, encodes, as LitServe's documentation does it."""

    depth = 3

    def setup(self, device: str) -> None:
        """Make the model, once per worker."""
        torch.manual_seed(0)
        self.model = Wide(depth=self.depth).eval()

    # Without annotations: LitServe hands them to its web framework as the shape of the body.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """A list of numbers to a row."""
        return torch.tensor(request["input"])

    def batch(self, inputs: Sequence[Tensor]) -> Tensor:
        """Rows to a batch."""
        return torch.stack(list(inputs))

    def predict(self, x: Any) -> Tensor:
        """Run the model."""
        with torch.inference_mode():
            out: Tensor = self.model(x)
            return out

    def unbatch(self, output: Tensor) -> list[Tensor]:
        """A batch to rows."""
        return list(output)

    def encode_response(self, output: Tensor) -> dict[str, Any]:
        """A row to a list of numbers."""
        return {"output": output.tolist()}


def serve(port: int, batch: int, depth: int) -> None:
    """Serve until SIGTERM.

    Args:
        port: On loopback.
        batch: Most rows of a batch.
        depth: Layers of the model.
    """
    api = WideApi(max_batch_size=batch, batch_timeout=0.002)
    api.depth = depth
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")
