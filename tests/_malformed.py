"""Requests that are wrong by construction, each naming a model that is loaded.

Every mutation starts from a valid request and breaks one rule that no other part of it can mend.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from edgeweave.inference_server._messages import message_class

REQUEST = message_class("inference.ModelInferRequest")
DENSE, GRAPHS, RESIDENT = "dense", "graphs", "resident"
COLUMNS, MAX_BATCH, FEATURES, RESIDENT_NODES = 4, 32, 3, 40
Message = Any
Mutation = Callable[[Message, random.Random], "bytes | None"]
MUTATIONS: list[tuple[str, Mutation]] = []


def mutation(model: str) -> Callable[[Mutation], Mutation]:
    def keep(function: Mutation) -> Mutation:
        MUTATIONS.append((model, function))
        return function

    return keep


def any_model(function: Mutation) -> Mutation:
    for model in (DENSE, GRAPHS, RESIDENT):
        MUTATIONS.append((model, function))
    return function


def _add(message: Message, name: str, datatype: str, shape: list[int], raw: bytes) -> None:
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(raw)


def valid(model: str, rng: random.Random) -> Message:
    """A request that the model answers."""
    message = REQUEST(model_name=model)
    if model == DENSE:
        rows = rng.randint(1, MAX_BATCH)
        _add(message, "INPUT0", "FP32", [rows, COLUMNS], rng.randbytes(4 * COLUMNS * rows))
    elif model == GRAPHS:
        nodes, edges = rng.randint(1, 9), rng.randint(1, 20)
        ends = [rng.randrange(nodes) for _ in range(2 * edges)]
        _add(message, "NODE_FEATURES", "FP32", [nodes, FEATURES], bytes(4 * FEATURES * nodes))
        _add(message, "EDGE_INDEX", "INT64", [2, edges], struct.pack(f"<{2 * edges}q", *ends))
    else:
        ids = [rng.randrange(RESIDENT_NODES) for _ in range(rng.randint(1, 9))]
        _add(message, "NODE_IDS", "INT64", [len(ids)], struct.pack(f"<{len(ids)}q", *ids))
    return message


def malformed(rng: random.Random) -> bytes:
    """One malformed request."""
    model, mutate = rng.choice(MUTATIONS)
    message = valid(model, rng)
    if rng.random() < 0.3:
        message.id = "".join(rng.choices("aé\n\0☃", k=rng.randint(1, 40)))
    data = mutate(message, rng)
    return message.SerializeToString() if data is None else data


def _pick(message: Message, rng: random.Random) -> int:
    return rng.randrange(len(message.inputs))


def _far(rng: random.Random, bound: int) -> int:
    """A number that is no index below `bound`."""
    return rng.choice(
        [-1, -rng.randint(1, 1 << 62), bound, bound + rng.randint(0, 1 << 61), 2**63 - 1]
    )


@any_model
def raw_of_another_length(message: Message, rng: random.Random) -> None:
    i = _pick(message, rng)
    raw = message.raw_input_contents[i]
    keep = rng.randrange(len(raw))
    message.raw_input_contents[i] = (
        raw[:keep] if rng.random() < 0.5 else raw + rng.randbytes(keep + 1)
    )


@any_model
def negative_size(message: Message, rng: random.Random) -> None:
    tensor = message.inputs[_pick(message, rng)]
    tensor.shape[rng.randrange(len(tensor.shape))] = -rng.choice([1, 5, 1 << 31, 1 << 62])


@any_model
def size_beyond_memory(message: Message, rng: random.Random) -> None:
    tensor = message.inputs[_pick(message, rng)]
    tensor.shape[rng.randrange(len(tensor.shape))] = rng.choice([1 << 31, 1 << 40, 2**63 - 1])


@any_model
def product_that_wraps(message: Message, rng: random.Random) -> None:
    tensor = message.inputs[_pick(message, rng)]
    # The product is 0 or small modulo 2^64.
    del tensor.shape[:]
    tensor.shape.extend(rng.choice([[1 << 32, 1 << 32], [0, 1 << 62], [1 << 61, 8]]))


@any_model
def rank(message: Message, rng: random.Random) -> None:
    tensor = message.inputs[_pick(message, rng)]
    tensor.shape.extend([1] * rng.choice([1, 2, 7, 8, 200]))


@any_model
def datatype(message: Message, rng: random.Random) -> None:
    tensor = message.inputs[_pick(message, rng)]
    names = ["", "FP32 ", "fp32", "BOOL", "BYTES", "FP16", "BF16", "UINT32", "FP64", "COMPLEX64"]
    tensor.datatype = rng.choice([name for name in names if name != tensor.datatype])


@any_model
def same_input_twice(message: Message, rng: random.Random) -> None:
    i = _pick(message, rng)
    message.inputs.add().CopyFrom(message.inputs[i])
    message.raw_input_contents.append(message.raw_input_contents[i])


@any_model
def unknown_input(message: Message, rng: random.Random) -> None:
    name = rng.choice(["X", "", "INPUT0\0", "input0", "x" * 5000, "../x"])
    if rng.random() < 0.5:
        message.inputs[_pick(message, rng)].name = name
    else:
        _add(message, name, "FP32", [1], bytes(4))


@any_model
def missing_input(message: Message, rng: random.Random) -> None:
    i = _pick(message, rng)
    del message.inputs[i]
    del message.raw_input_contents[i]


@any_model
def raw_of_another_count(message: Message, rng: random.Random) -> None:
    if rng.random() < 0.5:
        message.raw_input_contents.extend([b""] * rng.randint(1, 100))
    else:
        del message.raw_input_contents[:]


@any_model
def typed_beside_raw(message: Message, rng: random.Random) -> None:
    contents = message.inputs[_pick(message, rng)].contents
    field = rng.choice(["fp32_contents", "int64_contents", "bool_contents", "int_contents"])
    getattr(contents, field).extend([1] * rng.randint(1, 9))


@any_model
def typed_of_another_kind_or_count(message: Message, rng: random.Random) -> None:
    del message.raw_input_contents[:]
    for tensor in message.inputs:
        # No tensor here has 25 elements or more than a few of these types.
        field = rng.choice(["bool_contents", "uint64_contents", "fp64_contents", "uint_contents"])
        getattr(tensor.contents, field).extend([1] * rng.randint(1, 9))


@any_model
def many_inputs(message: Message, rng: random.Random) -> None:
    for i in range(rng.randint(65, 300)):
        _add(message, f"n{i}", "FP32", [1], bytes(4))


@any_model
def outputs(message: Message, rng: random.Random) -> None:
    kind = rng.randrange(3)
    if kind == 0:
        message.outputs.add(name=rng.choice(["", "NOTHING", "o" * 9999]))
    elif kind == 1:
        for _ in range(2):
            message.outputs.add(name="OUTPUT0" if message.model_name == DENSE else "OUTPUT")
    else:
        message.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 3


@any_model
def parameters(message: Message, rng: random.Random) -> None:
    name, field, value = rng.choice(
        [
            ("sequence_id", "int64_param", 7),
            ("sequence_start", "bool_param", True),
            ("priority", "string_param", "high"),
            ("priority", "int64_param", 1 << 40),
            ("priority", "int64_param", -1),
            ("timeout", "double_param", 0.5),
            ("timeout", "bool_param", True),
            ("timeout", "uint64_param", (1 << 64) - 1),
            ("no such thing", "int64_param", 1),
            ("", "string_param", "x" * 3000),
        ]
    )
    setattr(message.parameters[name], field, value)


@any_model
def many_parameters(message: Message, rng: random.Random) -> None:
    for i in range(rng.randint(65, 200)):
        message.parameters[f"p{i}"].int64_param = i


@any_model
def parameter_without_value(message: Message, rng: random.Random) -> None:
    message.parameters["priority"].SetInParent()


@any_model
def shared_memory(message: Message, rng: random.Random) -> None:
    tensor = message.inputs[_pick(message, rng)]
    tensor.parameters["shared_memory_region"].string_param = "region"
    tensor.parameters["shared_memory_byte_size"].int64_param = rng.randrange(1 << 40)


@any_model
def cut_short(message: Message, rng: random.Random) -> bytes:
    data: bytes = message.SerializeToString()
    # The name stays; the raw contents, which come last, lose at least a byte.
    first = len(REQUEST(model_name=message.model_name).SerializeToString())
    return data[: rng.randrange(first, len(data))]


@any_model
def garbage_behind(message: Message, rng: random.Random) -> bytes:
    # Wire type 7 does not exist; a length may not pass the end; groups must close.
    ends = [b"\x0f", b"\x3a\xff\xff\xff\xff\x07", b"\x3a\x80", b"\x0b", b"\x7c", b"\x3a\xff"]
    data: bytes = message.SerializeToString()
    return data + rng.choice(ends)


@any_model
def text_that_is_no_utf8(message: Message, rng: random.Random) -> bytes:
    data: bytes = message.SerializeToString()
    # Field 3, the id, as two bytes that no UTF-8 text has.
    return data + b"\x1a\x02\xc3\x28"


@any_model
def strings_that_lie(message: Message, rng: random.Random) -> None:
    i = _pick(message, rng)
    message.inputs[i].datatype = "BYTES"
    message.raw_input_contents[i] = rng.choice([b"\xff\xff\xff\x7fa", b"\x01", b"\xff" * 4, b""])


@mutation(DENSE)
def too_many_rows(message: Message, rng: random.Random) -> None:
    rows = rng.randint(MAX_BATCH + 1, 4 * MAX_BATCH)
    message.inputs[0].shape[0] = rows
    message.raw_input_contents[0] = bytes(4 * COLUMNS * rows)


@mutation(DENSE)
def too_few_columns(message: Message, rng: random.Random) -> None:
    columns = rng.choice([0, 1, 3, 5, 64])
    rows = message.inputs[0].shape[0]
    message.inputs[0].shape[1] = columns
    message.raw_input_contents[0] = bytes(4 * columns * rows)


@mutation(GRAPHS)
def edge_to_nowhere(message: Message, rng: random.Random) -> None:
    raw = bytearray(message.raw_input_contents[1])
    at = rng.randrange(len(raw) // 8)
    struct.pack_into("<q", raw, 8 * at, _far(rng, message.inputs[0].shape[0]))
    message.raw_input_contents[1] = bytes(raw)


@mutation(GRAPHS)
def wrong_ptr(message: Message, rng: random.Random) -> None:
    nodes = message.inputs[0].shape[0]
    ptr = rng.choice(
        [
            [],
            [0],
            [nodes],
            [1, nodes],
            [0, nodes + 1],
            [0, 0, nodes],
            [0, nodes, nodes],
            [0, -(2**63), nodes],
            [0, 2**63 - 1, nodes],
            [0, -1],
        ]
    )
    _add(message, "PTR", "INT64", [len(ptr)], struct.pack(f"<{len(ptr)}q", *ptr))


@mutation(GRAPHS)
def no_nodes(message: Message, rng: random.Random) -> None:
    message.inputs[0].shape[0] = 0
    message.raw_input_contents[0] = b""


@mutation(GRAPHS)
def too_many_nodes(message: Message, rng: random.Random) -> None:
    message.inputs[0].shape[0] = 1001
    message.raw_input_contents[0] = bytes(4 * FEATURES * 1001)


@mutation(RESIDENT)
def no_such_node(message: Message, rng: random.Random) -> None:
    raw = bytearray(message.raw_input_contents[0])
    struct.pack_into("<q", raw, 8 * rng.randrange(len(raw) // 8), _far(rng, RESIDENT_NODES))
    message.raw_input_contents[0] = bytes(raw)


@mutation(RESIDENT)
def new_edge_to_nowhere(message: Message, rng: random.Random) -> None:
    news = rng.randint(0, 3)
    _add(message, "NEW_FEATURES", "FP32", [news, FEATURES], bytes(4 * FEATURES * news))
    ends = [0, _far(rng, RESIDENT_NODES + news)]
    rng.shuffle(ends)
    _add(message, "NEW_EDGES", "INT64", [2, 1], struct.pack("<2q", *ends))


@mutation(RESIDENT)
def new_features_of_another_width(message: Message, rng: random.Random) -> None:
    width = rng.choice([0, 1, FEATURES + 1])
    _add(message, "NEW_FEATURES", "FP32", [2, width], bytes(8 * width))


@mutation(RESIDENT)
def wrong_fan_out(message: Message, rng: random.Random) -> None:
    field, value = rng.choice(
        [
            ("int64_param", -1),
            ("int64_param", 1 << 40),
            ("uint64_param", (1 << 64) - 1),
            ("string_param", "2"),
            ("double_param", float("nan")),
            ("bool_param", True),
        ]
    )
    setattr(message.parameters["fan_out"], field, value)
