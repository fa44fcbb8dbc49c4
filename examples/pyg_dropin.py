"""An unchanged PyTorch Geometric model, stock and accelerated: the same loss curve."""

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv, SAGEConv

import edgeweave
import edgeweave.pyg


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(32, 64)
        self.second = SAGEConv(64, 5)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def train(x: torch.Tensor, edge_index: torch.Tensor, labels: torch.Tensor) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(2_000, (2, 20_000), generator=generator)
    x = torch.randn(2_000, 32, generator=generator)
    labels = torch.randint(5, (2_000,), generator=generator)

    stock = train(x, edge_index, labels)
    with edgeweave.accelerated():
        fast = train(x, edge_index, labels)

    for step, (a, b) in enumerate(zip(stock, fast, strict=True)):
        print(f"step {step}  stock {a:.5f}  accelerated {b:.5f}")
    print(f"largest difference {max(abs(a - b) for a, b in zip(stock, fast, strict=True)):.1e}")
    print(edgeweave.pyg.report())


if __name__ == "__main__":
    main()
