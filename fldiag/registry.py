"""Names -> things: methods, models, data sets and diagnostics, built in or from a user's own package.

A registered function's signature is its schema: keyword parameters with type annotations and defaults become a validated, frozen
pydantic model (``Entry.options``), so config files, ``fldiag explain`` and the command line derive from one place. Another
package adds entries through entry points in the groups ``fldiag.methods``, ``fldiag.models``, ``fldiag.datasets`` and
``fldiag.diagnostics``. ``table`` makes the table of a diagnostic.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import pydantic

from fldiag.errors import FldiagError, error_text, nearest, unknown

if TYPE_CHECKING:
    from pandas import DataFrame

#: What is told of long work: done, total, what.
Progress = Callable[[int, int, str], None]
#: What a method may be unable to train without: unlabelled public inputs, or a model that shows its stages.
Need = Literal["public", "stages"]

STRICT = pydantic.ConfigDict(
    extra="forbid",
    frozen=True,
    arbitrary_types_allowed=True,
    allow_inf_nan=False,
    validate_default=True,
    protected_namespaces=(),
)


@dataclass(frozen=True, eq=False)
class Entry:
    """One registered thing. ``arguments``: parameters of ``build`` that the caller supplies, and that are no options."""

    kind: str
    name: str
    build: Callable[..., Any]
    arguments: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.build) or ""

    @property
    def headline(self) -> str:
        """The first line of ``doc``."""
        return self.doc.split("\n", 1)[0]

    @cached_property
    def options(self) -> type[pydantic.BaseModel]:
        signature = inspect.signature(self.build)
        options = {n: p for n, p in signature.parameters.items() if self.is_option(p)}
        # hints of options only: those of the subject may name what is imported when something is measured
        annotations = {n: h for n, h in self.build.__annotations__.items() if n in options}
        annotated = types.SimpleNamespace(__annotations__=annotations)
        hints = typing.get_type_hints(annotated, self.build.__globals__, include_extras=True)
        fields: dict[str, Any] = {
            name: (hints.get(name, Any), ... if option.default is option.empty else option.default)
            for name, option in options.items()
        }
        return pydantic.create_model(f"{self.name}_options", __config__=STRICT, **fields)

    def is_option(self, parameter: inspect.Parameter) -> bool:
        """Whether a parameter of ``build`` is an option."""
        kinds = (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        return parameter.name not in self.arguments and parameter.kind not in kinds

    def validate(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options with defaults filled in.

        Raises FldiagError for an unknown option (with the nearest known one) or a value out of range.
        """
        return dict(parse(self.options, options, f"{self.kind} {self.name!r}"))


Model = TypeVar("Model", bound=pydantic.BaseModel)


def parse(schema: type[Model], values: Mapping[str, Any], subject: str) -> Model:
    """The values as the schema checks and completes them. ``subject``: whose they are, for the FldiagError of a wrong one."""
    try:
        return schema(**values)
    except pydantic.ValidationError as error:
        raise explain(error, subject, schema.model_fields) from None


