"""What the scales make of a paper's protocol, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fldiag.config import Config
from fldiag.errors import FldiagError, unknown
from fldiag_papers.study import COUNTED, Ask, Trial


class LeftOut(FldiagError):
    """A trial that a scale does not have; the ledger says why."""


@dataclass(frozen=True)
class Share:
    """Factors of a paper's numbers of clients (down to ``fewest``), sampled clients and local epochs."""

    clients: float = 0.2
    sampled: float = 0.5
    epochs: float = 0.4
    fewest: int = 10


@dataclass(frozen=True)
class Scale:
    """What a scale makes of a protocol.

    ``is_unreduced``: only ``over`` is set. ``images``: training examples kept (None: all). ``seeds``: at least.
    ``checkpoint_every``: rounds that an interruption may lose. ``data``: what stands for which data set, by paper; ``publics``:
    the public data of each of these, where not a part of the private ones; ``untrained``: as ``data``, where nothing is trained;
    ``models``. ``over``: further overrides. ``notes``: what a caption says of a data set. ``asks``: options of diagnostics,
    where a study has none."""

    name: str
    text: str
    is_unreduced: bool = False
    seeds: int = 1
    checkpoint_every: int = 1
    images: int | None = None
    test_images: int | None = None
    public: int | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    publics: Mapping[str, str] = field(default_factory=dict)
    untrained: Mapping[str, str] | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, Share] = field(default_factory=dict)
    rounds: tuple[tuple[int, int], ...] = ()
    batch: int | None = None
    min_size: int | None = None
    over: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    asks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    history: int = 6

    def seed_list(self, at_least: int) -> list[int]:
        return list(range(self.seeds if self.name == "smoke" else max(self.seeds, at_least)))

    def config(self, trial: Trial, seed: int = 0, store: Path | None = None) -> Config:
        """The config of a trial at this scale, without saying what is kept of the run. ``store``: where reduced data lie.

        Raises LeftOut for data and models that the scale has not."""
        protocol = trial.protocol().replace(seed=seed)
        needs_data = trial.train or not trial.ask or any(a.name not in COUNTED for a in trial.ask)
        if not needs_data or (self.is_unreduced and not trial.train):
            return protocol
        if self.is_unreduced:
            changes = dict(self.over)
        elif trial.train:
            changes = self._reduce(protocol, trial.paper, store)
        else:  # where nothing is trained, nothing need be reduced
            data = self.data if self.untrained is None else self.untrained
            name = self._stand_in(protocol, trial.paper, data)
            is_other = name != protocol.data.name
            changes = {"data.name": name, "data.variant": None} if is_other else {}
        return protocol.replace(**{k.replace(".", "__"): v for k, v in changes.items()})

    def options(self, ask: Ask) -> dict[str, Any]:
        """The options of an ask, those of the scale where the study gives none."""
        return {**self.asks.get(ask.name, {}), **ask.options}

    def _stand_in(self, protocol: Config, paper: str, data: Mapping[str, str]) -> str:
        name = protocol.data.name
        keys = [key for key in (f"{paper}/{name}", name, "*") if key in data]
        if not keys:
            raise LeftOut(f"{name} is not part of the scale {self.name}", "use --scale paper")
        return data[keys[0]]

    def _reduce(self, protocol: Config, paper: str, store: Path | None) -> dict[str, Any]:
        clients, train, partition = protocol.clients, protocol.train, protocol.partition
        share = self.shares.get(paper, Share())
        rounds = next(to for upto, to in self.rounds if protocol.rounds <= upto)
        rounds = min(protocol.rounds, rounds)
        total = max(min(share.fewest, clients.total), round(clients.total * share.clients))
        sampled = max(1, round(clients.per_round * share.sampled))
        changes: dict[str, Any] = {
            "clients.total": total,
            "clients.per_round": min(total, sampled),
            "train.epochs": max(1, round(train.epochs * share.epochs)),
            "rounds": rounds,
            **self._data(protocol, paper, store),
            **self._model(protocol),
        }
        if partition.kind in ("lda", "lda_fedsol"):
            changes["partition.min_size"] = min(partition.min_size or 1, self.min_size or 1)
        if self.batch:
            halves = protocol.method.name == "perfedavg"  # it halves every minibatch
            changes["train.batch_size"] = min(self.batch * (1 + halves), train.batch_size)
        # Clients are so small that a short minibatch may be all they have.
        if train.drop_last:
            changes["train.drop_last"] = False
        if train.aggregate == "batches":
            changes["train.aggregate"] = "n"
        most = {"memory_batch": 64, "batch_size": 64, "first_round": max(1, rounds // 10)}
        most |= {"memory_size": self.public} if self.public else {}
        for option, limit in most.items():
            value = protocol.method.options.get(option)
            if isinstance(value, int) and value > limit:
                changes[f"method.{option}"] = limit
        return changes | dict(self.over)

    def _data(self, protocol: Config, paper: str, store: Path | None) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        data = self._stand_in(protocol, paper, self.data)
        name = f"{data}-{self.images}" if self.images else data
        if name != protocol.data.name:
            root = str(packed(store)) if self.images and store else None
            changes |= {"data.name": name, "data.variant": None, "data.root": root}
            if self.images:  # a file of its own: as the whole set is, standardised
                changes["data.normalise"] = "standard"
        if protocol.data.public:
            public = self.publics.get(data)
            changes["data.public"] = public or f"holdout:{self.public}"
            changes |= {"data.public_size": self.public} if public else {}
        return changes

    def _model(self, protocol: Config) -> dict[str, Any]:
        name = protocol.model.name
        model = self.models.get(name, self.models.get("*", name))
        if not model:
            raise LeftOut(
                f"{name} is too large for the scale {self.name}, and has no smaller relative",
                "use --scale paper",
            )
        return {"model.name": model} if model != name else {}


def packed(store: Path) -> Path:
    """Where the reduced data of a store lie."""
    return store.absolute() / "data"


#: In words, by key of the config: what is there now, what the paper has.
WORDS = {
    "data.name": "{new} instead of {old}",
    "data.examples": "{new} instead of {old} training texts",
    "data.public_size": "{new} instead of {old} public examples",
    "data.public": "public data {new} instead of {old}",
    "model.name": "model {new} instead of {old}",
    "clients.total": "{new} instead of {old} clients",
    "clients.per_round": "{new} instead of {old} a round",
    "rounds": "{new} instead of {old} rounds",
    "train.epochs": "{new} instead of {old} local epochs",
    "train.batch_size": "minibatches of {new} instead of {old}",
    "partition.min_size": "clients of at least {new} instead of {old} examples",
    "data.variant": "plain normalisation and no augmentation instead of those of the {old} paper",
    "train.aggregate": "clients weighted by examples instead of by minibatches",
    "train.precision": "trained in {new} instead of {old}",
}
SILENT = ("name", "seed", "data.root", "train.drop_last", "checkpoint", "metrics")


def reduction(pairs: Iterable[tuple[Config, Config]]) -> str:
    """How the configs made differ from the papers', (paper's, made) each: a sentence, empty for no difference."""
    sentences: dict[str, dict[str, None]] = {}
    for theirs, ours in pairs:
        old, new = flat(theirs), flat(ours)
        for key in new:
            if new[key] != old.get(key) and not key.startswith(SILENT):
                text = WORDS.get(key, key + " {new} instead of {old}").format(
                    new=new[key], old=old.get(key, "none")
                )
                sentences.setdefault(key, {})[text] = None
    order = [k for k in WORDS if k in sentences] + [k for k in sentences if k not in WORDS]
    return "; ".join(text for key in order for text in sentences[key])


def questions(scale: Scale, asks: Iterable[Ask], seeds: int) -> str:
    """What a scale sets of the questions, and those asked of fewer seeds: a sentence, empty for nothing."""
    sentences: dict[str, None] = {}
    for ask in asks:
        settings = {k: v for k, v in scale.asks.get(ask.name, {}).items() if k not in ask.options}
        words = [f"{k.replace('_', ' ')} {v}" for k, v in settings.items()]
        if ask.needs != "nothing" and ask.seeds is not None and ask.seeds < seeds:
            words.append(f"first {ask.seeds} of the seeds")
        if words:
            sentences[f"{ask.name} ({', '.join(words)})"] = None
    return "; ".join(sentences)


def flat(config: Config) -> dict[str, Any]:
    """A config by the names of ``--set``: ``{"rounds": 200, "train.lr": 0.01, ...}``."""
    tree = config.model_dump(mode="json")
    return {
        f"{s}.{k}" if k else s: v
        for s, values in tree.items()
        for k, v in (values.items() if isinstance(values, dict) else [("", values)])
    }


_PAPERS = {
    "fedsol": Share(),
    "fedtoga": Share(),
    "fedproj": Share(epochs=0.1),
    "fedalign": Share(0.5, 0.5, 0.1, fewest=4),
}
_RESNETS = dict.fromkeys(
    ("resnet56", "resnet18_cifar", "resnet18_gn", "resnet18_p3", "resnet18_imagenet", "resnet8_p3"),
    "small_resnet",
)
_WHOLE: dict[str, Any] = {
    "is_unreduced": True,
    "seeds": 3,
    "checkpoint_every": 10,
    "history": 30,
    "asks": {"landscape": {"samples": 10_000}, "spectrum": {"samples": 10_000}},
}

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            "digits, a few rounds: shows that everything works, and no number of it means anything",
            images=500,
            public=100,
            data={"*": "digits"},
            models={**_RESNETS, "*": "small_cnn"},
            shares={
                "fedsol": Share(0.1, 0.4, 0.2),
                "fedtoga": Share(0.1, 0.4, 0.2),
                "fedproj": Share(0.1, 0.4, 0.05),
                "fedalign": Share(0.25, 0.25, 0.05, fewest=4),
            },
            rounds=((25, 2), (10_000, 4)),
            batch=20,
            min_size=2,
            history=4,
            asks={
                "landscape": {"points": 11, "samples": 200},
                "spectrum": {"samples": 200},
                "matching": {"samples": 100, "k": 1, "on": "global", "split": False},
                "drift": {"samples": 200},
                "forgetting": {"samples": 200},
                "iris": {"rounds": 3},
            },
        ),
        Scale(
            "small",
            "real MNIST, few images, clients and rounds: hours on two cores",
            images=2000,
            test_images=1000,
            public=500,
            data={
                "mnist": "mnist",
                "cifar10": "mnist",
                "fedalign/cifar100": "mnist",
            },  # CIFAR-10 so reduced stays near chance
            untrained={"mnist": "mnist", "cifar10": "cifar10", "fedalign/cifar100": "cifar10"},
            models={**_RESNETS, "fedavg_cifar": "small_cnn", "vgg11": "", "sl_vit": ""},
            shares=_PAPERS,
            rounds=((25, 5), (50, 9), (10_000, 12)),
            batch=20,
            min_size=5,
            asks={
                "landscape": {"points": 31, "samples": 500},
                "spectrum": {"samples": 500},
                "matching": {"samples": 100, "k": 1, "on": "global", "split": False},
                "drift": {"samples": 500},
                "forgetting": {"samples": 500},
            },
        ),
        Scale(
            "real",
            "data of the papers' kind in place of sets that are not to be had, fewer texts: hours on two cores",
            seeds=3,
            public=1000,
            data={"mnli": "snli", "sst2": "sst2", "marc": "agnews"},
            publics={"snli": "sst2", "sst2": "snli", "agnews": "sst2"},
            shares={
                "fedproj": Share(1.0, 1.0, 2.0)
            },  # fewer texts, and models from scratch: each text is seen more often
            rounds=((10_000, 15),),
            over={
                "data.examples": 10_000,
                "data.length": 32,
                "data.vocabulary": 8000,
                "model.vocabulary": 8000,
                "train.lr": 1e-3,
            },
            notes={
                "snli": "of SNLI the dev part (9,842 pairs) trains and the test part tests",
                "agnews": "of AG News a sample of 10,001 texts trains",
                "sst2": "SST-2 is tested on its dev part, as in GLUE",
            },
        ),
        Scale(
            "paper-bf16",
            "the papers' protocols, but trained in bf16: faster on processors that have it",
            **_WHOLE,
            over={"train.precision": "bf16"},
        ),
        Scale("paper", "the papers' protocols", **_WHOLE),
    )
}


def scale(name: str) -> Scale:
    """Raises FldiagError for an unknown scale."""
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    return SCALES[name]
