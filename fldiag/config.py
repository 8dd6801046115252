"""What a run is: a frozen, validated description, read from TOML plus ``--set`` overrides.

The resolved config (every default filled in) is written into the run; its hash names the run.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Protocol

import pydantic
from pydantic import BaseModel, Field, PrivateAttr, model_validator

from fldiag import identity, minilm, registry, user_code
from fldiag.config_files import kept_initial, read_partition
from fldiag.errors import FldiagError, unknown
from fldiag.sections import (
    DEEPEST,
    LARGEST,
    VOCABULARY,
    CheckpointSection,
    ClientsSection,
    ConfigSection,
    Count,
    DataSection,
    MethodSection,
    MetricsSection,
    ModelSection,
    PartitionSection,
    TrainSection,
    is_too_deep,
)

FLATTER = "keys have the form section.key, and their values are plain or lists"


class Config(ConfigSection):
    """What a run is: validated, complete and frozen.

    Args:
        **sections: the keys and sections of a TOML file; ``fldiag train digits --dry-run`` shows them all, and ``Config.load``
            starts from a preset. What is not given has its default.

    Raises:
        pydantic.ValidationError: a wrong value. (``load`` and ``replace`` raise FldiagError.)

    >>> config = Config.load("digits", method__name="fedprox", rounds=5)
    >>> config.rounds, config.method.options
    (5, {'mu': 1.0})
    >>> config.replace(train__lr=0.1).train.lr
    0.1
    """

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="what the run's folder begins with; decides no number",
    )
    seed: Annotated[int, Field(ge=0, lt=LARGEST)] = Field(
        0, description="of initial weights, sampled clients and minibatches; not of the partition"
    )
    rounds: Count = Field(
        30, description="rounds of training", json_schema_extra={"unit": "rounds"}
    )
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection(kind="lda")
    clients: ClientsSection = ClientsSection()
    model: ModelSection = ModelSection()
    method: MethodSection = MethodSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
    #: The user code that may be imported for it. None: all that it names, because the user wrote it.
    _consent: frozenset[str] | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, values: Any) -> Any:
        """Fill and check the options of the named method and model from their signatures."""
        if not isinstance(values, Mapping):
            return values
        if is_too_deep(values):
            raise ValueError(f"nested more than {DEEPEST} levels deep; {FLATTER}")
        values = dict(values)
        for section, entries, default in (
            ("method", registry.method, "fedavg"),
            ("model", registry.model, "small_cnn"),
        ):
            tree = values.get(section, {})
            if isinstance(tree, BaseModel):
                tree = tree.model_dump()
            if not isinstance(tree, Mapping):
                continue
            name = str(tree.get("name", default))
            if ":" in name:
                continue  # a user's own function: whoever may import it checks its options
            entry, options = entries.get(name), {k: v for k, v in tree.items() if k != "name"}
            if section == "model":
                options = _with_vocabulary(values, entry, options)
            values[section] = {"name": name, **entry.validate(options)}
            if section == "method":
                _shape_model(values)
        return values

    @model_validator(mode="after")
    def _check_clients(self) -> Config:
        ids = self.checkpoint.clients
        if isinstance(ids, tuple) and not all(0 <= i < self.clients.total for i in ids):
            raise ValueError(
                f"checkpoint.clients = {list(ids)} names clients outside 0..{self.clients.total - 1}; correct it"
            )
        return self

    @model_validator(mode="after")
    def _check_tokenizer(self) -> Config:
        if self.model.name == "minilm" and self.data.tokenizer != "minilm":
            raise ValueError(
                "model.name = 'minilm' knows its own word pieces only; set data.tokenizer = 'minilm'"
            )
        return self

    @property
    def hash(self) -> str:
        """16 hex digits over everything that decides the bits of the run and its tables: not its name, where the data lies,
        or what its checkpoints hold."""
        return self.fingerprint()

    @property
    def method_version(self) -> int:
        """Of the method's formulas, as this fldiag has them; 1 where the later ones train as the first did, and of a user's own
        method."""
        if ":" in self.method.name:
            return 1
        meta = registry.method.get(self.method.name).meta
        same = meta.get("unchanged")
        if same and all(
            getattr(getattr(self, section), key) == value
            for section, key, value in (
                (*dotted.split("."), value) for dotted, value in same.items()
            )
        ):
            return 1
        return int(meta.get("version", 1))

    def fingerprint(self, *, version: int | None = None, checkpoint: bool = False) -> str:
        """``hash``, for another version of the method's formulas, or including what the checkpoints hold (as fldiag 0.1.0
        wrote it into run.json)."""
        tree = self.model_dump(mode="json", exclude={"name"})
        for section, key in identity.PLACES:
            tree[section].pop(key)
        if not self.metrics.steps:  # the hash from before anything could be recorded
            del tree["metrics"]
        return identity.fingerprint(
            tree, version=self.method_version if version is None else version, checkpoint=checkpoint
        )

    @classmethod
    def from_stored(cls, tree: Mapping[str, Any], allow_code: Iterable[str] = ()) -> Config:
        """A config as a run stored it, which may be older than some keys. Of the code that it names only ``allow_code`` may be
        imported. Raises pydantic.ValidationError."""
        config = cls.model_validate(identity.as_stored(tree))
        if config.code:
            config._consent = frozenset(allow_code)
        return config

    @property
    def code(self) -> dict[str, str]:
        """Dotted key -> ``pkg.mod:name`` of all user code that it names."""
        return user_code.names(self.model_dump())

    @property
    def allowed_code(self) -> frozenset[str]:
        """The user code that may be imported for it."""
        return frozenset(self.code.values()) if self._consent is None else self._consent

    def allow(self, code: str | Iterable[str]) -> Config:
        """A copy for which this user code may be imported too. Raises FldiagError for what is not ``pkg.mod:name``."""
        config, allowed = self.model_copy(), user_code.consent(code)
        if config._consent is not None:
            config._consent |= allowed
        return config

    def __repr__(self) -> str:
        return (
            f"Config({self.name!r}, {self.method.name} on {self.data.name}, {self.model.name}, {self.clients.per_round} of "
            f"{self.clients.total} clients, {self.rounds} rounds, seed {self.seed})"
        )

    @classmethod
    def load(cls, source: str | Path, **overrides: Any) -> Config:
        """A config from a preset's name or a TOML file.

        Args:
            source: ``fldiag.catalogue("presets")`` names the presets.
            **overrides: keys to replace, as in ``replace``.

        Returns:
            The config.

        Raises:
            FldiagError: an unknown preset, an unreadable file or anything invalid in it.
        """
        return load(source, _dotted(overrides))

    @classmethod
    def like(cls, run: StoredRun, **overrides: Any) -> Config:
        """A config with data, partition, model and settings of a run, to compare another method with it.

        Args:
            run: what ``fldiag.load`` returns for the folder of a run that fldiag trained or recorded. Of a recorded one the
                clients are those of its partition, training starts from the weights that its first clients received, where
                it holds them, and what it does not say (learning rate, epochs, minibatches, ...) has its default.
            **overrides: keys to replace, as in ``replace``. Code that the run names is imported only if it is named here again.

        Returns:
            The config.

        Raises:
            FldiagError: the run does not say which data, partition or model it has, and ``overrides`` do not either; and as
                ``replace``.

        >>> import tempfile, fldiag
        >>> start = Config.load("digits", rounds=1, model__name="mlp", clients__per_round=2, train__epochs=1)
        >>> run = fldiag.train(start, out=f"{tempfile.mkdtemp()}/fedavg")
        >>> other = Config.like(run, method__name="fedprox")
        >>> other.method.name, other.data == start.data, other.train == start.train
        ('fedprox', True, True)
        """
        return like(run, _dotted(overrides))[0]

    def replace(self, **overrides: Any) -> Config:
        """A validated copy with keys replaced.

        Args:
            **overrides: ``rounds=5``; ``method__rho=2.0`` stands for ``method.rho``.

        Returns:
            The copy.

        Raises:
            FldiagError: an unknown key or a wrong value.
        """
        config = build(self.model_dump(), _dotted(overrides))
        if self._consent is not None and config.code:
            config._consent = self._consent.union(user_code.names(overrides).values())
        return config


def _dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in keys.items()}


def _with_vocabulary(
    values: Mapping[str, Any], model: registry.Entry, options: dict[str, Any]
) -> dict[str, Any]:
    """A model of texts knows as many tokens as the tokenizer has, where nobody says otherwise."""
    data = values.get("data", {})
    if isinstance(data, BaseModel):
        data = data.model_dump()
    if "vocabulary" not in model.options.model_fields or not isinstance(data, Mapping):
        return options
    size = minilm.PIECES if data.get("tokenizer") else data.get("vocabulary") or VOCABULARY
    return {"vocabulary": size, **options}


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
                models = [
                    n
                    for n in registry.model.names()
                    if key in registry.model.get(n).options.model_fields
                ]
                raise FldiagError(
                    f"method {method['name']!r} needs a model with the option {key!r}, and {name!r} has none",
                    f"set model.name to one of {', '.join(models)}",
                    usage=True,
                )
    values["model"] = {**model, **{key: method[key] for key in shared}}


#: Of a section whose other keys depend on what is chosen, the key that chooses.
MAIN_KEYS = {"method": "name", "model": "name", "partition": "kind"}


def build(tree: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """A validated config from nested tables and dotted overrides.

    Changing ``method.name`` (or ``model.name``, ``partition.kind``) by an override drops the options that
    belonged to the former one. Raises FldiagError.
    """
    tree = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    overrides = dict(overrides or {})
    for section, key in MAIN_KEYS.items():
        new = overrides.get(f"{section}.{key}")
        old = tree.get(section)
        if new is not None and isinstance(old, dict) and old.get(key) != new:
            if (
                section == "method"
                and isinstance(model := tree.get("model"), dict)
                and str(old.get(key)) in registry.method
            ):
                for option in registry.method.get(str(old.get(key))).meta["model"]:
                    model.pop(option, None)
            tree[section] = {k: v for k, v in old.items() if section == "partition" and k == "seed"}
    for section, key, digest in (
        ("partition", "path", "digest"),
        ("train", "initial", "initial_digest"),
    ):
        if f"{section}.{key}" in overrides and isinstance(tree.get(section), dict):
            tree[section].pop(digest, None)  # of another file
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        if not key:
            tree[section] = value
        elif "." in key:
            raise FldiagError(
                f"key {dotted!r} is nested too deeply", "keys have the form section.key", usage=True
            )
        else:
            inner = tree.setdefault(section, {})
            if not isinstance(inner, dict):
                raise FldiagError(
                    f"{section!r} is not a section, so {dotted!r} cannot be set",
                    f"set {section}.{MAIN_KEYS[section]}={inner}"
                    if section in MAIN_KEYS
                    else f"leave out {dotted}",
                    usage=True,
                )
            inner[key] = value
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        raise registry.explain(error, "config", Config) from None


def parse_override(text: str) -> tuple[str, Any]:
    """``"method.rho=2.0"`` -> ("method.rho", 2.0). The value is read as TOML, else as a bare string."""
    key, eq, value = text.partition("=")
    if not eq or not key.strip():
        raise FldiagError(
            f"--set {text!r} is not of the form key=value",
            "write for example --set method.rho=2.0",
            usage=True,
        )
    try:
        return key.strip(), tomllib.loads(f"v = {value.strip()}")["v"]
    except RecursionError:
        raise FldiagError(f"--set {key.strip()}: nested too deeply", FLATTER, usage=True) from None
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


@cache
def preset_texts() -> Mapping[str, str]:
    """Name -> text of every preset; figures ask hundreds of times."""
    files = sorted(resources.files("fldiag.presets").iterdir(), key=lambda f: f.name)
    return MappingProxyType(
        {f.name[:-5]: f.read_text("utf-8") for f in files if f.name.endswith(".toml")}
    )


def presets() -> dict[str, str]:
    """Name -> first comment line of every preset."""
    return {name: text.split("\n", 1)[0].lstrip("# ") for name, text in preset_texts().items()}


def load(source: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """A config from a preset name or a TOML file, with overrides: ``key=value`` each, or dotted key -> value.

    Besides the sections of a config the file may say what single methods get, where no override says otherwise:
    ``[options.METHOD]``, values of that method's own options; and ``[needs.public.SECTION]`` and ``[needs.stages.SECTION]``,
    keys for all methods that need unlabelled public inputs, or a model that shows its stages.

    Raises FldiagError for an unknown preset, an unreadable file or anything invalid in it.
    """
    if not isinstance(overrides, Mapping):
        overrides = dict(parse_override(text) for text in overrides)
    tree = _read(source)
    return build(tree, {**_for_method(tree, overrides), **overrides})


#: Keys of ``train`` that a recorded loop does not tell: ``like`` says which of their defaults it takes.
RECIPE = (
    "epochs",
    "batch_size",
    "optimizer",
    "lr",
    "lr_decay",
    "momentum",
    "weight_decay",
    "aggregate",
)


class StoredRun(Protocol):
    """What ``like`` reads of a ``fldiag.Run``."""

    path: Path
    about: dict[str, Any]
    files: dict[str, str]
    allow_code: frozenset[str]

    @property
    def config(self) -> Config: ...
    @property
    def origin(self) -> dict[str, Any]: ...


def like(run: StoredRun, overrides: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """``Config.like``, and in sentences what was taken from the run and what was not."""
    if not hasattr(run, "origin"):
        raise FldiagError(
            f"a {type(run).__name__} is no run",
            "give a run, such as fldiag.load('runs/mine')",
            usage=True,
        )
    tree = _recorded(run, overrides) if run.origin else _trained(run)
    config = build(tree, overrides)
    if config.code:
        config._consent = run.allow_code.union(user_code.names(dict(overrides)).values())
    if not run.origin:
        return config, [f"data, partition, model and settings of {run.path}"]
    defaults = {
        f"train.{key}": value
        for key, value in config.train.model_dump().items()
        if value and key in RECIPE and f"train.{key}" not in overrides
    }
    if config.train.initial is None:
        initial = "drawn by the seed"
    else:
        initial = f"those that the clients of {run.path} received first ({config.train.initial})"
    remarks = [
        f"like {run.path}: data {config.data.name}, model {config.model.name}, {config.clients.total} clients with "
        f"their examples, {config.rounds} rounds, seed {config.seed}",
        f"initial weights: {initial}",
        f"{config.clients.per_round} clients a round, drawn by the seed; method {config.method.name}",
    ]
    if defaults:
        listing = ", ".join(f"{key} = {value}" for key, value in defaults.items())
        remarks.append(f"not recorded, so by default: {listing}")
    return config, remarks


def _trained(run: StoredRun) -> dict[str, Any]:
    """The config of a run of fldiag; files that it named are read from its folder."""
    tree = run.config.model_dump()
    if run.config.partition.kind == "file":
        tree["partition"]["path"] = str(run.path)
    if run.config.train.initial is not None:
        tree["train"]["initial"] = str(run.path / kept_initial(run.config.train.initial))
    return tree


def _recorded(run: StoredRun, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorded run says of a config."""
    recording, files = run.about["config"], run.files
    for key, section, remedy in (
        ("data.name", "data", "digits | npz:PATH | csv:PATH | pkg.mod:loader"),
        ("model.name", "model", "pkg.mod:factory, or a name of fldiag list models"),
    ):
        if key not in overrides and not recording.get(section, {}).get("name"):
            raise FldiagError(
                f"{run.path} was recorded without a name of its {section}",
                f"name it: --set {key}=... ({remedy})",
                usage=True,
            )
    data = {k: v for k, v in recording.get("data", {}).items() if v is not None}
    if data.get("name") == "npz:data.npz" and "data.npz" in files:
        data["name"] = f"npz:{run.path / 'data.npz'}"
    tree: dict[str, Any] = {
        "name": re.sub("[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+", "", str(recording["name"])) or "run",
        "seed": int(recording.get("seed") or 0),
        "rounds": max(1, int(recording.get("rounds") or 1)),
        "data": data,
        "model": dict(recording.get("model", {})),
        "train": {},
    }
    for start in {"rounds/0000.safetensors"}.intersection(files):
        tree["train"]["initial"] = str(run.path / start)
    if "partition.kind" not in overrides:
        if "partition.npz" not in files:
            raise FldiagError(
                f"{run.path} does not say which examples belong to which client",
                "record it with clients=, or say it: --set partition.kind=file --set partition.path=FILE",
                usage=True,
            )
        tree["partition"] = {"kind": "file", "path": str(run.path)}
        total = len(read_partition(run.path))
    else:
        total = max(1, int(recording["clients"]["total"]))
    per_round = int(recording["clients"].get("per_round") or total)
    tree["clients"] = {"total": total, "per_round": min(total, per_round)}
    return tree


