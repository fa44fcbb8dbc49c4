"""Sizes that depend on the input: integer expressions of symbols, as text, evaluated safely."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

__all__ = ["SizeError", "compile_size", "evaluate_size"]


class SizeError(ValueError):
    """A size expression uses something that is not integer arithmetic."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _exact_div(a: int, b: int) -> int:
    if a % b:
        raise SizeError(f"{a} must be a multiple of {b}")
    return a // b


_BINARY: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: _exact_div,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
# As torch prints sympy expressions of sizes.
_CALLS: Final[dict[str, Callable[..., int]]] = {
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": _exact_div,
    "CeilDiv": _ceil_div,
}


@lru_cache(maxsize=4096)
def compile_size(text: str) -> ast.expr:
    """Parse an expression.

    Raises:
        SizeError: If it holds anything but integers, names, arithmetic and the known functions.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise SizeError(f"size must be an integer expression, got {text!r}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name) and node.func.id in _CALLS
            if not known or node.keywords:
                raise SizeError(f"size must use known functions only, got {text!r}")
        elif isinstance(node, ast.Constant):
            if type(node.value) is not int:
                raise SizeError(f"size must be made of integers, got {text!r}")
        elif isinstance(node, ast.BinOp):
            if type(node.op) not in _BINARY:
                raise SizeError(f"size must use + - * // % only, got {text!r}")
        elif isinstance(node, ast.UnaryOp):
            if not isinstance(node.op, ast.USub):
                raise SizeError(f"size must use + - * // % only, got {text!r}")
        elif not isinstance(node, ast.Name | ast.expr_context | ast.operator | ast.unaryop):
            raise SizeError(f"size must be an integer expression, got {text!r}")
    return tree


def evaluate_size(size: int | str, symbols: Mapping[str, int]) -> int:
    """Value of a size for given symbols.

    Raises:
        SizeError: If it is malformed or names an unknown symbol.

    Example:
        >>> evaluate_size("2*s0 + s1//4", {"s0": 3, "s1": 9})
        8
    """
    if isinstance(size, int):
        return size
    return _evaluate(compile_size(size), symbols)


def _evaluate(node: ast.AST, symbols: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in symbols:
            raise SizeError(f"size must use known symbols, got {node.id}")
        return symbols[node.id]
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand, symbols)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return _CALLS[node.func.id](*(_evaluate(argument, symbols) for argument in node.args))
    assert isinstance(node, ast.BinOp)
    left, right = _evaluate(node.left, symbols), _evaluate(node.right, symbols)
    return _BINARY[type(node.op)](left, right)
