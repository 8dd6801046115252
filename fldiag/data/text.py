"""Texts: the sets that are known by name, tables of one's own, and how they become token numbers (library ``tokenizers``)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fldiag.data.dataset import Dataset, spread
from fldiag.data.named import folder
from fldiag.errors import FldiagError, first_line
from fldiag.models import minilm
from fldiag.sections import LENGTH, SPECIAL, VOCABULARY, DataSection

PAD, UNKNOWN, START, END = range(4)
SPLITS = ("train", "test")
#: One text, or two that belong together (a premise and a hypothesis).
Text = tuple[str, ...]
#: Names that a column may have, in the order in which they are looked for.
COLUMNS = (("label",), ("text", "sentence", "premise"), ("text_b", "hypothesis"))

#: name -> what it is, and its classes. Files: <name>_train.tsv and <name>_test.tsv (or .csv, and .gz) under the data folder.
SETS = {
    "sst2": ("SST-2 film reviews, 2 classes (Socher et al., EMNLP 2013).", 2),
    "snli": ("SNLI pairs of sentences, 3 classes (Bowman et al., EMNLP 2015).", 3),
    "agnews": ("AG News, 4 classes (Zhang et al., NIPS 2015).", 4),
    "mnli": ("MultiNLI pairs of sentences, 3 classes (Williams et al., NAACL 2018).", 3),
    "sent140": ("Sentiment140 tweets, 2 classes (Go et al., 2009).", 2),
    "marc": ("Amazon reviews in English, 5 classes (Keung et al., EMNLP 2020).", 5),
    "yelp": ("Yelp reviews, 5 classes (Zhang et al., NIPS 2015).", 5),
}


def find(section: DataSection) -> Dataset:
    """A set of ``SETS``, or the texts of ``csv:PATH``.

    Args:
        section: Its name is that of the set, or the path of a file with the columns ``label``, ``text`` (and ``text_b``: pairs),
            ``split`` (train or test). It may be a .tsv (which has no quotes), and be compressed (.gz). Labels are numbers 0, 1,
            ... or names, which are numbered in alphabetical order.

    Raises:
        FldiagError: Files that are not there, and what is missing in them or does not fit.
    """
    name = section.name
    if name in SETS:
        home = folder(section)
        frames = [
            _read(min(home.glob(f"{name}_{split}.[ct]sv*"), default=home / f"{name}_{split}.tsv"))
            for split in SPLITS
        ]
    else:
        path = Path(name.removeprefix("csv:")).expanduser()
        frame = _read(path)
        if "split" not in frame:
            raise FldiagError(f"{path} has no column 'split' with train and test", usage=True)
        frames = [frame[frame["split"] == split] for split in SPLITS]
    (train, train_names), (test, test_names) = (_columns(frame, name) for frame in frames)
    names = sorted({*train_names, *test_names})
    is_numbered = all(n.isdecimal() for n in names)
    numbers = {n: int(n) if is_numbered else i for i, n in enumerate(names)}
    train_y, test_y = (torch.tensor([numbers[n] for n in y]) for y in (train_names, test_names))
    if section.examples is not None and section.examples < len(train):
        subset = spread(train_y, section.examples)
        train, train_y = [train[i] for i in subset.tolist()], train_y[subset]
    length = section.length or LENGTH
    words = (
        Words.of(minilm.pieces()[0], length)
        if section.tokenizer
        else Words.learn(train, section.vocabulary or VOCABULARY, length)
    )
    return Dataset(
        name,
        words.numbers(train),
        train_y,
        words.numbers(test),
        test_y,
        SETS[name][1] if name in SETS else max(numbers.values()) + 1,
        words=words,
        texts=(*train, *test),
    )


def _read(path: Path) -> pd.DataFrame:
    tabs: dict[str, Any] = {"sep": "\t", "quoting": 3, "lineterminator": "\n"}
    options = tabs if ".tsv" in path.suffixes else {}
    try:
        return pd.read_csv(path, dtype=str, keep_default_na=False, **options)
    except Exception as error:  # a damaged file can make its reader raise anything
        raise FldiagError(
            f"{path} is not a readable table ({first_line(error)})",
            "write it in UTF-8 with the columns label and text",
        ) from None


def _columns(frame: pd.DataFrame, source: str) -> tuple[list[Text], list[str]]:
    label, text, second = (next((c for c in names if c in frame), None) for names in COLUMNS)
    if label is None or text is None or not len(frame):
        raise FldiagError(
            f"{source}: a split has {len(frame)} texts and the columns {', '.join(map(str, frame.columns))}",
            "give both splits a text, and name the columns label and text (and text_b for pairs)",
        )
    texts = zip(*(frame[c] for c in (text, second) if c is not None), strict=True)
    return [*texts], [*frame[label]]


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
        reader = cls.of(SPECIAL, length)._tokenizer
        words: Counter[str] = Counter()
        for text in texts:
            for part in map(reader.normalizer.normalize_str, text):
                words.update(word for word, _ in reader.pre_tokenizer.pre_tokenize_str(part))
        letters = sorted({letter for word in words for letter in word})
        vocabulary = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
        if len(vocabulary) > pieces:
            raise FldiagError(
                f"data.vocabulary = {pieces}, and the characters of the texts alone need {len(vocabulary)}",
                usage=True,
            )
        frequent = sorted(words.keys() - {*vocabulary}, key=lambda word: (-words[word], word))
        return cls.of(vocabulary + frequent[: pieces - len(vocabulary)], length)

    @classmethod
    def of(cls, vocabulary: Sequence[str], length: int) -> Words:
        """Word pieces in lower case, ``SPECIAL`` first, of words cut at spaces and punctuation; the longest one fits."""
        library = _library()
        numbers = {word: i for i, word in enumerate(vocabulary)}
        tokenizer = library.Tokenizer(library.models.WordPiece(numbers, unk_token=SPECIAL[1]))
        tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
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
        numbers = []
        # in pieces, as the library's answers take a hundred times the memory of the numbers
        for start in range(0, len(texts), 1000):
            batch = [text if len(text) == 2 else text[0] for text in texts[start : start + 1000]]
            encoded = self._tokenizer.encode_batch(batch)
            numbers.append(torch.tensor([text.ids for text in encoded], dtype=torch.int32))
        return torch.cat(numbers)

    @cached_property
    def _tokenizer(self) -> Any:
        return _library().Tokenizer.from_str(self.spec)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise FldiagError(
            "texts need the package tokenizers", "pip install 'fldiag[text]'", usage=True
        ) from None
    return tokenizers
