"""Mean of the neighbours' features, three ways to hold the edges, one result."""

import scipy.sparse
import torch

from edgeweave import sparse


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(1_000, (2, 8_000), generator=generator)
    x = torch.randn(1_000, 64, generator=generator)

    # A plain [2, E] tensor: row 0 the sources, row 1 the destinations. The first call builds the
    # plan, later calls with the same (or an equal) tensor find it in the cache.
    out = sparse.mm(edge_index, x, reduce="mean")
    print("edge_index:", tuple(out.shape), sparse.cache_info())

    # A Graph holds the plan itself and names the sizes, which may differ.
    graph = sparse.Graph(edge_index, size=(1_000, 1_000))
    print("Graph:     ", torch.equal(out, sparse.mm(graph, x, reduce="mean")))

    # A matrix means A @ x: its rows are the destinations.
    src, dst = edge_index.numpy()
    matrix = scipy.sparse.coo_array((torch.ones(8_000).numpy(), (dst, src)), shape=(1_000, 1_000))
    product = sparse.mm(matrix.tocsr(), x)
    degree = graph.in_degree.clamp(min=1).unsqueeze(1)
    print("scipy:     ", torch.allclose(out, product / degree, atol=1e-6))

    # Derivatives in the features and in the edge weights.
    weight = torch.rand(8_000, generator=generator).requires_grad_()
    x.requires_grad_()
    sparse.mm(graph, x, reduce="sum", weight=weight).square().mean().backward()
    print("gradients: ", tuple(x.grad.shape), tuple(weight.grad.shape))


if __name__ == "__main__":
    main()
