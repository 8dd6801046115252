"""What a run is: a frozen, validated description, read from TOML plus ``--set`` overrides.

The resolved config (every default filled in) is written into the run; its hash names the run.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fldiag import identity, registry
from fldiag.errors import FldiagError, unknown

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OpenSection(Section):
    """A section whose further keys are the options of a registered thing (method, model, partition)."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Data(Section):
    name: str = "digits"
    root: str | None = Field(None, description="folder that holds the data; default $FLDIAG_DATA")
    augment: bool = Field(True, description="training augmentation of the data set, if it declares any")
    variant: str | None = Field(None, description="whose normalisation and augmentation, where papers differ")
    public: str | None = Field(None, description="unlabelled data for distillation on the server: a data set, or holdout:N "
                               "(N training examples that no client gets)")
    public_size: Count | None = Field(None, description="use so many public examples (default: all)")


class Partition(Section):
    kind: Literal["lda", "sharding", "dirichlet", "pathological", "iid"] = "lda"
    alpha: Positive | None = Field(None, description="Dirichlet concentration (lda, dirichlet)")
    shards: Count | None = Field(None, description="shards per client (sharding)")
    classes: Count | None = Field(None, description="classes per client (pathological)")
    min_size: Annotated[int, Field(ge=1)] | None = Field(None, description="smallest client allowed (lda)")
    seed: int = Field(0, description="seed of the partition, apart from the training seed")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """The option the kind needs gets its default; an option of another kind is refused."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        needs = PARTITION_OPTIONS.get(values.get("kind", "lda"), {})
        for key in ("alpha", "shards", "classes", "min_size"):
            if values.get(key) is None and key in needs:
                values[key] = needs[key]
            elif values.get(key) is not None and key not in needs:
                raise ValueError(f"{key} has no meaning for kind = {values.get('kind', 'lda')!r}; remove it")
        return values

    @property
    def options(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in PARTITION_OPTIONS[self.kind]}


PARTITION_OPTIONS: dict[str, dict[str, Any]] = {
    "lda": {"alpha": 0.1, "min_size": 10},
    "sharding": {"shards": 2},
    "dirichlet": {"alpha": 0.1},
    "pathological": {"classes": 3},
    "iid": {},
}


class Clients(Section):
    total: Count = 20
    per_round: Count = 10
    sampling: Literal["fixed", "independent"] = Field(
        "fixed", description="per_round clients a round, or each client joins with probability per_round / total")

    @model_validator(mode="after")
    def _fits(self) -> Clients:
        if self.per_round > self.total:
            raise ValueError(f"per_round = {self.per_round} is more than total = {self.total}; lower it")
        return self


class Model(OpenSection):
    name: str = "small_cnn"


class Method(OpenSection):
    name: str = "fedavg"


class Train(Section):
    epochs: Annotated[int, Field(ge=0)] = 5
    batch_size: Count = 50
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.01
    lr_decay: Positive = Field(0.99, description="lr in round t is lr * lr_decay ** t")
    local_decay: Positive = Field(1.0, description="factor of the lr in a client's later local epochs, in every round anew")
    local_decay_after: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="share of the local epochs, in whole epochs, after which local_decay applies")
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NonNegative = 1e-5
    clip: Positive | None = Field(None, description="largest norm of the (corrected) gradient")
    clip_before_quadratic: bool = Field(False, description="the gradient of a quadratic penalty joins after clipping")
    drop_last: bool = Field(False, description="leave out an epoch's last minibatch when it is short")
    keep_momentum: bool = Field(False, description="a client's own momentum survives from round to round (released code of "
                                "FedAlign hands one buffer from client to client of a worker instead)")
    aggregate: Literal["n", "uniform", "batches"] = Field(
        "n", description="clients' weights: by examples, equal, or by the number of full minibatches")
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    stack: Literal["auto", "on", "off"] = Field("auto", description="train several clients as one stack")

    @model_validator(mode="after")
    def _momentum(self) -> Train:
        for key in ("nesterov", "keep_momentum"):
            if getattr(self, key) and not (self.momentum and self.optimizer == "sgd"):
                raise ValueError(f"{key} needs momentum; set train.momentum > 0 with train.optimizer = 'sgd'")
        return self

    @model_validator(mode="after")
    def _local_decay(self) -> Train:
        if self.local_decay == 1:
            if self.local_decay_after != Train.model_fields["local_decay_after"].default:
                raise ValueError("local_decay_after says when local_decay applies, and that is 1; set train.local_decay too")
        elif not self.epochs_before_decay:
            raise ValueError(f"no whole epoch lies before local_decay_after = {self.local_decay_after:g} of epochs = "
                             f"{self.epochs}; raise one of them, or set train.local_decay = 1")
        return self

    @property
    def epochs_before_decay(self) -> int:
        """Whole local epochs before ``local_decay`` applies; half of them (the default) is epochs // 2."""
        return int(self.epochs * self.local_decay_after + 1e-9)  # 0.29 * 100 is a little below 29


