"""Names -> things: methods, models, data sets and diagnostics, built in or from a user's own package.

A registered function's signature is its schema: keyword parameters with type annotations and defaults become a validated, frozen
pydantic model (``Entry.options``), so config files, ``fldiag explain`` and the command line derive from one place. Another
package adds entries through entry points in the groups ``fldiag.methods``, ``fldiag.models``, ``fldiag.datasets`` and
``fldiag.diagnostics``. What there is, is read from the source files without an import, so that lists and help answer at once.
``table`` makes the table of a diagnostic. Names of a user's own code (``pkg.mod:name``) are also resolved here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import pydantic

from fldiag.errors import FldiagError, error_text, nearest, unknown
from fldiag.sections import FILES

if TYPE_CHECKING:
    from pandas import DataFrame

ROOT = Path(__file__).parent
#: What is registered, as ``fldiag list`` and ``fldiag.catalogue`` name it, and its folder. The name without s is the registry's.
KINDS = {
    "methods": "methods",
    "models": "models",
    "datasets": "data",
    "diagnostics": "diagnostics",
}
Function = Callable[..., Any]
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
    build: Function
    arguments: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.build) or ""

    @property
    def headline(self) -> str:
        """The first line of ``doc``."""
        return self.doc.partition("\n")[0]

    @cached_property
    def options(self) -> type[pydantic.BaseModel]:
        fields: dict[str, Any] = {
            name: (
                Any if option.annotation is option.empty else option.annotation,
                ... if option.default is option.empty else option.default,
            )
            for name, option in inspect.signature(self.build).parameters.items()
            if self.is_option(option)
        }
        return pydantic.create_model(
            f"{self.name}_options", __config__=STRICT, __module__=self.build.__module__, **fields
        )

    def is_option(self, parameter: inspect.Parameter) -> bool:
        """Whether a parameter of ``build`` is an option."""
        return parameter.name not in self.arguments

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


On = Literal["problem", "checkpoints", "run", "runs"]


@dataclass(frozen=True, eq=False)
class Diagnostic(Entry):
    """A diagnostic: a function ``build(subject, *, options) -> table``, and what is made of its table.

    - ``on``: its subject. ``problem``: the loss around one set of weights (several checkpoints one after another; see
      ``joint``); ``checkpoints``: a list of Problem; ``run``: a History, all stored rounds of a federation; ``runs``: a list
      of Run.
    - ``joint``: options -> whether all targets are one subject, a list of Problem: of a plane through three.
    - ``draw``: table -> Figure, or None where there is nothing to draw; or several such functions by the ending of their files'
      names, such as ``{"": curves, "-layers": layers}``. One whose ending has a suffix returns the text or the bytes of a file.
    - ``summary``: (table, options) -> what a person reads first: ``fldiag.results.table``.
    - ``numbers``: those that runs can be compared by and that a report's first table shows (``fldiag.results.numbers``).
    - ``alarms``: table -> what is wrong with the run, in words, worst first: a report begins with them.
    - ``fails``: table -> whether the verb ends with exit code 3 when ``--strict`` is given.
    - ``example``: what is typed after ``fldiag NAME`` in the help.
    - ``meta["read"]``: which sources were read in part only, and what of them; lists and pages show it.
    """

    on: On = "problem"
    joint: Function = lambda options: False
    draw: Function | Mapping[str, Function] | None = None
    summary: Function | None = None
    numbers: tuple[Any, ...] = ()
    alarms: Function | None = None
    fails: Function | None = None
    example: str = ""

    @property
    def drawings(self) -> dict[str, Function]:
        """Drawing functions by the ending of their files' names; the main picture's is empty."""
        if self.draw is None:
            return {}
        return dict(self.draw) if isinstance(self.draw, Mapping) else {"": self.draw}

    def is_option(self, parameter: inspect.Parameter) -> bool:
        return parameter.kind is parameter.KEYWORD_ONLY


class Listed(NamedTuple):
    """What a source file registers: the module, the first line; of a diagnostic also what it is on."""

    module: str
    summary: str
    on: str = "problem"


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """The entries of one kind: those of fldiag's own packages, and those of other packages, by their entry points.

    ``get`` imports the one entry asked for. One of another package that cannot be imported stops nothing but itself.

    >>> from fldiag import registry
    >>> registry.method.get("fedavg").headline
    'Local SGD, then the weighted mean.'
    """

    def __init__(self, kind: str, entry: Callable[..., E], arguments: tuple[str, ...] = ()):
        self.kind, self._entry, self.arguments = kind, entry, arguments
        self.entries: dict[str, E] = {}  # what is imported so far

    def __call__(self, name: str, **meta: Any) -> Callable[[Function], Function]:
        """Decorator: register the decorated function.

        Args:
            name: that users write; an entry point of another package has the same.
            **meta: what the entry says besides: of a diagnostic the fields of ``Diagnostic``.
        """

        def register(build: Function) -> Function:
            self.entries[name] = self._entry(self.kind, name, build, self.arguments, **meta)
            return build

        return register

    def _points(self) -> dict[str, EntryPoint]:
        """What other packages bring, by name; nothing is imported."""
        return entry_points(f"fldiag.{self.kind}s")

    def names(self) -> list[str]:
        """All there are, sorted; nothing is imported."""
        return sorted({*self.entries, *built_in(f"{self.kind}s"), *self._points()})

    def get(self, name: str) -> E:
        """The entry of a name, or of a function of the user's, ``pkg.mod:function``, which may be decorated, as in a package.

        Raises FldiagError naming the nearest known entry, or saying why that of another package cannot be imported.
        """
        if is_code(name):
            build = load_user(name, self.kind)
            same = [entry for entry in self.entries.values() if entry.build is build]
            entry = same[0] if same else self._entry(self.kind, name, build, self.arguments)
            return replace(entry, name=name)
        if name not in self.entries:
            if item := built_in(f"{self.kind}s").get(name):
                importlib.import_module(item.module)
            elif point := self._points().get(name):
                load_entry_point(point, self.kind)
        if name not in self.entries:
            raise unknown(self.kind, name, self.names())
        return self.entries[name]

    def __contains__(self, name: str) -> bool:
        is_own = name in self.entries or name in built_in(f"{self.kind}s")
        return is_own or name in self._points()


def _plain(kind: str, name: str, build: Function, arguments: tuple[str, ...], **meta: Any) -> Entry:
    return Entry(kind, name, build, arguments, meta)


method = Registry("method", _plain)
model = Registry("model", _plain, ("shape", "classes"))
dataset = Registry("dataset", _plain, ("root", "download"))
diagnostic = Registry("diagnostic", Diagnostic)


def diagnostics() -> list[Diagnostic]:
    """All there are, in the order of a report's sections: alarms, numbers of the first table, weights before runs."""
    return sorted(
        (diagnostic.get(name) for name in diagnostic.names()),
        key=lambda e: (e.alarms is None, not e.numbers, e.on != "problem", e.name),
    )


