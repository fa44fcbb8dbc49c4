"""How molecules dissolve: batches of small graphs, stock PyG and accelerated, same error."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_add_pool

import edgeweave.pyg
from edgeweave.bench.both_sides import Training, train_both
from edgeweave.bench.molecules import ATOM_FEATURES, BOND_FEATURES, load_molecules

EPOCHS, HIDDEN = 10, 64
graphs = [
    Data(x=m.x, edge_index=m.edge_index, edge_attr=m.edge_attr, y=torch.tensor([m.log_p]))
    for m in load_molecules(2_000)
]


def mlp(width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(width, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN)
    )


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            GINEConv(mlp(width), edge_dim=BOND_FEATURES)
            for width in (ATOM_FEATURES, HIDDEN, HIDDEN)
        )
        self.contribution = torch.nn.Linear(HIDDEN, 1)

    def forward(self, batch: Data) -> torch.Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.edge_attr).relu()
        # What each atom adds to the logarithm.
        return global_add_pool(self.contribution(x), batch.batch, batch.num_graphs).flatten()


def train(seed: int) -> Training:
    torch.manual_seed(seed)
    order = torch.randperm(len(graphs)).tolist()
    fifth = len(graphs) // 5
    test = DataLoader([graphs[i] for i in order[:fifth]], batch_size=fifth)
    learn = DataLoader([graphs[i] for i in order[fifth:]], batch_size=64, shuffle=True)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    # To a halt, so that the error at the end is not that of a random moment.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, EPOCHS - 1)
    for _ in range(EPOCHS):
        for batch in learn:
            optimizer.zero_grad()
            F.mse_loss(net(batch), batch.y).backward()
            optimizer.step()
        schedule.step()
        yield
    with torch.no_grad():
        return float(sum((net(batch) - batch.y).abs().mean() for batch in test))


def main() -> None:
    atoms = sum(graph.num_nodes for graph in graphs)
    print(f"molecules: {len(graphs):,} of the NCI, {atoms / len(graphs):.1f} atoms each")
    # Rounding sends 250 steps of Adam along another path; seeds differ by ten times as much.
    both = train_both(
        train, [0], measure="mean error of log P", noise=0.03, title="log P", epochs=EPOCHS
    )
    print(both)
    print(edgeweave.pyg.report())
    assert both.agrees, both
    spread = torch.tensor([float(graph.y) for graph in graphs]).std()
    assert max(both.stock + both.ours) < 0.5 * spread, "no better than a guess"


if __name__ == "__main__":
    main()