class Checkpoint(Section):
    every: Count = Field(1, description="write a checkpoint every this many rounds (and after the last)")
    keep: Annotated[int, Field(ge=0)] = Field(0, description="keep those of the last so many rounds, too (0: none): every round "
                                              "is then written, and a stopped run loses none")
    clients: Literal["none", "sampled", "all"] | tuple[int, ...] = Field(
        "none", description="whose trained weights the checkpoint holds besides the global ones: those sampled, all, or "
        "these ids (clients that were not sampled are then trained too, for the record only)")


class Metrics(Section):
    """What is recorded of every local step besides the numbers of a round; ``Run.steps`` describes the tables. Training
    itself is not changed by a bit."""

    steps: bool = Field(False, description="record loss, norms, cosines and strengths of every local step")
    every: Count = Field(1, description="record the steps of every this many rounds (and of the last)")
    proximal: Literal["own", "kl", "l2"] = Field(
        "own", description="which proximal loss: what the method itself computes of its own, if it has one (FedSOL with "
        "part = head: its cosine over the head only); or kl or l2 for any method, so that runs can be compared: kl costs "
        "one more forward and backward pass a step, l2 next to nothing")
    tau: Positive = Field(3.0, description="temperature of proximal = kl")

    @model_validator(mode="after")
    def _needs_steps(self) -> Metrics:
        if not self.steps and self != Metrics.model_construct():
            raise ValueError("every, proximal and tau say how steps are recorded, and they are not; set metrics.steps = true")
        return self

    def of_round(self, t: int, rounds: int) -> bool:
        """Whether the steps of round t (from 1) are recorded."""
        return self.steps and (t % self.every == 0 or t == rounds)


class Config(Section):
    """A run. Unknown keys are refused with the nearest known one."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Count = 30
    data: Data = Data()
    partition: Partition = Partition(kind="lda")
    clients: Clients = Clients()
    model: Model = Model()
    method: Method = Method()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, values: Any) -> Any:
        """Fill and check the options of the named method and model from their signatures."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        for section, kind in (("method", registry.method), ("model", registry.model)):
            default = "fedavg" if section == "method" else "small_cnn"
            given = values.get(section, {})
            if isinstance(given, BaseModel):
                given = given.model_dump()
            if not isinstance(given, Mapping):
                continue
            name = given.get("name", default)
            if section == "model" and ":" in str(name):  # a user's own factory: its options are its own business
                continue
            options = kind.get(str(name)).validate({k: v for k, v in given.items() if k != "name"})
            values[section] = {"name": name, **options}
            if section == "method":
                _shape_model(values)
        return values

    @model_validator(mode="after")
    def _ids(self) -> Config:
        keep = self.checkpoint.clients
        if isinstance(keep, tuple) and not all(0 <= i < self.clients.total for i in keep):
            raise ValueError(f"checkpoint.clients = {list(keep)} names clients outside 0..{self.clients.total - 1}; mend it")
        return self

    @property
    def hash(self) -> str:
        """16 hex digits over everything that decides the bits of the run and its tables: not its name, where the data lies,
        or what its checkpoints hold."""
        return self.fingerprint()

    @property
    def method_version(self) -> int:
        """Of the method's formulas, as this fldiag has them."""
        return int(registry.method.get(self.method.name).meta.get("version", 1))

    def fingerprint(self, *, version: int | None = None, checkpoint: bool = False) -> str:
        """``hash``, for another version of the method's formulas, or including what the checkpoints hold (as fldiag 0.1.0
        wrote it into run.json)."""
        tree = self.model_dump(mode="json", exclude={"name": True, "data": {"root"}})
        if not self.metrics.steps:  # runs that record nothing keep the hash they had before anything could be recorded
            del tree["metrics"]
        return identity.fingerprint(tree, version=self.method_version if version is None else version, checkpoint=checkpoint)

    @classmethod
    def stored(cls, tree: Mapping[str, Any]) -> Config:
        """A config as a run stored it, which may be older than some keys. Raises pydantic.ValidationError."""
        return cls.model_validate(identity.as_stored(tree))

    def __repr__(self) -> str:
        return (f"Config({self.name!r}, {self.method.name} on {self.data.name}, {self.model.name}, {self.clients.per_round} of "
                f"{self.clients.total} clients, {self.rounds} rounds, seed {self.seed})")

    @classmethod
    def load(cls, source: str | Path, **overrides: Any) -> Config:
        """A config from a preset's name or a TOML file, with keys replaced as by ``replace``.

        Raises FldiagError for an unknown preset, an unreadable file or anything invalid in it.
        """
        return load(source).replace(**overrides)

    def replace(self, **overrides: Any) -> Config:
        """A validated copy with keys replaced; ``method__rho=2.0`` stands for ``method.rho``. Raises FldiagError."""
        return build(self.model_dump(), {k.replace("__", "."): v for k, v in overrides.items()})


