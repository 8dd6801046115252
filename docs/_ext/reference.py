"""The reference pages, written from the registry's catalogue and the command line at every build: nothing in them is typed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import click
import typer

from fldiag import registry
from fldiag.cli import app as verbs
from fldiag.cli.app import command as command_of
from fldiag.cli.start import about
from fldiag.config import settings
from fldiag.results.table import COLUMNS, DESCRIPTIONS

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
OUT = DOCS / "reference" / "made"
TITLES = {
    "methods": "Methods",
    "models": "Models",
    "datasets": "Data sets",
    "diagnostics": "Diagnostics",
    "presets": "Presets",
    "figures": "Figures and tables of the papers",
}
LEADS = {
    "methods": "Forty methods of five papers and their baselines, each one file under `fldiag/methods/`. Symbols: $w_g$ the "
    "received global model, $w_k$ the client's weights, $g_l$ the local gradient, $g_u$ the gradient that is applied, "
    "$p_k$ the weight of a client in the mean, $P$ a pass forwards and backwards.",
    "models": 'Architectures with the parameter counts of the papers. `model.name = "mypkg.nets:factory"` names your own.',
    "datasets": "What `data.name` and `--data` take. Nothing is fetched without `--download`.",
    "diagnostics": "Each diagnostic is a verb (or a flag of one), a table, a picture and a section of the report, and a paper's "
    "figure can use it.",
    "presets": "What `fldiag train NAME` starts from; change any key with `--set key=value`.",
    "figures": "What `fldiag figures NAME` reproduces. `--scale smoke` takes seconds; `paper` is the papers' own protocol.",
    "verbs": "Every verb has `--help` with an example. The last line that it prints is the path of what it wrote. Exit codes: 0 "
    "done, 1 failed or stopped by Ctrl-C, 2 wrong use, 3 training diverged or a check that failed.",
}
KEY = re.compile(r"^([A-Za-z][\w ,]{0,12}):\s+(?=\S)")


def write(_: Any = None) -> None:
    """All pages, in a folder that is made anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    for kind in TITLES:
        summaries = registry.catalogue(kind)
        pages = {
            name: _page(kind, name, _item(kind, name, summary))
            for name, summary in summaries.items()
        }
        _folder(kind, TITLES[kind], LEADS[kind], pages, summaries)
    commands = dict(_commands(typer.main.get_command(verbs), "fldiag"))
    _folder(
        "verbs",
        "Verbs",
        LEADS["verbs"],
        {n: _verb(n, c) for n, c in commands.items()},
        {n: _first(c.help or "") for n, c in commands.items()},
    )
    lead = "Every result is a tidy table: a row is one number. Columns after these are named on the diagnostic's page."
    (OUT / "columns.md").write_text(
        f"# Columns of a table\n\n{lead}\n\n"
        + _table(
            ("column", "type", "what it says"),
            [(f"`{c}`", t, DESCRIPTIONS[c]) for c, t in COLUMNS.items()],
        ),
        "utf-8",
    )
    (OUT / "settings.md").write_text(_settings(), "utf-8")


def _item(kind: str, name: str, summary: str) -> dict[str, Any]:
    """What the registry says of a name."""
    if kind not in registry.KINDS:
        return {"summary": summary}
    entry = getattr(registry, kind[:-1]).get(name)
    return {
        "summary": summary,
        "doc": entry.doc,
        "meta": entry.meta,
        "options": [_option(key, field) for key, field in entry.options.model_fields.items()],
        "example": getattr(entry, "example", ""),
    }


def _option(name: str, field: Any) -> dict[str, Any]:
    return {**about(name, field), "required": field.is_required()}


def _settings() -> str:
    """Every key of a config, a table for each section."""
    text = (
        "(settings)=\n# Settings of a run\n\nEvery key of a config, as `fldiag explain settings` prints them. Set one with "
        "`--set KEY=VALUE`, in a TOML file, or in Python: `fldiag.Config.load(PRESET, section__key=VALUE)`. `fldiag train PRESET "
        "--dry-run` shows what a run would have.\n"
    )
    keys = settings()
    for section in dict.fromkeys(key.rpartition(".")[0] for key in keys):
        options = [_option(k, f) for k, f in keys.items() if k.rpartition(".")[0] == section]
        text += f"\n## {section or 'The run'}\n\n" + _options(options)
    return text


def _folder(
    kind: str, title: str, lead: str, pages: dict[str, str], summaries: dict[str, str]
) -> None:
    folder = OUT / kind
    folder.mkdir(parents=True)
    for name, text in pages.items():
        (folder / f"{_file(name)}.md").write_text(f"({kind}-{_file(name)})=\n{text}", "utf-8")
    rows = [(f"[`{name}`](#{kind}-{_file(name)})", escaped(summaries[name])) for name in pages]
    toc = "\n".join(["```{toctree}", ":hidden:", *map(_file, pages), "```"])
    (folder / "index.md").write_text(
        f"# {title}\n\n{lead}\n\n{_table(('name', ''), rows)}\n{toc}\n", "utf-8"
    )


