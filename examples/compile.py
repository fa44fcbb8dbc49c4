"""A model with a graph layer by hand: compiled, trained beside eager, and explained."""

import copy

import torch
import torch.nn.functional as F

import edgeweave
from edgeweave.compile import explain


class Mean(torch.nn.Module):
    """The mean over incoming edges, in plain torch: nothing here knows edgeweave."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.own, self.neighbours = torch.nn.Linear(width, out), torch.nn.Linear(width, out)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index[0], edge_index[1]
        total = torch.zeros_like(x).index_add_(0, target, x.index_select(0, source))
        count = torch.zeros(x.shape[0]).index_add_(0, target, torch.ones(target.shape[0]))
        return self.own(x) + self.neighbours(total / count.clamp(min=1).unsqueeze(-1))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mean(32, 64), Mean(64, 5)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def train(model: torch.nn.Module, x, edge_index, labels) -> list[float]:
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
    torch.manual_seed(0)
    x, edge_index = torch.randn(2_000, 32), torch.randint(2_000, (2, 20_000))
    labels = torch.randint(5, (2_000,))
    stock = Net()
    compiled = edgeweave.optimize(copy.deepcopy(stock), (x, edge_index), verify=True)

    losses = train(stock, x, edge_index, labels), train(compiled, x, edge_index, labels)
    for step, (a, b) in enumerate(zip(*losses, strict=True)):
        print(f"step {step}  eager {a:.5f}  compiled {b:.5f}")
    print(f"largest difference {max(abs(a - b) for a, b in zip(*losses, strict=True)):.1e}")
    print(explain(stock, (x, edge_index)))


if __name__ == "__main__":
    main()