def _shape_model(values: dict[str, Any]) -> None:
    """Hand options of a method that live in the model (stochastic depth) to the model, where a checkpoint finds them."""
    method = values["method"]
    shared = registry.method.get(method["name"]).meta["model"]
    model = values.get("model", {})
    if not shared or not isinstance(model, Mapping | BaseModel):
        return
    model = dict(model.model_dump() if isinstance(model, BaseModel) else model)
    name = model.setdefault("name", "small_cnn")
    if ":" not in name:
        for key in shared:
            if key not in registry.model.get(name).options.model_fields:
                able = [n for n in registry.model.names() if key in registry.model.get(n).options.model_fields]
                raise FldiagError(f"method {method['name']!r} needs a model with the option {key!r}, and {name!r} has none",
                                  f"set model.name to one of {', '.join(able)}", usage=True)
    values["model"] = {**model, **{key: method[key] for key in shared}}


def build(tree: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """A validated config from nested tables and dotted overrides.

    Changing ``method.name`` (or ``model.name``, ``partition.kind``) by an override drops the options that
    belonged to the former one. Raises FldiagError.
    """
    tree = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    overrides = dict(overrides or {})
    for section, key in (("method", "name"), ("model", "name"), ("partition", "kind")):
        new = overrides.get(f"{section}.{key}")
        old = tree.get(section)
        if new is not None and isinstance(old, dict) and old.get(key) != new:
            if section == "method" and isinstance(model := tree.get("model"), dict) and str(old.get(key)) in registry.method:
                for option in registry.method.get(str(old.get(key))).meta["model"]:
                    model.pop(option, None)
            tree[section] = {k: v for k, v in old.items() if section == "partition" and k == "seed"}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        if not key:
            tree[section] = value
        elif "." in key:
            raise FldiagError(f"key {dotted!r} is nested too deeply", "keys have the form section.key", usage=True)
        else:
            inner = tree.setdefault(section, {})
            if not isinstance(inner, dict):
                raise FldiagError(f"{section!r} is not a section, so {dotted!r} cannot be set",
                                  f"set {section} itself", usage=True)
            inner[key] = value
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        raise registry.explain(error, "config", Config) from None


def parse_override(text: str) -> tuple[str, Any]:
    """``"method.rho=2.0"`` -> ("method.rho", 2.0). The value is read as TOML, else as a bare string."""
    key, eq, value = text.partition("=")
    if not eq or not key.strip():
        raise FldiagError(f"--set {text!r} has no key=value form", "write for example --set method.rho=2.0", usage=True)
    try:
        return key.strip(), tomllib.loads(f"v = {value.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


@cache
def _presets() -> Mapping[str, str]:
    """Name -> text of every preset; figures ask hundreds of times."""
    files = sorted(resources.files("fldiag.presets").iterdir(), key=lambda f: f.name)
    return MappingProxyType({f.name[:-5]: f.read_text() for f in files if f.name.endswith(".toml")})


def presets() -> dict[str, str]:
    """Name -> first comment line of every preset."""
    return {name: text.split("\n", 1)[0].lstrip("# ") for name, text in _presets().items()}


def load(source: str | Path, overrides: Iterable[str] = ()) -> Config:
    """A config from a preset name or a TOML file, with ``key=value`` overrides.

    Raises FldiagError for an unknown preset, an unreadable file or anything invalid in it.
    """
    text = str(source)
    name = text.removeprefix("presets/").removesuffix(".toml")
    if os.path.isfile(text):
        try:
            content = Path(text).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise FldiagError(f"{text} is no text that can be read ({type(error).__name__})", "give a TOML file",
                              usage=True) from None
    elif name in _presets():
        content = _presets()[name]
    elif text.endswith(".toml"):
        raise FldiagError(f"config file {text!r} is not there", "give a TOML file or one of the presets: "
                          + ", ".join(presets()), usage=True)
    else:
        raise unknown("preset", text, presets())
    try:
        tree = tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FldiagError(f"{text}: not valid TOML: {error}", "mend the line named", usage=True) from None
    return build(tree, dict(parse_override(o) for o in overrides))
