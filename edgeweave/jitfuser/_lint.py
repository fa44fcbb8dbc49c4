"""The lint pass: nothing reaches torch's bridge that it would get wrong.

Every operation that the bridge maps has a rule, which leaves the node alone, rewrites it to an
equal form that the bridge gets right, or keeps it out of fusion. The rules are a superset of what
was found by trying each mapped operation on odd dtypes, shapes, defaults, NaN and infinities
(`tests/unit/jitfuser/test_faults.py` is the table).
"""

from __future__ import annotations

from typing import Any

import torch

from edgeweave.jitfuser._edit import Editor, Finding
from edgeweave.jitfuser._rules_activation import ACTIVATION_RULES, keep_out_activation
from edgeweave.jitfuser._rules_arithmetic import ARITHMETIC_RULES, keep_out_arithmetic
from edgeweave.jitfuser._rules_layers import LAYER_RULES, fold_bias, keep_out_layer
from edgeweave.jitfuser._values import Values

__all__ = ["MAPPED", "guard_fusion"]

_RULES = {**ARITHMETIC_RULES, **ACTIVATION_RULES, **LAYER_RULES}
_CONVOLUTIONS = ("aten::_convolution", "aten::conv2d", "aten::convolution")

MAPPED = frozenset({*_RULES, *_CONVOLUTIONS, "aten::permute", "aten::contiguous", "aten::silu"})
"""Operations that torch's bridge maps to oneDNN Graph."""

# Kinds that are never fused with what is not itself: pools, and what the name says.
_PRODUCTS = ("aten::matmul", "aten::mm", "aten::bmm", "aten::linear", "aten::avg_pool2d")

_NESTED = "is inside a branch or loop, where nothing is known of its inputs"
_SINGLE = "is fused in a group whose result differs from eager"


def guard_fusion(
    graph: Any, values: Values, *, keep_nan: bool, products_only: bool = False
) -> list[Finding]:
    """Rewrites a graph until the bridge can be let loose on it.

    Args:
        graph: A fresh copy of the graph that `values` was made of; changed in place.
        values: What its tensors are.
        keep_nan: Keep out what drops NaN when fused.
        products_only: Keep everything out but products and convolutions.

    Returns:
        What was found.
    """
    editor = Editor(graph, values.of(graph), keep_nan)
    for node in list(graph.findAllNodes("aten::add", False)):
        fold_bias(node, editor)
    for node in list(graph.nodes()):
        rule = _RULES.get(node.kind())
        if rule is not None:
            rule(node, editor)  # may destroy the node; none of these has blocks
            continue
        for block in node.blocks():
            _guard_block(block, editor)
    if products_only:
        for node in list(graph.nodes()):
            if node.kind() in _RULES and node.kind() not in _PRODUCTS:
                _keep_out(node, editor, _SINGLE)
    torch._C._jit_pass_dce(graph)
    graph.lint()
    return editor.findings


def _guard_block(block: Any, editor: Editor) -> None:
    """Keeps out everything inside a branch or loop; nothing is known about it."""
    for node in list(block.nodes()):
        if node.kind() in _RULES:
            _keep_out(node, editor, _NESTED)
            continue
        for inner in node.blocks():
            _guard_block(inner, editor)


def _keep_out(node: Any, editor: Editor, fault: str) -> None:
    if node.kind() in ARITHMETIC_RULES:
        keep_out_arithmetic(node, editor, fault)
    elif node.kind() in ACTIVATION_RULES:
        keep_out_activation(node, editor, fault)
    else:
        keep_out_layer(node, editor, fault)
