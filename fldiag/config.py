"""What a run is: a frozen, validated description, read from TOML plus ``--set`` overrides.

The resolved config (every default filled in) is written into the run; its hash names the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, Field, model_validator

from fldiag import registry
from fldiag.errors import FldiagError, unknown
from fldiag.sections import (
    LARGEST,
    PARTITION_OPTIONS,
    PIECES,
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
)

#: Of a section whose other keys depend on what is chosen, the key that chooses.
MAIN_KEYS = {"method": "name", "model": "name", "partition": "kind"}
#: What decides no number: the name, where data lie, and what the checkpoints hold.
NEUTRAL: Any = {"name": True, "checkpoint": True, "data": {"root"}}
#: Sections in which runs may differ that are compared as one.
NO_RECIPE = ("name", "checkpoint", "seed", "metrics")


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
    rounds: Count = Field(30, description="rounds of training")
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection(kind="lda")
    clients: ClientsSection = ClientsSection()
    model: ModelSection = ModelSection()
    method: MethodSection = MethodSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()

    def __new__(cls, **sections: Any) -> Config:
        # what the user writes comes here with its sections; what is validated, such as a stored config, without
        registry.allow(sections)
        return super().__new__(cls)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, tree: Any) -> Any:
        """Fill and check the options of the named method and model from their signatures."""
        tree = {k: dict(v) if isinstance(v, (Mapping, BaseModel)) else v for k, v in tree.items()}
        if not all(isinstance(tree.get(name, {}), dict) for name in ("method", "model")):
            return tree  # which the sections refuse
        method, model = dict(tree.get("method", {})), dict(tree.get("model", {}))
        rule, network = method.pop("name", "fedavg"), model.pop("name", "small_cnn")
        if not registry.is_code(rule):
            entry = registry.method.get(str(rule))
            method = entry.validate(method)
            # options of the method that live in the model, such as stochastic depth
            model |= {key: method[key] for key in entry.meta["model"]}
        if not registry.is_code(network):
            entry, data = registry.model.get(str(network)), dict(tree.get("data", {}))
            if "vocabulary" in entry.options.model_fields:
                size = PIECES if data.get("tokenizer") else data.get("vocabulary")
                model.setdefault("vocabulary", size or VOCABULARY)
            if network == "minilm" and data.get("tokenizer") != "minilm":
                raise ValueError(
                    "minilm knows its own word pieces only; set data.tokenizer = 'minilm'"
                )
            model = entry.validate(model)
        return {**tree, "method": {"name": rule, **method}, "model": {"name": network, **model}}

    @property
    def hash(self) -> str:
        """16 hex digits over everything that decides the bits of the run and differs from its default."""
        tree = self.model_dump(mode="json", exclude_defaults=True, exclude=NEUTRAL)
        for section, entries in (("method", registry.method), ("model", registry.model)):
            name, own = getattr(self, section).name, tree.get(section, {}).items()
            if ":" not in name:
                defaults = entries.get(name).options.model_construct().model_dump(mode="json")
                tree[section] = {"name": name} | {
                    k: v for k, v in own if (k, v) not in defaults.items()
                }
        tree = {key: value for key, value in tree.items() if value != {}}
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, source: str | Path, **overrides: Any) -> Config:
        """A config from a preset's name or a TOML file.

        Besides the sections of a config the file may say what single methods get, where no override says otherwise:
        ``[options.METHOD]``, values of that method's own options; and ``[needs.public.SECTION]`` and ``[needs.stages.SECTION]``,
        keys for all methods that need unlabelled public inputs, or a model that shows its stages.

        Args:
            source: ``fldiag.catalogue("presets")`` names the presets.
            **overrides: keys to replace, as in ``replace``.

        Returns:
            The config.

        Raises:
            FldiagError: an unknown preset, an unreadable file or anything invalid in it.
        """
        tree = _read(source)
        registry.allow(tree)
        needs, options = tree.pop("needs", {}), tree.pop("options", {})
        overrides = _dotted(overrides)
        name = str(overrides.get("method.name", tree.get("method", {}).get("name", "fedavg")))
        keys = {f"method.{key}": value for key, value in options.get(name, {}).items()}
        for need in registry.method.get(name).meta["needs"] if ":" not in name else ():
            for section, table in needs.get(need, {}).items():
                keys |= {f"{section}.{key}": value for key, value in table.items()}
        return build(tree, {**keys, **overrides})

    def replace(self, **overrides: Any) -> Config:
        """A validated copy with keys replaced.

        Args:
            **overrides: ``rounds=5``; ``method__rho=2.0`` stands for ``method.rho``.

        Returns:
            The copy.

        Raises:
            FldiagError: an unknown key or a wrong value.
        """
        return build(self.model_dump(), _dotted(overrides))

    @property
    def method_version(self) -> int:
        """Of the method's formulas, as this fldiag has them; 1 of a user's own method."""
        name = self.method.name
        return 1 if ":" in name else int(registry.method.get(name).meta["version"])


def _dotted(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in overrides.items()}


def settings() -> dict[str, Any]:
    """Every key of a config -> its pydantic field."""
    fields: dict[str, Any] = {}
    for name, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        fields |= {name: field} if inner is None else {f"{name}.{k}": f for k, f in inner.items()}
    return fields


def build(tree: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """A validated config from nested tables and dotted overrides.

    Changing ``method.name`` (or ``model.name``, ``partition.kind``) by an override drops the options that belonged to the former
    one. Code that the overrides name may be imported: they are the user's.

    Raises:
        FldiagError: the first complaint, with the nearest key that there is.
    """
    sections = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    overrides = dict(overrides or {})
    registry.allow(overrides)
    for section, key in MAIN_KEYS.items():
        name, old = overrides.get(f"{section}.{key}"), sections.get(section, {})
        if name is not None and name != old.get(key):
            if section == "method":
                _drop_method(sections)
            sections[section] = {
                k: v for k, v in old.items() if (section, k) == ("partition", "seed")
            }
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        table = sections.get(section)
        table = table if isinstance(table, dict) else {}
        sections[section] = {**table, key: value} if key else value
    try:
        return Config.model_validate(sections)
    except pydantic.ValidationError as error:
        raise registry.explain(error, "config", {*settings(), *Config.model_fields}) from None


def _drop_method(sections: dict[str, Any]) -> None:
    """Take the method out, and its options that live in the model."""
    old = sections.pop("method", {})
    if old.get("name") in registry.method:
        for option in registry.method.get(old["name"]).meta["model"]:
            sections.get("model", {}).pop(option, None)


def of_run(run: Any, overrides: Mapping[str, Any]) -> Config:
    """A config with the data, model and partition of a trained or recorded run, to train another method in its federation.

    Args:
        run: a ``fldiag.runs.run.Run``.
        overrides: dotted key -> value. Everything else has its default.

    Raises:
        FldiagError: a run that does not say which data or model it has.
    """
    stored, folder = run.about["config"], run.path
    tree = {key: dict(stored.get(key, {})) for key in ("method", "data", "model", "partition")}
    _drop_method(tree)
    if "data.npz" in run.files:
        tree["data"]["name"] = f"npz:{folder / 'data.npz'}"
    for name in ("data", "model"):
        if not tree[name].get("name") and f"{name}.name" not in overrides:
            raise FldiagError(
                f"{folder} was recorded without a name of its {name}",
                f"name it: --set {name}.name=...",
                usage=True,
            )
    if tree["partition"].get("kind", "file") not in PARTITION_OPTIONS.keys() - {"file"}:
        tree["partition"] = {"kind": "file", "path": str(folder / "partition.npz")}
    total = stored["clients"]["total"]
    clients = {"total": total, "per_round": min(total, ClientsSection().per_round)}
    return build({**tree, "clients": clients, "name": folder.name}, overrides)


def recipe(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a stored config but the seed and what leaves the numbers as they are."""
    data = {key: value for key, value in tree.get("data", {}).items() if key != "root"}
    return {k: v for k, v in tree.items() if k not in NO_RECIPE} | {"data": data}


def parse_override(text: str) -> tuple[str, Any]:
    """``"method.rho=2.0"`` -> ("method.rho", 2.0). The value is read as TOML, else as a bare string."""
    key, equals, value = map(str.strip, text.partition("="))
    if not equals:
        raise FldiagError(f"--set {text!r} is not of the form key=value", usage=True)
    try:
        return key, tomllib.loads(f"v = {value}")["v"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return key, value


def _read(source: str | Path) -> dict[str, Any]:
    """A TOML file or, of that name, a preset."""
    texts = registry.preset_texts()
    try:
        text = Path(source).read_text("utf-8") if os.path.isfile(source) else texts[str(source)]
        return tomllib.loads(text)
    except KeyError:
        raise unknown("preset", str(source), texts) from None
    except (OSError, ValueError, RecursionError) as error:
        raise FldiagError(f"{source} is not valid TOML: {error}", usage=True) from None
