"""SL-ViT: a vision transformer for small images (Lee, Lee & Song, 2021, "Vision Transformer for Small-Size Datasets").

Shifted patch tokenisation: a token is made of a patch of the image and of its copies shifted by one pixel along each
axis. Locality self-attention: softmax(exp(t) q k^T) v with a learned t per block and no token attending to itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.models.lora import Alpha, Head, On, Rank, with_adapters

#: The layers that get adapters.
ADAPTED = {"attention": ("attention.*.qkv",), "all": ("tokens.*", "attention.*", "mlp.*")}


class ShiftedPatches(nn.Module):
    """[B, C, H, W] -> tokens [B, (H/p)(W/p), dim]."""

    def __init__(self, channels: int, patch: int, dim: int):
        super().__init__()
        self.patch = patch
        inputs = 5 * channels * patch**2
        self.norm, self.linear = nn.LayerNorm(inputs), nn.Linear(inputs, dim)

    def patches(self, x: Tensor) -> Tensor:
        """Image and four shifted copies (zeros enter), cut into patches: [B, (H/p)(W/p), 5 C p^2]."""
        p = self.patch
        shifts = [
            F.pad(x, pad) for pad in ((1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1))
        ]
        x = torch.cat([x, *shifts], dim=1).unflatten(2, (-1, p)).unflatten(4, (-1, p))
        return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.linear(self.norm(self.patches(x)))
        return tokens


class LocalityAttention(nn.Module):
    """Pre-norm self-attention [B, N, dim] -> [B, N, dim] without the diagonal, at a learned temperature."""

    def __init__(self, dim: int, heads: int, per_head: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.temperature = nn.Parameter(torch.tensor(-0.5 * math.log(per_head)))
        self.qkv = nn.Linear(dim, 3 * heads * per_head, bias=False)
        self.out = nn.Linear(heads * per_head, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * self.temperature.exp()
        diagonal = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        weights = scores.masked_fill(diagonal, -torch.inf).softmax(-1)
        y: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return y


class SLViT(nn.Module):
    """Tokens, a class token and learned positions, ``depth`` blocks of attention and MLP, head on the class token."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int,
        dim: int = 192,
        depth: int = 9,
        heads: int = 12,
        per_head: int = 64,
        hidden: int = 192,
    ):
        super().__init__()
        channels, height, width = shape
        self.tokens = ShiftedPatches(channels, patch, dim)
        self.first = nn.Parameter(torch.randn(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, (height // patch) * (width // patch) + 1, dim))
        self.attention = nn.ModuleList(
            LocalityAttention(dim, heads, per_head) for _ in range(depth)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)
            )
            for _ in range(depth)
        )
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def features(self, x: Tensor) -> Tensor:
        """The class token after the last block [B, dim]."""
        x = (
            torch.cat([self.first.expand(x.shape[0], -1, -1), self.tokens(x)], dim=1)
            + self.position
        )
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return x[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


@registry.model("sl_vit")
def sl_vit(
    shape: tuple[int, ...],
    classes: int,
    *,
    lora_rank: Rank = 0,
    lora_alpha: Alpha = 16.0,
    lora_on: On = "attention",
    lora_head: Head = True,
) -> nn.Module:
    """SL-ViT of 9 blocks, 12 heads of 64, width 192: 6,176,275 parameters with 32x32x3 images and 10 classes.

    Patches of a quarter of the side, at most 16 pixels; no dropout. The head is layer-norm and linear.
    """
    side = shape[-1]
    patch = min(side // 4, 16)
    if len(shape) != 3 or shape[1] != side or patch < 1 or side % patch:
        raise FldiagError(
            "model 'sl_vit' takes square images of a side that its patches divide (a quarter of the side, "
            f"at most 16 pixels), the data has shape {tuple(shape)}",
            "resize the images, say to 32x32, or use model.name = 'mlp'",
            usage=True,
        )
    model = SLViT((shape[0], side, side), classes, patch=patch)
    return with_adapters(
        model, lora_rank, lora_alpha, ADAPTED[lora_on], "head" if lora_head else ""
    )