# -- what there is


def kinds() -> list[str]:
    """What ``fldiag list`` and ``fldiag.catalogue`` take: methods to presets, then the lists of other packages."""
    return [*KINDS, "presets", *entry_points("fldiag.lists")]


def catalogue(kind: str) -> dict[str, str]:
    """Name -> one line on it; for what another package brings, the package's name.

    Raises:
        FldiagError: an unknown kind, or a list that cannot be imported.

    >>> catalogue("methods")["fedavg"]
    'Local SGD, then the weighted mean.'
    """
    if kind not in kinds():
        raise unknown("kind", kind, kinds())
    if kind == "presets":
        return {n: text.partition("\n")[0].lstrip("# ") for n, text in preset_texts().items()}
    if kind not in KINDS:
        return dict(sorted(load_entry_point(entry_points("fldiag.lists")[kind], "list")().items()))
    lines = {n: f"(from {package(p)})" for n, p in entry_points(f"fldiag.{kind}").items()}
    lines |= {name: item.summary for name, item in built_in(kind).items()}
    return dict(sorted(lines.items()))


@cache
def built_in(kind: str) -> dict[str, Listed]:
    """What the source files register, by name."""
    files = sorted((ROOT / KINDS[kind]).rglob("*.py"))
    return dict(item for path in files for item in _registered(path, kind[:-1]))