def explain(error: pydantic.ValidationError, subject: str, keys: Iterable[str]) -> FldiagError:
    """The first complaint of a validation error as one sentence. ``keys``: all that there are, of which the nearest is named."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        in_section = [k for k in keys if k.endswith(f".{key}")]
        remedy = nearest(key, in_section or keys)
        return FldiagError(f"{subject}: unknown key {key!r}", remedy, usage=True)
    value = "" if isinstance(first["input"], Mapping) else f" = {first['input']!r}"
    why = first["msg"].removeprefix("Value error, ")
    return FldiagError(f"{subject}: {key}{value}: {why}", usage=True)


On = Literal["problem", "checkpoints", "run", "clients", "runs"]
Draw = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Diagnostic(Entry):
    """A diagnostic: a function ``build(subject, *, options) -> table``, and what is made of its table.

    - ``on``: its subject. ``problem``: the loss around one set of weights (several checkpoints one after another; see
      ``joint``); ``checkpoints``: a list of Problem; ``run``: a History, all stored rounds of a federation; ``clients``: one
      that has the weights of clients; ``runs``: a list of Run.
    - ``joint``: options -> whether all targets are one subject, a list of Problem: of a plane through three.
    - ``draw``: table -> Figure, or None where there is nothing to draw; or several such functions by the ending of their files'
      names, such as ``{"": curves, "-layers": layers}``. One whose ending has a suffix returns the text or the bytes of a file.
    - ``summary``: (table, options) -> what a person reads first: ``fldiag.results.summary``.
    - ``numbers``: those that runs can be compared by and that a report's first table shows (``fldiag.results.numbers``).
    - ``alarms``: table -> what is wrong with the run, in words, worst first: a report begins with them.
    - ``fails``: table -> whether the verb ends with exit code 3 when ``--strict`` is given.
    - ``example``: what is typed after ``fldiag NAME`` in the help.
    - ``meta["read"]``: which sources were read in part only, and what of them; lists and pages show it.
    """

    on: On = "problem"
    joint: Callable[[Mapping[str, Any]], bool] = lambda options: False
    draw: Draw | Mapping[str, Draw] | None = None
    summary: Callable[..., Any] | None = None
    numbers: tuple[Any, ...] = ()
    alarms: Callable[[Any], Sequence[str]] | None = None
    fails: Callable[[Any], bool] | None = None
    example: str = ""

    @property
    def drawings(self) -> dict[str, Draw]:
        """Drawing functions by the ending of their files' names; the main picture's is empty."""
        if self.draw is None:
            return {}
        return dict(self.draw) if isinstance(self.draw, Mapping) else {"": self.draw}

    def is_option(self, parameter: inspect.Parameter) -> bool:
        return parameter.kind is parameter.KEYWORD_ONLY


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """The entries of one kind: those of fldiag's own packages, and those of other packages, by their entry points.

    ``get`` imports the one entry asked for, if its file has its name or another package brings it. One of another package that
    cannot be imported stops nothing but itself.

    >>> from fldiag import registry
    >>> registry.method.get("fedavg").headline
    'Local SGD, then the weighted mean.'
    """

    def __init__(
        self, kind: str, package: str, entry: Callable[..., E], arguments: tuple[str, ...] = ()
    ):
        self.kind, self.package, self._entry, self.arguments = kind, package, entry, arguments
        self.entries: dict[str, E] = {}  # what is imported so far
        self._is_complete = False

    def __call__(
        self, name: str, **meta: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: register the decorated function.

        Args:
            name: that users write; an entry point of another package has the same.
            **meta: what the entry says besides: of a diagnostic the fields of ``Diagnostic``.
        """

        def register(build: Callable[..., Any]) -> Callable[..., Any]:
            self.entries[name] = self._entry(self.kind, name, build, self.arguments, **meta)
            return build

        return register

    def own(self, name: str, build: Callable[..., Any]) -> E:
        """The entry of a function that the user named ``pkg.mod:function``; it may be decorated, as in a package."""
        same = [entry for entry in self.entries.values() if entry.build is build]
        entry = same[0] if same else self._entry(self.kind, name, build, self.arguments)
        return self.entries.setdefault(name, dataclasses.replace(entry, name=name))

    def _points(self) -> dict[str, EntryPoint]:
        """What other packages bring, by name; nothing is imported."""
        return entry_points(f"fldiag.{self.kind}s")

    def names(self) -> list[str]:
        """All there are, sorted; those of other packages are not imported."""
        self._import("")
        return sorted({*self.entries, *self._points()})

    def get(self, name: str) -> E:
        """Raises FldiagError naming the nearest known entry, or saying why that of another package cannot be imported."""
        if name in self and name not in self.entries:
            load_entry_point(self._points()[name], self.kind)
        if name not in self.entries:
            raise unknown(self.kind, name, self.names())
        return self.entries[name]

    def __contains__(self, name: str) -> bool:
        self._import(name)
        return name in self.entries or name in self._points()

    def _import(self, name: str) -> None:
        """Import the file of fldiag's own that has the entry's name, if there is one; else all of them."""
        if name in self.entries or self._is_complete:
            return
        file = str(name).replace("-", "_")
        if file.isidentifier() and importlib.util.find_spec(f"{self.package}.{file}"):
            importlib.import_module(f"{self.package}.{file}")
        if name not in self.entries:
            path = importlib.import_module(self.package).__path__
            for module in pkgutil.iter_modules(path, f"{self.package}."):
                importlib.import_module(module.name)
            self._is_complete = True


def _plain(
    kind: str, name: str, build: Callable[..., Any], arguments: tuple[str, ...], **meta: Any
) -> Entry:
    return Entry(kind, name, build, arguments, meta)


method = Registry("method", "fldiag.methods", _plain)
model = Registry("model", "fldiag.models", _plain, ("shape", "classes"))
dataset = Registry("dataset", "fldiag.data", _plain, ("root", "download", "progress", "reading"))
diagnostic = Registry("diagnostic", "fldiag.diagnostics", Diagnostic)


def diagnostics() -> list[Diagnostic]:
    """All there are, in the order of a report's sections: alarms, numbers of the first table, weights before runs."""
    return sorted(
        (diagnostic.get(name) for name in diagnostic.names()),
        key=lambda e: (e.alarms is None, not e.numbers, e.on != "problem", e.name),
    )


# -- what other packages bring


def entry_points(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, by name; nothing is imported."""
    return {point.name: point for point in sorted(importlib.metadata.entry_points(group=group))}


def package(point: EntryPoint) -> str:
    """The name of the package that brings it."""
    return point.dist.name if point.dist else point.value


def load_entry_point(point: EntryPoint, kind: str) -> Any:
    """What an entry point names. Raises FldiagError, whatever its import raised."""
    try:
        return point.load()
    except (Exception, SystemExit) as cause:  # somebody else's module can raise anything
        raise FldiagError(
            f"the {kind} {point.name!r} of the package {package(point)} cannot be used ({error_text(cause)})",
            "fix or remove that package",
        ) from cause


def table(rows: Iterable[Mapping[str, Any]], **common: Any) -> DataFrame:
    """The tidy table of a diagnostic: one row a number.

    Args:
        rows: each with ``metric`` and ``value``, and what else a number says of itself: ``round``, ``client``, ``slice``,
            ``unit``, ``stderr``, ...; further columns are the diagnostic's own.
        **common: what all rows have, such as ``**problem.common``.

    Returns:
        The columns of every table first, with their types.

    >>> table([{"metric": "roughness", "value": 1.5}], run="mine")[["run", "metric", "value"]].values.tolist()
    [['mine', 'roughness', 1.5]]
    """
    from fldiag.results import table as tables  # pandas: only when something is measured

    return tables.table(rows, **common)
