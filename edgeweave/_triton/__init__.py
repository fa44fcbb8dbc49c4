"""Plans and kernels for GPUs: what `_plan` runs where tensors are on CUDA.

`_edges` holds an edge set on a device and needs torch alone. `_ops` holds the operators over it,
under the names and with the arguments of the native library's; importing it imports Triton, so
only those do who have CUDA tensors.
"""

from __future__ import annotations

from ._edges import DeviceEdges

__all__ = ["DeviceEdges"]
