"""(tool) A plain serial FedTP in PyTorch: the peer of experiments.bench.round.

One client after another, as in the authors' simulator; written from the paper's
formulas. It answers each line on standard input with the seconds of one round.
"""

import argparse
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1)))


class Block(nn.Module):
    def __init__(
        self, dim: int, heads: int, head_dim: int, mlp_dim: int, dropout: float
    ):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, head_dim, dropout)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    def __init__(
        self,
        *,
        classes: int = 10,
        size: int = 32,
        channels: int = 3,
        patch: int = 4,
        dim: int,
        depth: int,
        heads: int,
        head_dim: int,
        mlp_dim: int,
        dropout: float,
    ):
        super().__init__()
        self.patch = patch
        self.embedding = nn.Linear(patch * patch * channels, dim)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        tokens = (size // patch) ** 2 + 1
        self.positions = nn.Parameter(torch.randn(1, tokens, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(dim, heads, head_dim, mlp_dim, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        batch, size, _, channels = images.shape
        side = size // self.patch
        x = images.view(batch, side, self.patch, side, self.patch, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(batch, side * side, -1)
        x = torch.cat([self.cls.expand(batch, -1, -1), self.embedding(x)], dim=1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Hypernetwork(nn.Module):
    """An embedding a client, a ReLU trunk, and a linear head for each block's qkv."""

    def __init__(self, clients: int, shapes: list[torch.Size], hidden: int = 150):
        super().__init__()
        self.shapes = shapes
        self.embeddings = nn.Embedding(clients, 128)
        layers: list[nn.Module] = [nn.Linear(128, hidden)]
        for _ in range(3):
            layers += [nn.ReLU(), nn.Linear(hidden, hidden)]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(hidden, s.numel()) for s in shapes)

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        features = self.trunk(self.embeddings(ids))
        return [
            head(features).view(len(ids), *shape)
            for head, shape in zip(self.heads, self.shapes, strict=True)
        ]


class FedTP:
    """Server and clients, one client at a time."""

    def __init__(self, model: ViT, clients: int, batch_size: int, device: torch.device):
        self.model = model.to(device)
        self.batch_size, self.device = batch_size, device
        names = [name for name, _ in model.named_parameters()]
        self.personal = [name for name in names if name.endswith("qkv.weight")]
        shapes = [model.get_parameter(name).shape for name in self.personal]
        self.hypernetwork = Hypernetwork(clients, shapes).to(device)
        self.server = torch.optim.SGD(
            self.hypernetwork.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3
        )
        self.shared = {
            name: p.detach().clone()
            for name, p in model.named_parameters()
            if name not in self.personal
        }

    def train_client(self, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5
        )
        order = torch.randperm(len(x), device=self.device)
        for rows in order.split(self.batch_size):
            images = (x[rows].float() - 120) / 60
            optimizer.zero_grad()
            functional.cross_entropy(self.model(images), y[rows]).backward()
            optimizer.step()

    def round(self, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One round of all clients in `data`, weighted equally."""
        ids = torch.arange(len(data), device=self.device)
        emitted = self.hypernetwork(ids)
        parameters = dict(self.model.named_parameters())
        mean = {name: torch.zeros_like(p) for name, p in self.shared.items()}
        differences = [torch.zeros_like(leaf) for leaf in emitted]
        for client, (x, y) in enumerate(data):
            with torch.no_grad():
                for name, value in self.shared.items():
                    parameters[name].copy_(value)
                for name, leaf in zip(self.personal, emitted, strict=True):
                    parameters[name].copy_(leaf[client])
            self.train_client(x, y)
            with torch.no_grad():
                for name, total in mean.items():
                    total.add_(parameters[name], alpha=1 / len(data))
                for name, leaf, difference in zip(
                    self.personal, emitted, differences, strict=True
                ):
                    difference[client] = (leaf[client] - parameters[name]) / len(data)
        self.shared = mean
        self.server.zero_grad()
        torch.autograd.backward(emitted, differences)
        self.server.step()


def main() -> None:
    """Reads sizes as flags, then a line for each round wanted."""
    parser = argparse.ArgumentParser()
    sizes = ["dim", "depth", "heads", "head_dim", "mlp_dim"]
    for name in [*sizes, "clients", "steps", "batch_size", "threads"]:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dropout", type=float, required=True)
    flags = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(flags.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ViT(
        dim=flags.dim,
        depth=flags.depth,
        heads=flags.heads,
        head_dim=flags.head_dim,
        mlp_dim=flags.mlp_dim,
        dropout=flags.dropout,
    )
    fedtp = FedTP(model, flags.clients, flags.batch_size, device)
    examples = flags.steps * flags.batch_size
    data = [
        (
            torch.randint(0, 256, (examples, 32, 32, 3), device=device).to(torch.uint8),
            torch.randint(0, 10, (examples,), device=device),
        )
        for _ in range(flags.clients)
    ]
    fedtp.round(data)
    print("ready", torch.__version__, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        fedtp.round(data)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
