"""BERT (Devlin et al., NAACL 2019), and the small one of FedProj's language tasks ("TinyBERT"; M 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.models.lora import Alpha, Head, On, Rank, with_adapters

#: The layers that get adapters.
ADAPTED = {"attention": ("blocks.*.query", "blocks.*.value"), "all": ("blocks.*",)}
#: Token numbers that the model knows: padding, which nothing attends to, and the end of a text.
PAD, END = 0, 3


class Embeddings(nn.Module):
    """Tokens [B, T] -> [B, T, width]: words, places, and whether a token belongs to the first text or the second."""

    def __init__(self, vocabulary: int, places: int, width: int):
        super().__init__()
        self.word, self.place, self.kind = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(places, width),
            nn.Embedding(2, width),
        )
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        ends = (x == END).long()
        second = (ends.cumsum(1) - ends).clamp(max=1)  # after the first end
        places = torch.arange(x.shape[1], device=x.device)
        tokens: Tensor = self.norm(self.word(x) + self.place(places) + self.kind(second))
        return tokens


class TransformerBlock(nn.Module):
    """Self-attention and two affine layers, each with its sum and its norm after it: [B, T, width] -> [B, T, width].

    ``mask`` [B, T]: which tokens can be attended to.
    """

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mixed = (nn.Linear(width, width) for _ in range(4))
        self.attended = nn.LayerNorm(width, eps=1e-12)
        self.wide, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.out = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        # Written out: the fused kernels cannot be differentiated twice.
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(
            ~mask[:, None, None, :], -torch.inf
        )
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.attended(x + self.mixed(mixed))
        out: Tensor = self.out(x + self.narrow(F.gelu(self.wide(x))))
        return out


class Bert(nn.Module):
    """Encoder, pooler (affine and tanh on the first token; or, with ``mean``, the mean over the tokens) and classifier: tokens
    [B, T] -> logits [B, classes]. No dropout."""

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        layers: int,
        width: int,
        heads: int,
        hidden: int,
        places: int,
        mean: bool = False,
    ):
        super().__init__()
        self.embeddings = Embeddings(vocabulary, places, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, hidden) for _ in range(layers))
        self.pooler = None if mean else nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)
        for m in self.modules():  # the encoder's initialisation in the paper
            if isinstance(m, nn.Linear | nn.Embedding):
                nn.init.normal_(m.weight, std=0.02)
            if isinstance(m, nn.Linear):
                nn.init.zeros_(m.bias)

    def features(self, x: Tensor) -> Tensor:
        """The pooled tokens [B, width]."""
        mask, h = x != PAD, self.embeddings(x)
        for block in self.blocks:
            h = block(h, mask)
        if self.pooler is None:
            return (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return torch.tanh(self.pooler(h[:, 0]))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


@registry.model("bert_tiny")
def bert_tiny(
    shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int = 30522,
    places: int = 512,
    lora_rank: Rank = 0,
    lora_alpha: Alpha = 16.0,
    lora_on: On = "attention",
    lora_head: Head = True,
) -> nn.Module:
    """BERT of 2 blocks, 2 heads, width 128, for texts: an encoder of 4,385,920 parameters with BERT's 30,522 word pieces.

    ``vocabulary``: token numbers it knows, by default those of the data; ``places``: the longest text in tokens.
    """
    if len(shape) != 1 or shape[0] > places:
        raise FldiagError(
            f"model 'bert_tiny' takes texts of up to {places} tokens, the data has inputs of shape {tuple(shape)}",
            "use text data (sst2, snli, agnews, csv:PATH), a shorter data.length or more model.places",
            usage=True,
        )
    model = Bert(vocabulary, classes, layers=2, width=128, heads=2, hidden=512, places=places)
    return with_adapters(
        model, lora_rank, lora_alpha, ADAPTED[lora_on], "classifier" if lora_head else ""
    )