def _file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _page(kind: str, name: str, item: dict[str, Any]) -> str:
    parts = [f"# {name}", ""]
    if kind == "presets":
        text = (ROOT / "fldiag" / "presets" / f"{name}.toml").read_text("utf-8")
        return "\n".join(
            [
                *parts,
                escaped(item["summary"]),
                "",
                f"```toml\n{text.rstrip()}\n```",
                "",
                f"```sh\nfldiag train {name} --dry-run\n```",
                "",
            ]
        )
    if kind == "figures":
        return _figure(name, item)
    parts += [escaped(item["summary"]), "", *_doc(item["doc"]), ""]
    meta = item["meta"]
    if meta.get("source"):
        parts += ["Source", f": {escaped(meta['source'])}", ""]
    if meta.get("read"):
        parts += ["Sources read in part", f": {escaped(meta['read'])}", ""]
    if meta.get("equals"):
        where = ", ".join(f"`{k} = {json.dumps(v)}`" for k, v in meta["neutral"].items())
        parts += [
            "Equal to",
            f": [`{meta['equals']}`](#methods-{meta['equals']}) where {where} (tested)",
            "",
        ]
    if item["options"]:
        head = "--set method." if kind == "methods" else "--set model." if kind == "models" else ""
        parts += ["## Options", "", _options(item["options"]), ""]
        if head:
            parts += [f"On the command line `{head}NAME=VALUE`.", ""]
    commands = {
        "methods": [
            f"fldiag train digits --set method.name={name} --dry-run",
            f"fldiag explain {name}",
        ],
        "diagnostics": [f"fldiag {name} {item.get('example') or 'RUN'}"],
    }
    if kind in commands:
        parts += ["```sh", *commands[kind], "```", ""]
    return "\n".join(parts)


def _figure(name: str, item: dict[str, Any]) -> str:
    """The pictures of every scale, as far as the repository has them."""
    parts = [f"# {name}", "", escaped(item["summary"]), ""]
    notes = [p for p in (ROOT / "figures").rglob(f"{name}.json") if p.with_suffix(".png").exists()]
    for note in sorted(notes):
        about, picture = json.loads(note.read_text("utf-8")), note.with_suffix(".png")
        parts += [
            f"![{item['summary']}](../../../../{picture.relative_to(ROOT).as_posix()})",
            "",
            escaped(about["caption"]),
            "",
            f"```sh\n{about['command']}\n```",
            "",
        ]
    return "\n".join(
        parts if notes else [*parts, f"```sh\nfldiag figures {name} --scale smoke\n```", ""]
    )


def _doc(text: str) -> list[str]:
    """A docstring after its first line: that of fields and equations as it stands, paragraphs as prose."""
    rest = text.partition("\n")[2].strip("\n")
    if any(KEY.match(line) for line in rest.split("\n")):
        return ["```text", rest, "```"]
    return prose(rest).split("\n")


def prose(text: str) -> str:
    """A docstring's paragraphs and lists as markdown."""
    return "\n".join(p.lstrip() if not p.startswith("- ") else p for p in escaped(text).split("\n"))


def escaped(text: str) -> str:
    """Names between double backticks as code, the rest without any mark-up."""
    parts = re.split(r"(``[^`]*``)", str(text))
    return "".join(
        f"`{p[2:-2]}`" if p.startswith("``") else re.sub(r"([\\`*_<>\[\]$|~])", r"\\\1", p)
        for p in parts
    )


def _options(options: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"`{o['option']}`",
            f"`{o['values']}`".replace("|", "\\|"),
            "required" if o["required"] else f"`{o['default']}`",
            escaped(o["what it is"]),
        )
        for o in options
    ]
    return _table(("option", "values", "default", ""), rows)


def _commands(group: click.Group, name: str) -> Any:
    context = click.Context(group)
    for key in group.list_commands(context):
        is_derived = key in registry.built_in("diagnostics") and key not in group.commands
        command = command_of(key) if is_derived else group.get_command(context, key)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{name} {key}")
        else:
            yield f"{name} {key}".removeprefix("fldiag "), command


def _first(text: str) -> str:
    return text.strip().split("\n\n")[0].replace("\n", " ")


def _verb(name: str, command: click.Command) -> str:
    text, _, example = (command.help or "").partition("Example: ")
    parts = [f"# fldiag {name}", "", prose(text.strip()), ""]
    if example:
        parts += ["```sh", example.strip(), "```", ""]
    rows = []
    for p in command.params:
        if getattr(p, "hidden", False) or p.name == "help":
            continue
        argument = isinstance(p, click.Argument)
        shown = (
            p.make_metavar(click.Context(command))
            if argument
            else ", ".join([*p.opts, *p.secondary_opts])
        )
        default = "" if p.default in (None, False) or callable(p.default) else f"`{p.default}`"
        rows.append(
            (f"`{shown}`".replace("|", "\\|"), default, escaped(getattr(p, "help", None) or ""))
        )
    return "\n".join([*parts, _table(("option", "default", ""), rows), ""])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return (
        "\n".join(
            [*lines, *("| " + " | ".join(r.replace("\n", " ") for r in row) + " |" for row in rows)]
        )
        + "\n"
    )


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
