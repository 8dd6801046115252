"""Models of transformers from the folder that ``save_pretrained`` writes: config.json says the architecture, and no more.

The class is one that transformers itself has for the architecture named there. No code of the folder is run and nothing is
fetched, so a folder that brings its own code is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from fldiag.errors import FldiagError, first_line

CONFIG = "config.json"
#: transformers' own ways from a config to a class, the most special first.
AUTO = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForPreTraining",
    "AutoModelForImageClassification",
    "AutoModelForAudioClassification",
    "AutoModel",
)


def build(folder: Path) -> nn.Module:
    """The model that the folder's config.json describes, with random weights.

    Raises FldiagError when transformers is not installed, or has no class of this name for this kind of config.
    """
    name = _architecture(folder)
    try:
        import transformers
    except ImportError:
        raise FldiagError(
            f"{folder} is a model of transformers, which is not installed",
            "pip install 'fldiag[transformers]', or give the model: --model pkg.mod:factory",
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # it says in many ways that it does not know a config
        raise FldiagError(
            f"{folder / CONFIG} describes no model that transformers {transformers.__version__} knows: "
            f"{first_line(error)}",
            "code of a model's folder is never run: give the model yourself: --model pkg.mod:factory",
        ) from None
    config.use_cache = False  # keys and values of former tokens, which nothing here asks for
    for kind in AUTO:
        auto: Any = getattr(transformers, kind, None)
        if auto is None or type(config) not in auto._model_mapping:
            continue
        classes = auto._model_mapping[type(config)]
        classes = classes if isinstance(classes, (list, tuple)) else [classes]
        if name in [c.__name__ for c in classes]:
            model: nn.Module = auto.from_config(config, trust_remote_code=False)
            return model
    raise FldiagError(
        f"{folder / CONFIG} names the architecture {name!r}, of which transformers {transformers.__version__} "
        f"has no class for a {type(config).__name__}",
        "give the model: --model pkg.mod:factory",
    )


def _architecture(folder: Path) -> str:
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        return str(config["architectures"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise FldiagError(
            f"{folder / CONFIG} does not name an architecture",
            "write the folder with save_pretrained, or give the model: --model pkg.mod:factory",
        ) from None
