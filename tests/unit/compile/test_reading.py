"""What calls are named, however the graph writes them."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from edgeweave.compile._reading import follow_writes, name_of


def calls(method: str, *args: object) -> fx.Node:
    graph = fx.Graph()
    return graph.call_method(method, (graph.placeholder("x"), *args))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("__eq__", "eq"),
        ("__ne__", "ne"),
        ("__mul__", "mul"),
        ("__rmul__", "mul"),
        ("__radd__", "add"),
        ("__truediv__", "div"),
        ("__getitem__", "getitem"),
        ("__setitem__", "setitem"),
        ("__iadd__", "add_"),
        # Its operands are the other way round.
        ("__rsub__", "__rsub__"),
        ("__unknown__", "__unknown__"),
        ("scatter_add_", "scatter_add_"),
    ],
)
def test_an_operator_s_method_is_named_like_its_function(method, name):
    assert name_of(calls(method, 2)) == name


def test_an_in_place_operator_s_method_is_a_write():
    graph = fx.Graph()
    x = graph.placeholder("x")
    written = graph.call_method("__iadd__", (x, 1))
    reader = graph.call_function(operator.neg, (x,))
    graph.output(reader)
    x.meta["example_value"] = written.meta["example_value"] = torch.zeros(3)
    follow_writes(graph)
    assert reader.args == (written,)
