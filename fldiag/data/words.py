"""How texts become token numbers (with the library ``tokenizers``)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag import minilm
from fldiag.errors import FldiagError
from fldiag.sections import SPECIAL

PAD, UNKNOWN, START, END = range(4)
#: One text, or two that belong together (a premise and a hypothesis).
Text = tuple[str, ...]


@dataclass(frozen=True)
class Words:
    """A tokenizer: ``spec`` is its ``tokenizer.json``, ``length`` the tokens of a text (longer ones are cut, shorter padded)."""

    spec: str
    length: int

    @classmethod
    def learn(cls, texts: Iterable[Text], pieces: int, length: int) -> Words:
        """Word pieces in lower case: all characters of the texts, and the most frequent whole words.

        The library's own training breaks ties by chance, so the vocabulary is counted here and the same texts always give the
        same tokens. A word that is not in it is spelled in characters.

        Raises FldiagError when ``pieces`` are fewer than the characters need, or ``tokenizers`` is not installed.
        """
        normal, split = _reading()
        words: Counter[str] = Counter()
        for text in texts:
            for part in text:
                words.update(word for word, _ in split.pre_tokenize_str(normal.normalize_str(part)))
        letters = sorted({letter for word in words for letter in word})
        vocabulary = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
        if len(vocabulary) > pieces:
            raise FldiagError(
                f"data.vocabulary = {pieces}, and the characters of the texts alone need {len(vocabulary)}",
                f"set data.vocabulary to {len(vocabulary)} or more",
                usage=True,
            )
        characters = set(vocabulary)
        by_count = sorted(words, key=lambda word: (-words[word], word))
        frequent = [word for word in by_count if word not in characters]
        vocabulary += frequent[: pieces - len(vocabulary)]
        return cls.of(vocabulary, length)

    @classmethod
    def of_minilm(cls, length: int) -> Words:
        """Those of MiniLM. Raises FldiagError when its package or ``tokenizers`` is not installed."""
        return cls.of(minilm.pieces(SPECIAL)[0], length)

    @classmethod
    def of(cls, vocabulary: Sequence[str], length: int) -> Words:
        """Word pieces in lower case, ``SPECIAL`` first; the longest that fits is taken."""
        library = _library()
        tokenizer = library.Tokenizer(
            library.models.WordPiece(
                {word: i for i, word in enumerate(vocabulary)}, unk_token=SPECIAL[1]
            )
        )
        tokenizer.normalizer, tokenizer.pre_tokenizer = _reading()
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", START), ("[SEP]", END)],
        )
        tokenizer.decoder = library.decoders.WordPiece(cleanup=False)
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length, pad_id=PAD, pad_token=SPECIAL[0])
        return cls(
            json.dumps(json.loads(tokenizer.to_str()), sort_keys=True, ensure_ascii=False), length
        )

    @cached_property
    def size(self) -> int:
        """How many tokens there are."""
        return int(self._tokenizer.get_vocab_size())

    def numbers(self, texts: Sequence[Text]) -> Tensor:
        """Token numbers of texts (or pairs), int32 [n, length]: [CLS] text [SEP], and of a pair the second text and [SEP]."""
        numbers = np.empty((len(texts), self.length), dtype=np.int32)
        # in pieces, as the library's answers take a hundred times the memory of the numbers
        for start in range(0, len(texts), 1000):
            batch = [text if len(text) == 2 else text[0] for text in texts[start : start + 1000]]
            numbers[start : start + len(batch)] = [
                encoded.ids for encoded in self._tokenizer.encode_batch(batch)
            ]
        return torch.from_numpy(numbers)

    def text(self, numbers: Tensor) -> str:
        """A row of token numbers in words, without padding and ends."""
        return str(
            self._tokenizer.decode([int(i) for i in numbers if int(i) not in (PAD, START, END)])
        )

    @cached_property
    def _tokenizer(self) -> Any:
        return _library().Tokenizer.from_str(self.spec)

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "length": self.length}


def _reading() -> tuple[Any, Any]:
    """How a text becomes words: lower case, cut at spaces and punctuation."""
    library = _library()
    return library.normalizers.BertNormalizer(
        lowercase=True
    ), library.pre_tokenizers.BertPreTokenizer()


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
    except ImportError:
        raise FldiagError(
            "texts need the package tokenizers", "pip install 'fldiag[text]'", usage=True
        ) from None
    return tokenizers