def check_config(config: Any) -> Config:
    """Raises FldiagError for what is no config."""
    if not isinstance(config, Config):
        raise FldiagError(
            f"config is a {type(config).__name__}",
            "give a Config, such as Config.load('digits')",
            usage=True,
        )
    return config


def _for_method(tree: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys that the file has for the method that will train; takes their tables out of the tree."""
    needs, options = tree.pop("needs", {}), tree.pop("options", {})
    if not needs and not options:
        return {}
    if extra := set(needs) - set(registry.NEEDS):
        raise FldiagError(
            f"[needs.{min(extra)}] is nothing that a method can need",
            f"write one of {', '.join(registry.NEEDS)}",
            usage=True,
        )
    for name in (n for n in options if ":" not in n):
        registry.method.get(name)  # a misspelt method is refused, whichever trains
    name = str(overrides.get("method.name", tree.get("method", {}).get("name", "fedavg")))
    is_registered = ":" not in name  # a user's own method says itself what it lacks
    keys = {
        f"{section}.{key}": value
        for need in (registry.method.get(name).meta["needs"] if is_registered else ())
        for section, table in needs.get(need, {}).items()
        for key, value in table.items()
    }
    return keys | {f"method.{key}": value for key, value in options.get(name, {}).items()}


def _read(source: str | Path) -> dict[str, Any]:
    text = str(source)
    name = text.removeprefix("presets/").removesuffix(".toml")
    if os.path.isfile(text):
        try:
            content = Path(text).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise FldiagError(
                f"{text} is not readable text ({type(error).__name__})",
                "give a TOML file",
                usage=True,
            ) from None
    elif name in preset_texts():
        content = preset_texts()[name]
    elif text.endswith(".toml"):
        raise FldiagError(
            f"config file {text!r} is not there",
            "give a TOML file or one of the presets: " + ", ".join(presets()),
            usage=True,
        )
    else:
        raise unknown("preset", text, presets())
    try:
        return tomllib.loads(content)
    except RecursionError:
        raise FldiagError(f"{text}: nested too deeply", FLATTER, usage=True) from None
    except tomllib.TOMLDecodeError as error:
        raise FldiagError(
            f"{text}: not valid TOML: {error}", "correct the line named above", usage=True
        ) from None
