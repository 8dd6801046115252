"""Text sets, known by name or one's own tables."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fldiag import registry
from fldiag.data.arrays import spread
from fldiag.data.dataset import Dataset
from fldiag.data.images import need_folder
from fldiag.data.words import Text, Words
from fldiag.errors import FldiagError, first_line
from fldiag.sections import LENGTH, VOCABULARY

#: Names that a column may have, in the order in which they are looked for.
LABELS, TEXTS, SECONDS = ("label",), ("text", "sentence", "premise"), ("text_b", "hypothesis")
TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


@dataclass(frozen=True)
class Reading:
    """How texts become numbers: so many word pieces, learnt or MiniLM's, and so many tokens a text; of so many training texts
    (None: all)."""

    vocabulary: int = VOCABULARY
    length: int = LENGTH
    examples: int | None = None
    tokenizer: str | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Reading:
        """What the section ``data`` of a config says; None: the default."""
        return cls(**{f.name: data[f.name] for f in fields(cls) if data.get(f.name)})


@dataclass(frozen=True)
class TextSet:
    """What a named set must look like, which of its files are training data (the first that is there), and its source."""

    name: str
    classes: int
    train: tuple[str, ...]
    summary: str
    source: str


SETS = (
    TextSet(
        "sst2",
        2,
        ("train",),
        "SST-2 film reviews, sentences and phrases, 2 classes (negative, positive).",
        "R. Socher et al., EMNLP 2013, as in GLUE; its dev split is the test split.",
    ),
    TextSet(
        "snli",
        3,
        ("train", "dev"),
        "SNLI pairs of sentences, 3 classes (entailment, neutral, contradiction).",
        "S. Bowman et al., EMNLP 2015; without a train file the dev file is trained on.",
    ),
    TextSet(
        "agnews",
        4,
        ("train", "train_sample_10k"),
        "AG News descriptions, 4 classes (World, Sports, Business, Sci/Tech).",
        "A. Gulli's AG corpus, as arranged by X. Zhang et al., NIPS 2015.",
    ),
    TextSet(
        "mnli",
        3,
        ("train",),
        "MultiNLI pairs of sentences, 3 classes (entailment, neutral, contradiction).",
        "A. Williams et al., NAACL 2018; its matched dev part is meant as the test part.",
    ),
    TextSet(
        "sent140",
        2,
        ("train",),
        "Sentiment140 tweets, 2 classes (negative, positive).",
        "A. Go et al., 2009.",
    ),
    TextSet(
        "marc",
        5,
        ("train",),
        "Amazon reviews in English, 5 classes (stars).",
        "P. Keung et al., EMNLP 2020 (MARC).",
    ),
    TextSet(
        "yelp", 5, ("train",), "Yelp reviews, 5 classes (stars).", "X. Zhang et al., NIPS 2015."
    ),
)


def table(path: str | os.PathLike[str], reading: Reading) -> Dataset:
    """``csv:PATH``: a file with the columns ``label``, ``text`` (and ``text_b`` for pairs) and ``split`` (train or test), or a
    folder that holds train.csv and test.csv. Files may end with .csv or .tsv, and be compressed (.gz). A .tsv has no quotes.
    Without ``split`` about a fifth of the texts are for testing: a hash of the text decides, so that equal texts stay on
    one side, whatever their order.

    Labels are numbers 0, 1, ... or names, which are numbered in alphabetical order.

    Raises FldiagError for what is missing or does not fit.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        both = [_read(_file(path, split)) for split in ("train", "test")]
    else:
        frame = _read(path)
        if "split" not in frame:
            frame["split"] = [
                "test" if _tested(text) else "train" for text in _columns(frame, str(path))[0]
            ]
            if frame["split"].nunique() < 2:
                raise FldiagError(
                    f"{path} has too few texts ({len(frame)}) for a fifth of them to be for testing",
                    "give it a column 'split' with train and test, or more texts",
                )
            warnings.warn(
                f"{path} has no column 'split': {sum(frame['split'] == 'test')} of its {len(frame)} texts, chosen by a "
                "hash of the text, are for testing",
                stacklevel=2,
            )
        elif not {"train", "test"} <= set(frame["split"]):
            raise FldiagError(
                f"{path} does not say which texts are for training and which for testing",
                "give it a column 'split' with train and test, or name a folder with train.csv and test.csv",
            )
        both = [frame[frame["split"] == split] for split in ("train", "test")]
    return _dataset(f"csv:{path}", both, reading, str(path))


