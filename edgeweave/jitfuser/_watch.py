"""Notices that a model's weights were changed since it was frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["Watch"]


class Watch:
    """Remembers every parameter and buffer of a model, and its version.

    Args:
        model: The model. Tensors made in inference mode have no version; replacing them is seen,
            writing into them is not. Nor are edits through `.data` or numpy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries: list[tuple[Mapping[str, Tensor | None], str, Tensor, int]] = []
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        self._entries.append((held, name, tensor, _version(tensor)))

    def changed(self) -> bool:
        """Whether any of them was written to or replaced."""
        for held, name, tensor, version in self._entries:
            if held.get(name) is not tensor or (version >= 0 and tensor._version != version):
                return True
        return False


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
