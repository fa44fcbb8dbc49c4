"""Engines, precisions and architectures beyond PyG's, through a real server."""

from __future__ import annotations

import shutil
from pathlib import Path

import _serving_models as models
import grpc
import numpy as np
import pytest
import torch
from _serving import add, rows, settings

from edgeweave.inference_server import (
    BackgroundServer,
    Client,
    ModelConfigError,
    TensorSpec,
    export_model,
)
from edgeweave.inference_server._architectures import build_architecture


def test_bf16_is_autocast(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 8)
    export_model(
        linear,
        tmp_path,
        "m",
        arguments={"in_features": 64, "out_features": 8},
        examples=[torch.zeros(1, 64)],
        options={"max_batch_size": 8, "precision": "bf16"},
    )
    x = torch.randn(4, 64)
    allowed = ("torch.nn.modules.linear:Linear",)
    with (
        BackgroundServer(settings(tmp_path, allow_architectures=allowed)) as server,
        Client(f"127.0.0.1:{server.port}") as client,
    ):
        got = client.infer("m", {"INPUT0": x}).outputs["OUTPUT0"]
    with torch.no_grad():
        exact = linear(x).numpy()
    # bf16 has 8 bits: products of 64 numbers about 1 with weights below 1/8 are off by about 1e-2,
    # and some are off by more than fp32 could be.
    np.testing.assert_allclose(got, exact, atol=3e-2)
    assert np.abs(got - exact).max() > 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_inductor(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    add(tmp_path, "m", models.Affine(), engine="inductor", warmup=[{"INPUT0": [2, 4]}])
    with (
        BackgroundServer(settings(tmp_path)) as server,
        Client(f"127.0.0.1:{server.port}") as client,
    ):
        assert server.failures == {}
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for count in (2, 3, 5):
            assert client.infer("m", rows(count)).outputs["OUTPUT0"].tolist() == [[3.0] * 4] * count
        # The warm-up's code serves: no request waits for a compiler.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings it")
    arguments = {
        "model_type": "bert",
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 32,
        "num_labels": 3,
    }
    name = "transformers:AutoModelForSequenceClassification"
    torch.manual_seed(0)
    module = build_architecture(name, arguments)
    assert isinstance(module, transformers.BertForSequenceClassification)
    export_model(
        module,
        tmp_path,
        "bert",
        architecture=name,
        arguments=arguments,
        inputs=[
            TensorSpec("input_ids", "INT64", (-1, -1)),
            TensorSpec("attention_mask", "INT64", (-1, -1)),
        ],
        outputs=[TensorSpec("logits", "FP32", (-1, 3))],
        options={"max_batch_size": 8, "keywords": True},
    )
    ids = torch.randint(0, 50, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.int64)
    with (
        BackgroundServer(settings(tmp_path)) as server,
        Client(f"127.0.0.1:{server.port}") as client,
    ):
        assert server.failures == {}
        got = client.infer("bert", {"input_ids": ids, "attention_mask": mask}).outputs["logits"]
    with torch.no_grad():
        expected = module(input_ids=ids, attention_mask=mask).logits.numpy()
    # The same kernels on the same shapes, with another number of threads perhaps.
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ModelConfigError, match="auto_map"):
        build_architecture(name, {**arguments, "auto_map": {"AutoModel": "x--y.z"}})
    with pytest.raises(ModelConfigError, match="need model_type"):
        build_architecture(name, {})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("os:system", "must be built in or allowed"),
        ("torch_geometric.nn.models:../GCN", "must be built in or allowed"),
        ("", "must be built in or allowed"),
    ],
)
def test_names_that_are_not_allowed(name: str, words: str) -> None:
    with pytest.raises(ModelConfigError, match=words):
        build_architecture(name, {})


def test_allowed_names_that_do_not_work() -> None:
    for name, words in (
        ("no_such_package.x:Y", "needs no_such_package; pip install no_such_package"),
        ("torch.nn:Nothing", "there is no such class"),
        ("builtins:dict", "must be an nn.Module"),
    ):
        with pytest.raises(ModelConfigError, match=words):
            build_architecture(name, {}, [name])
    with pytest.raises(ModelConfigError, match="must take its arguments"):
        build_architecture("torch.nn:Linear", {"in_features": 2}, ["torch.nn:Linear"])


def test_one_large_request_leaves_alone_and_too_large_a_one_is_refused(tmp_path: Path) -> None:
    add(tmp_path, "m", models.BatchSize(), max_batch_size=4)
    with (
        BackgroundServer(settings(tmp_path)) as server,
        Client(f"127.0.0.1:{server.port}") as client,
    ):
        assert client.infer("m", rows(4)).outputs["OUTPUT0"][0, 0] == 4.0
        with pytest.raises(grpc.RpcError, match="at most 4"):
            client.infer("m", rows(5))
        assert client.infer("m", rows(0)).outputs["OUTPUT0"].shape == (0, 4)