def _tested(text: Text) -> bool:
    return hashlib.sha256("\0".join(text).encode()).digest()[0] % 5 == 0


def _dataset(
    name: str,
    both: Sequence[pd.DataFrame],
    reading: Reading,
    source: str,
    classes: int | None = None,
) -> Dataset:
    (train, train_y), (test, test_y) = (_columns(frame, source) for frame in both)
    names = sorted({*train_y, *test_y})
    numbered = all(n.isdecimal() for n in names)
    numbers = {n: int(n) if numbered else i for i, n in enumerate(names)}
    labels = _labels(train_y, numbers)
    if reading.examples is not None and reading.examples < len(labels):
        subset = spread(labels, reading.examples)
        train, labels = [train[int(i)] for i in subset], labels[subset]
    words = (
        Words.of_minilm(reading.length)
        if reading.tokenizer
        else Words.learn(train, reading.vocabulary, reading.length)
    )
    return Dataset(
        name,
        words.numbers(train),
        labels,
        words.numbers(test),
        _labels(test_y, numbers),
        classes=classes or max(numbers.values()) + 1,
        words=words,
        texts=(*train, *test),
    )


def _labels(names: list[str], numbers: dict[str, int]) -> Tensor:
    return torch.tensor([numbers[name] for name in names])


def _read(path: Path) -> pd.DataFrame:
    tabs = ".tsv" in path.suffixes
    try:
        return pd.read_csv(
            path,
            sep="\t" if tabs else ",",
            quoting=3 if tabs else 0,
            dtype=str,
            keep_default_na=False,
            encoding="utf-8",
            lineterminator="\n" if tabs else None,
        )
    except FileNotFoundError:
        raise FldiagError(f"no file {path}", "check the path after csv:") from None
    except (OSError, ValueError, EOFError) as error:  # pandas' own errors are ValueErrors
        raise FldiagError(
            f"{path} is not a readable table ({first_line(error)})",
            "write it in UTF-8 with the columns label and text",
        ) from None


def _columns(frame: pd.DataFrame, source: str) -> tuple[list[Text], list[str]]:
    label, text, second = (
        next((c for c in names if c in frame), None) for names in (LABELS, TEXTS, SECONDS)
    )
    if label is None or text is None:
        raise FldiagError(
            f"{source} has the columns {', '.join(map(str, frame.columns))}",
            "name them label and text (and text_b for pairs)",
        )
    if not len(frame):
        raise FldiagError(
            f"{source} has no text to train or to test on", "give both splits at least one"
        )
    texts = zip(*(frame[c] for c in (text, second) if c is not None), strict=True)
    return [*texts], [*frame[label]]


def _file(folder: Path, stem: str) -> Path:
    files = [
        folder / f"{stem}{ending}" for ending in TABLES if (folder / f"{stem}{ending}").is_file()
    ]
    if not files:
        raise FldiagError(
            f"{folder} has no {stem}.csv",
            f"it needs a train and a test table ({', '.join(TABLES)})",
        )
    return files[0]


def _load_set(spec: TextSet, root: str | os.PathLike[str] | None, reading: Reading) -> Dataset:
    folder = need_folder(spec.name, root, f"{spec.name}_train.tsv and {spec.name}_test.tsv")
    paths = [folder / f"{spec.name}_{part}{ending}" for part in spec.train for ending in TABLES]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise FldiagError(
            f"data set {spec.name!r} was not found: looked for {paths[0]} and {len(paths) - 1} other names",
            f"write its texts as {spec.name}_train.tsv and {spec.name}_test.tsv (columns label and text) there",
        )
    both = [_read(files[0]), _read(_file(folder, f"{spec.name}_test"))]
    return _dataset(spec.name, both, reading, str(files[0]), spec.classes)


def _register(spec: TextSet) -> None:
    def build(
        root: str | None = None, download: bool = False, reading: Reading | None = None
    ) -> Dataset:
        return _load_set(spec, root, reading or Reading())

    build.__doc__ = (
        f"{spec.summary}\n\nFrom {spec.name}_train.tsv and {spec.name}_test.tsv under data.root or $FLDIAG_DATA "
        f"(columns label and text; .csv and .gz too). Word pieces are learnt from the training texts. {spec.source}"
    )
    build.__name__ = spec.name
    registry.dataset(spec.name)(build)


for _spec in SETS:
    _register(_spec)
