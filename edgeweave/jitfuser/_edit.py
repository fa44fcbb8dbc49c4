"""Editing a TorchScript graph: constants, new nodes, and keeping a node out of fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgeweave.jitfuser._values import Info

__all__ = ["Editor", "Finding", "is_constant"]

# What the bridge looks at; in any other dtype it leaves a node alone.
_BRIDGED = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Finding:
    """A node that torch's bridge would get wrong, and what was done.

    Attributes:
        op: Name of the operation, such as `aten::mul`.
        fault: What the bridge does with it.
        action: `"rewritten"` to an equal form which may fuse, or `"kept out"` of fusion.
    """

    op: str
    fault: str
    action: str


def is_constant(value: Any) -> bool:
    """Whether a value is known before the graph runs.

    Args:
        value: A value of the graph.

    Returns:
        True for constants, None among them.
    """
    return bool(value.node().kind() == "prim::Constant")


class Editor:
    """A graph with what is known of its values, and a list of what was changed.

    Args:
        graph: Changed in place.
        infos: From `Values.of(graph)`.
        keep_nan: Whether a NaN must stay one where the bridge's fused kernels drop it.
    """

    def __init__(self, graph: Any, infos: dict[int, Info], keep_nan: bool) -> None:
        self.graph = graph
        self.keep_nan = keep_nan
        self.findings: list[Finding] = []
        self._infos = infos

    def info(self, value: Any) -> Info | None:
        """What is known of a tensor; None if it is no tensor, or of unknown kind."""
        return self._infos.get(value.unique())

    def know(self, value: Any, info: Info) -> None:
        """Writes down what a new tensor is."""
        self._infos[value.unique()] = info

    def infos(self, node: Any) -> list[Info | None]:
        """What is known of the tensors going into and out of a node, and into its lists."""
        values = [*self.tensors_in(node), *(v for v in node.outputs() if _is_tensor(v))]
        return [self.info(value) for value in values]

    def tensors_in(self, node: Any) -> list[Any]:
        """The tensors going into a node, those in lists included."""
        found = []
        for value in node.inputs():
            if _is_tensor(value):
                found.append(value)
            elif value.node().kind() == "prim::ListConstruct":
                found += [item for item in value.node().inputs() if _is_tensor(item)]
        return found

    def is_bridged(self, node: Any) -> bool:
        """Whether the bridge would look at a node at all, going by its inputs' dtypes."""
        infos = [self.info(value) for value in self.tensors_in(node)]
        return any(info is None or info.dtype in _BRIDGED for info in infos)

    def is_plain(self, node: Any) -> bool:
        """Whether every tensor of a node is of one dtype that the bridge knows, with elements."""
        infos = self.infos(node)
        return all(
            info is not None
            and info.dtype in _BRIDGED
            and info.dtype == infos[0].dtype  # type: ignore[union-attr]
            and len(info.shape) > 0
            and not info.empty
            for info in infos
        )

    def constant(self, node: Any, value: Any) -> Any:
        """Makes a constant that is there before `node`."""
        with self.graph.insert_point_guard(node):
            made = self.graph.insertConstant(value)
        if isinstance(value, Tensor):
            self._infos[made.unique()] = Info(
                value.dtype, tuple(value.shape), tuple(value.stride())
            )
        return made

    def insert(self, before: Any, kind: str, inputs: Sequence[Any], info: Info | None) -> Any:
        """Makes a node with one tensor as its result.

        Args:
            before: The node that it goes before.
            kind: Name of the operation.
            inputs: Its inputs.
            info: What is known of the result.

        Returns:
            The result.
        """
        made = self.graph.create(kind, list(inputs), 1)
        made.insertBefore(before)
        made.copyMetadata(before)
        made.output().setType(torch._C.TensorType.get())
        if info is not None:
            self._infos[made.output().unique()] = info
        return made.output()

    def replace(self, node: Any, kind: str, inputs: Sequence[Any], fault: str, action: str) -> Any:
        """Puts another operation in a node's place.

        Args:
            node: Goes away; it must have one result.
            kind: Name of the operation.
            inputs: Its inputs.
            fault: What the bridge would have done wrong.
            action: `"rewritten"` or `"kept out"`.

        Returns:
            The new result.
        """
        made = self.insert(node, kind, inputs, self.info(node.output()))
        self.swap(node, made, fault, action)
        return made

    def swap(self, node: Any, value: Any, fault: str, action: str) -> None:
        """Lets a value, made before, take the place of a node's result."""
        self.note(node, fault, action)
        node.output().replaceAllUsesWith(value)
        node.destroy()

    def isolate(self, node: Any, fault: str) -> None:
        """Keeps a node out of fusion by putting views around it, which the bridge does not know.

        What is then alone is a partition of one operation, and those the bridge leaves to torch,
        except convolutions, products, pools, layer norms and `cat`, which have other names to
        hide under.
        """
        for place, value in enumerate(list(node.inputs())):
            if _is_tensor(value) and not is_constant(value):
                node.replaceInput(
                    place, self.insert(node, "aten::alias", [value], self.info(value))
                )
        for value in list(node.outputs()):
            if _is_tensor(value):
                made = self.graph.create("aten::alias", [value], 1)
                made.insertAfter(node)
                made.output().setType(torch._C.TensorType.get())
                info = self.info(value)
                if info is not None:
                    self._infos[made.output().unique()] = info
                value.replaceAllUsesAfterNodeWith(made, made.output())
        self.note(node, fault, "kept out")

    def note(self, node: Any, fault: str, action: str) -> None:
        """Writes down what was found."""
        self.findings.append(Finding(node.kind(), fault, action))


def _is_tensor(value: Any) -> bool:
    return isinstance(value.type(), torch._C.TensorType)
