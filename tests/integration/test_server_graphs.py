"""Graph models through a real server: small graphs, resident graphs, new nodes, updates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from _serving import add_graph_sum, add_resident, settings

from edgeweave.inference_server import BackgroundServer, Client, Limits, export_model


def neighbour_sum(x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
    return x.index_add(0, edge_index[1], x[edge_index[0]])


def random_graph(seed: int, nodes: int = 12, edges: int = 30, features: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 8, (nodes, features), generator=generator).float()
    return x, torch.randint(0, nodes, (2, edges), generator=generator)


@pytest.fixture(scope="module")
def resident() -> tuple[torch.Tensor, torch.Tensor]:
    return random_graph(0, nodes=40, edges=160)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, resident: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[BackgroundServer]:
    pyg = pytest.importorskip("torch_geometric.nn.models", reason="the extra `pyg` has PyG")
    repository = tmp_path_factory.mktemp("repository")
    add_graph_sum(repository, "nodes")
    add_graph_sum(repository, "mean", level="graph", readout="mean")
    add_resident(repository, *resident)
    add_resident(repository, *resident, name="cached", cache=True)
    arguments = {
        "in_channels": 3,
        "hidden_channels": 8,
        "num_layers": 2,
        "out_channels": 4,
    }
    torch.manual_seed(0)
    export_model(
        pyg.GCN(**arguments),
        repository,
        "gcn",
        architecture="torch_geometric.nn.models:GCN",
        arguments=arguments,
        kind="resident_graph",
        graph=resident,
        examples=list(resident),
        # One more than layers: GCN's normalisation looks at the neighbours' degrees.
        options={"graph": {"features": 3, "channels": 4, "hops": 3}},
    )
    limits = Limits(nodes=1000, edges=2000, fan_out=16)
    with BackgroundServer(settings(repository, allow_graph_updates=True, limits=limits)) as running:
        assert running.failures == {}
        yield running


@pytest.fixture
def client(server: BackgroundServer) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.port}") as made:
        yield made


def ask(client: Client, model: str, x: Any, edge_index: Any, **more: Any) -> Any:
    inputs = {"NODE_FEATURES": x, "EDGE_INDEX": edge_index, **more}
    return client.infer(model, inputs).outputs["OUTPUT"]


def test_graphs_of_concurrent_requests_do_not_mix(client: Client) -> None:
    graphs = [random_graph(seed, nodes=1 + seed, edges=3 * seed) for seed in range(24)]
    got: dict[int, Any] = {}

    def one(i: int) -> None:
        got[i] = ask(client, "nodes", *graphs[i])

    before = client.statistics("nodes").model_stats[0].execution_count
    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(graphs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (x, edges) in enumerate(graphs):
        # Sums of small integers are exact in fp32.
        assert got[i].tolist() == neighbour_sum(x, edges).tolist()
    assert client.statistics("nodes").model_stats[0].execution_count - before < len(graphs)


def test_several_graphs_in_a_request_and_their_readout(client: Client) -> None:
    graphs = [random_graph(seed, nodes=2 + seed) for seed in range(5)]
    sizes = [x.shape[0] for x, _ in graphs]
    ptr = np.cumsum([0, *sizes])
    x = torch.cat([x for x, _ in graphs])
    edges = torch.cat([e + p for (_, e), p in zip(graphs, ptr.tolist(), strict=False)], dim=1)
    got = ask(client, "mean", x, edges, PTR=ptr)
    expected = torch.stack([neighbour_sum(*g).mean(dim=0) for g in graphs])
    # Means of at most 6 values in another order: a few units of the last place.
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6)
    # Without PTR the same is one graph.
    assert ask(client, "mean", x, edges).shape == (1, 3)


ONE = {
    "NODE_FEATURES": np.ones((2, 3), np.float32),
    "EDGE_INDEX": np.array([[0], [1]]),
}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"EDGE_INDEX": np.array([[0], [2]])}, "INVALID_ARGUMENT", r"in \[0, 2\), got 2"),
        ({"EDGE_INDEX": np.array([[-1], [0]])}, "INVALID_ARGUMENT", r"got -1 at \[0, 0\]"),
        ({"PTR": np.array([0, 1])}, "INVALID_ARGUMENT", "must rise from 0 to 2"),
        ({"PTR": np.array([0, 0, 2])}, "INVALID_ARGUMENT", "must rise"),
        ({"PTR": np.array([0, 3, 2])}, "INVALID_ARGUMENT", "must rise"),
        ({"PTR": np.array([0, -(2**63), 2])}, "INVALID_ARGUMENT", "must rise"),
        ({"PTR": np.array([], np.int64)}, "INVALID_ARGUMENT", "must rise"),
        ({"PTR": np.array([0, 1, 2])}, "INVALID_ARGUMENT", "one at column 0 that crosses"),
        ({"NODE_FEATURES": np.ones((2, 4), np.float32)}, "INVALID_ARGUMENT", "shape must be"),
        ({"NODE_FEATURES": np.ones((0, 3), np.float32)}, "INVALID_ARGUMENT", "at least one node"),
        ({"NODE_FEATURES": np.ones((1001, 3), np.float32)}, "RESOURCE_EXHAUSTED", "at most 1000"),
        ({"EDGE_INDEX": np.zeros((2, 2001), np.int64)}, "RESOURCE_EXHAUSTED", "at most 2000"),
    ],
)
def test_graphs_that_are_refused(
    client: Client, change: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        client.infer("nodes", {**ONE, **change})
    assert caught.value.code().name == code


@pytest.mark.parametrize("model", ["resident", "cached"])
def test_node_ids(client: Client, resident: Any, model: str) -> None:
    expected = neighbour_sum(*resident)
    ids = np.array([3, 39, 3, 0])
    answer = client.infer(model, {"NODE_IDS": ids})
    assert answer.outputs["OUTPUT"].tolist() == expected[ids].tolist()
    assert answer.parameters["graph_version"] >= 1
    assert client.infer(model, {"NODE_IDS": np.array([], np.int64)}).outputs["OUTPUT"].size == 0


def test_gcn_on_a_subgraph_equals_gcn_on_the_graph(client: Client, resident: Any) -> None:
    from torch_geometric.nn.models import GCN

    torch.manual_seed(0)
    module = GCN(in_channels=3, hidden_channels=8, num_layers=2, out_channels=4).eval()
    with torch.no_grad():
        expected = module(*resident).numpy()
    for ids in ([5], [1, 2, 30], list(range(40))):
        got = client.infer("gcn", {"NODE_IDS": np.array(ids)}).outputs["OUTPUT"]
        # The same sums in another order.
        np.testing.assert_allclose(got, expected[ids], rtol=1e-4, atol=1e-5)


def test_sampling_does_not_depend_on_the_company(client: Client) -> None:
    def sampled(ids: list[int], seed: int) -> Any:
        answer = client.infer(
            "resident", {"NODE_IDS": np.array(ids)}, parameters={"fan_out": 2, "seed": seed}
        )
        return answer.outputs["OUTPUT"].tolist()

    alone = [sampled([i], 7)[0] for i in range(40)]
    assert sampled(list(range(40)), 7) == alone
    got: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: got.__setitem__(i, sampled([i], 7 + i % 2)))
        for i in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i][0] for i in range(0, 40, 2)] == alone[::2]
    # Another seed is another sample.
    assert sampled(list(range(40)), 8) != alone


def test_new_nodes(client: Client, resident: Any) -> None:
    x, edges = resident
    new_x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    new_edges = torch.tensor([[3, 40, 41], [40, 41, 3]])
    expected = neighbour_sum(torch.cat([x, new_x]), torch.cat([edges, new_edges], dim=1))
    for model in ("resident", "cached"):
        answer = client.infer(
            model,
            {
                "NODE_IDS": np.array([40, 41, 3, 5]),
                "NEW_FEATURES": new_x,
                "NEW_EDGES": new_edges,
            },
        )
        assert answer.outputs["OUTPUT"].tolist() == expected[[40, 41, 3, 5]].tolist()
        # They were there for that request only.
        after = client.infer(model, {"NODE_IDS": np.array([3])}).outputs["OUTPUT"]
        assert after.tolist() == neighbour_sum(x, edges)[[3]].tolist()
        with pytest.raises(grpc.RpcError, match=r"in \[0, 40\), got 40"):
            client.infer(model, {"NODE_IDS": np.array([40])})


@pytest.mark.parametrize(
    ("inputs", "parameters", "code", "words"),
    [
        ({"NODE_IDS": [-1]}, {}, "INVALID_ARGUMENT", "got -1"),
        ({"NODE_IDS": [40]}, {}, "INVALID_ARGUMENT", "got 40"),
        ({"NODE_IDS": [0], "NEW_EDGES": [[0], [40]]}, {}, "INVALID_ARGUMENT", "got 40"),
        ({"NODE_IDS": [0]}, {"fan_out": -1}, "INVALID_ARGUMENT", "0 or more"),
        ({"NODE_IDS": [0]}, {"fan_out": "2"}, "INVALID_ARGUMENT", "must be an integer"),
        ({"NODE_IDS": [0]}, {"fan_out": 17}, "RESOURCE_EXHAUSTED", "at most 16"),
        ({"NODE_IDS": [0] * 5000}, {}, "RESOURCE_EXHAUSTED", "at most 4096"),
    ],
)
def test_node_requests_that_are_refused(
    client: Client, inputs: dict[str, Any], parameters: dict[str, Any], code: str, words: str
) -> None:
    arrays = {name: np.array(value, np.int64) for name, value in inputs.items()}
    with pytest.raises(grpc.RpcError, match=words) as caught:
        client.infer("resident", arrays, parameters=parameters)
    assert caught.value.code().name == code


def test_updates_make_versions(tmp_path: Path, resident: Any) -> None:
    x, edges = resident
    add_resident(tmp_path, x, edges)
    add_resident(tmp_path, x, edges, name="cached", cache=True)
    add_resident(tmp_path, x, edges, name="fixed", updates=False)
    with (
        BackgroundServer(settings(tmp_path, allow_graph_updates=True)) as server,
        Client(f"127.0.0.1:{server.port}") as client,
    ):
        for model in ("resident", "cached"):
            described = client.graph_describe(model)
            assert (described.graph_version, described.nodes, described.edges) == (1, 40, 160)
            grown = client.graph_update(
                model, add_nodes=[[9.0, 9.0, 9.0]], add_edges=[[40], [0]], expected_graph_version=1
            )
            assert (grown.graph_version, grown.nodes, grown.edges) == (2, 41, 161)
            answer = client.infer(model, {"NODE_IDS": np.array([0, 40])})
            assert answer.parameters["graph_version"] == 2
            expected = neighbour_sum(x, edges)[0] + 9.0
            assert answer.outputs["OUTPUT"][0].tolist() == expected.tolist()
            with pytest.raises(grpc.RpcError, match="must be 2, got 1") as caught:
                client.graph_update(model, add_edges=[[0], [1]], expected_graph_version=1)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            with pytest.raises(grpc.RpcError, match="must exist") as caught:
                client.graph_update(model, remove_edges=[[40], [40]])
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            client.graph_update(model, remove_nodes=[40])
            assert client.graph_describe(model).removed_nodes == 1
            with pytest.raises(grpc.RpcError, match="must not be removed ones"):
                client.infer(model, {"NODE_IDS": np.array([40])})
        with pytest.raises(grpc.RpcError, match="must allow updates"):
            client.graph_update("fixed", add_edges=[[0], [1]])
        with pytest.raises(grpc.RpcError, match="multiple of 16 bytes"):
            client.graph_update("resident", add_edges=[0])


def test_requests_during_updates_see_one_version_each(tmp_path: Path) -> None:
    # Every feature equals the version, so an answer that mixes versions would show.
    nodes = 20
    x = torch.ones(nodes, 3)
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    add_resident(tmp_path, x, ring)
    wrong: list[Any] = []
    stop = threading.Event()
    with BackgroundServer(settings(tmp_path, allow_graph_updates=True)) as server:

        def reader() -> None:
            with Client(f"127.0.0.1:{server.port}") as client:
                while not stop.is_set():
                    answer = client.infer("resident", {"NODE_IDS": np.arange(nodes)})
                    version = answer.parameters["graph_version"]
                    if set(answer.outputs["OUTPUT"].reshape(-1).tolist()) != {2.0 * version}:
                        wrong.append((version, answer.outputs["OUTPUT"]))

        threads = [threading.Thread(target=reader) for _ in range(3)]
        for thread in threads:
            thread.start()
        with Client(f"127.0.0.1:{server.port}") as client:
            for version in range(2, 30):
                client.graph_update(
                    "resident", set_nodes=(np.arange(nodes), np.full((nodes, 3), version))
                )
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_an_isolated_node_on_an_engine(tmp_path: Path) -> None:
    """The accelerate engine, where the native library is there."""
    pytest.importorskip("torch_geometric", reason="the extra `pyg` has PyG")
    import edgeweave

    x, edges = random_graph(3)
    arguments = {"in_channels": 3, "hidden_channels": 4, "num_layers": 1, "out_channels": 2}
    from torch_geometric.nn.models import GIN

    module = GIN(**arguments)
    export_model(
        module,
        tmp_path,
        "gin",
        architecture="torch_geometric.nn.models:GIN",
        arguments=arguments,
        kind="graphs",
        options={
            "engine": "accelerate",
            "graph": {"features": 3, "channels": 2, "level": "node"},
        },
    )
    try:
        with (
            BackgroundServer(settings(tmp_path)) as server,
            Client(f"127.0.0.1:{server.port}") as client,
        ):
            assert server.failures == {}
            got = ask(client, "gin", x, edges)
    finally:
        edgeweave.restore()
    with torch.no_grad():
        expected = module.eval()(x, edges).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