@cache
def preset_texts() -> dict[str, str]:
    """Name -> text of every preset."""
    return {f.stem: f.read_text("utf-8") for f in sorted((ROOT / "presets").glob("*.toml"))}


def _registered(path: Path, registry: str) -> Iterator[tuple[str, Listed]]:
    """Functions decorated with ``@REGISTRY("name", ...)``, and of data sets the tables SETS."""
    parts, text = path.relative_to(ROOT).with_suffix("").parts, path.read_text("utf-8")
    module = ".".join(("fldiag", *parts)).removesuffix(".__init__")
    decorated = rf'^@(?:\w+\.)?{registry}\(\s*"(.+?)"(.*?)"""(.+?)$'
    for name, about, summary in re.findall(decorated, text, re.MULTILINE | re.DOTALL):
        on = re.search(r'\bon="(\w+)"', about)
        yield name, Listed(module, summary.removesuffix('"""'), *(on.groups() if on else ()))
    if registry == "dataset":
        for name, summary in re.findall(r'^    "(\w+)": \w*\(\s*"(.+?)"', text, re.MULTILINE):
            yield name, Listed(module, summary)


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


# -- code of a user, named as ``pkg.mod:name``

# A file is data: what a run or a checkpoint names is imported only after the user named it too (``--model``, ``--data``,
# ``--set``) or consented to that very name (``--allow-code``). Whatever takes what users say passes it to ``allow``.
# ``load_user`` is the only import of such names in fldiag and refuses all others, so a caller that forgets to ask cannot run
# anything.

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
#: The code that the user named, until this process ends; its workers get the same.
ALLOWED: set[str] = set()


def is_code(value: Any) -> bool:
    """Whether a value of a config names code, and not a registered thing or a file.

    >>> is_code("mypkg.nets:build"), is_code("digits"), is_code("npz:mine.npz"), is_code("holdout:200")
    (True, False, False, False)
    """
    return (
        isinstance(value, str)
        and not value.startswith(FILES)
        and _NAME.fullmatch(value) is not None
    )


def code_names(tree: Any) -> set[str]:
    """All code that a config names, whatever the key: a key that is added later cannot be forgotten.

    >>> sorted(code_names({"model": {"name": "mine:net", "width": 3}, "data": {"name": "digits", "public": "mine:texts"}}))
    ['mine:net', 'mine:texts']
    """
    if is_code(tree):
        return {tree}
    parts = tree.values() if isinstance(tree, Mapping) else tree
    is_tree = isinstance(tree, (Mapping, list, tuple, set, frozenset))
    return set().union(*map(code_names, parts)) if is_tree else set()


def allow(*named: Any) -> None:
    """The user named these values: what is code in them may be imported from now on."""
    ALLOWED.update(code_names(named))


def load_user(name: str, kind: str) -> Any:
    """The function or class that ``pkg.mod:name`` refers to; from then on the current folder is searched last.

    A console script does not search the folder it is run from, where a user's code usually lies. Before code is named nothing is
    imported from there: beside a run that was sent may lie modules with the names of optional ones of any library.

    Args:
        name: the reference.
        kind: what it is for, as messages call it.

    Raises:
        FldiagError: a name that is not allowed (nothing is imported then), or one that cannot be imported.
    """
    if name not in ALLOWED:
        raise FldiagError(
            f"the {kind} {name!r} is user code; fldiag does not import it because a file says so",
            f"if you trust it, add --allow-code {name} (in Python: allow_code={name!r})",
        )
    module_name, _, attribute = name.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        raise FldiagError(
            f"{kind} {name!r}: cannot import {module_name} ({error_text(error)})",
            "run from its folder, or install it",
            usage=True,
        ) from error
    target = getattr(module, attribute, None)
    if not callable(target):
        raise FldiagError(
            f"{kind} {name!r}: module {module_name} has no function {attribute!r}",
            nearest(attribute, [key for key, value in vars(module).items() if callable(value)]),
            usage=True,
        )
    return target
