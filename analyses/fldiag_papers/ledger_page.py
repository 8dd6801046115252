"""The ledger for reading (what was made at which scale, what holds, and the numbers) and the gallery of its pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.plotting import words
from fldiag_papers import agreement, claims, pictures, reported
from fldiag_papers.caption import unfinished
from fldiag_papers.ledger import Entry
from fldiag_papers.scales import SCALES

#: What the overview says of numbers, by what they rest on, and of their and the statements' outcomes.
HOW = {
    "trained": "trained",
    "cost": "counted",
    "data": "counted",
    "arithmetic": "worked out from others",
}
OUTCOMES = {"yes": "agree", agreement.AS_PROFILED: "agree as profilers count", "no": "do not"}
STATEMENTS = {"yes": "holds", "no": "does not hold"}
NAMES = {"fedsol": "FedSOL", "fedtoga": "FedTOGA", "fedproj": "FedProj", "fedalign": "FedAlign"}


def page(ledger: pd.DataFrame, figures: list[Entry], out: Path) -> str:
    """Markdown: claims, then every paper's figures with captions and its numbers."""
    parts = [
        "# Reported and measured",
        "",
        "![Reported and measured numbers](ledger.png)",
        "",
        *_intro(ledger, figures),
        "## Measured under the paper's conditions",
        "",
        *_like(ledger),
        *_hours(figures),
    ]
    parts += ["## Statements", "", *_claims(ledger[ledger["kind"] == "claim"])]
    for paper in sorted(reported.papers(), key=lambda p: ([*NAMES, p].index(p), p)):
        parts += [f"## {NAMES.get(paper, paper)}", ""]
        mine = ledger[(ledger["paper"] == paper) & (ledger["kind"] != "claim")]
        for id, part in mine.groupby("id", sort=False):
            parts += [f"### {part['source'].iloc[0]}", ""]
            for entry in figures:
                if entry.name == (paper, id):
                    about = entry.about
                    title = f"{about['title']}, scale {about['scale']}"
                    parts += [f"[{title}]({_picture(entry, out)}): {about['caption']}", ""]
            parts += _numbers(part)
    return "\n".join(parts).rstrip() + "\n"


def overview(ledger: pd.DataFrame, figures: list[Entry]) -> str:
    """Markdown: every figure and table of the papers, at which scale it was made with how many seeds, and the verdict."""
    study_of = {claim.id: claim.study for claim in claims.claims()}
    lines = ["| figure or table | paper's protocol | reduced | verdict |", "|---" * 4 + "|"]
    numbers = ledger[ledger["kind"] != "claim"]
    statements = ledger[ledger["kind"] == "claim"]
    statements = statements.assign(study=statements["id"].map(study_of))
    for paper in NAMES:
        for id, part in sorted(
            numbers[numbers["paper"] == paper].groupby("id"), key=lambda group: _natural(group[0])
        ):
            entries = [entry for entry in figures if entry.name == (paper, id)]
            if any("varies" in entry.about for entry in entries):
                continue  # a question about a table, not the paper's own
            source = part["source"].iloc[0].split(" = ")[0]
            if entries and entries[0].about["title"]:
                source += f": {entries[0].about['title']}"
            mine = statements[statements["study"] == f"{paper}/{id}"]
            scales = [_scales(entries, part, is_unreduced=flag) for flag in (True, False)]
            verdict = "; ".join(filter(None, [_verdict_on_numbers(part), _verdicts(mine)]))
            if not entries:
                verdict = part["status"].iloc[0] if part["status"].nunique() == 1 else "not run"
            cells = (source, *scales, verdict or "drawn; nothing is printed to compare")
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _scales(entries: list[Entry], part: pd.DataFrame, *, is_unreduced: bool) -> str:
    """With how many seeds a figure was made at the scales that keep the paper's protocol, or at the others."""
    texts = []
    for entry in entries:
        about = entry.about
        scale, count = about["scale"], len(about["seeds"])
        seeds = f"{count} seed{'s' if count > 1 else ''}"
        unknown = (part["agrees"] == "protocol unknown").any()
        if not about["runs"] and not unknown:  # nothing is trained, at any scale
            texts += ["no training"] if is_unreduced else []
        elif SCALES[scale].is_unreduced and is_unreduced:
            extent = "part of it, " if unfinished(about) else ""
            texts.append(f"{extent}{seeds}" + (", bf16" if scale == "paper-bf16" else ""))
        elif not SCALES[scale].is_unreduced and not is_unreduced:
            texts.append(f"protocol unknown, {seeds}" if unknown else f"{scale}, {seeds}")
    return "; ".join(texts) or "–"


def _verdict_on_numbers(part: pd.DataFrame) -> str:
    """How many of a figure's numbers were measured under the paper's conditions, and how many of them agree."""
    counts = agreement.counts(part)
    printed, like, otherwise = (counts.attrs[k] for k in ("printed", "like", "otherwise"))
    if not printed:
        return ""
    texts = [f"numbers: {printed}"]
    for basis, row in counts[counts["numbers"] > 0].iterrows():
        outcomes = row.drop("numbers").rename(OUTCOMES)
        listing = ", ".join(f"{word} {n}" for word, n in outcomes.items() if n)
        texts.append(f"{row['numbers']} {HOW[str(basis)]} ({listing})")
    texts += [f"{otherwise} not comparable"] if otherwise else []
    return ", ".join(texts if like or otherwise else [*texts, "none measured"])


def _verdicts(statements: pd.DataFrame) -> str:
    """The outcomes of a figure's statements, each at the largest scale that has what it compares."""
    outcomes: dict[tuple[str, str], int] = {}
    for _, rows in statements.groupby("id", sort=False):
        decided = rows[rows["agrees"].notna()]
        key = "not decided", ""
        if len(decided):
            first = decided.iloc[0]
            scale = (
                f" ({first['scale']})" if _text(first["runs"]) else ""
            )  # else nothing is trained
            key = STATEMENTS.get(first["agrees"], first["agrees"]), scale
        outcomes[key] = outcomes.get(key, 0) + 1
    listing = ", ".join(f"{word} {n}{scale}" for (word, scale), n in outcomes.items())
    return f"statements: {listing}" if listing else ""


def gallery(figures: list[Entry], out: Path) -> str:
    """Markdown: every picture with its caption and the command that makes it."""
    parts = [
        "# Gallery",
        "",
        "Made by `fldiag figures --ledger` from the pictures in this folder. The numbers are compared "
        "with the papers' in the [ledger](ledger.md).",
        "",
    ]
    for paper, name in NAMES.items():
        entries = sorted(
            (entry for entry in figures if entry.about["paper"] == paper),
            key=lambda entry: ("varies" in entry.about, _natural(entry.about["id"])),
        )
        parts += [f"## {name}", ""] if entries else []
        for entry in entries:
            about = entry.about
            title = f"### {about['source']}: {about['title']}"
            if sum(other.name == entry.name for other in entries) > 1:
                title += f" (scale {about['scale']})"
            picture = f"![{about['title']}]({_picture(entry, out)})"
            command = ["```sh", about["command"], "```"]
            parts += [title, "", picture, "", about["caption"], "", *command, ""]
    return "\n".join(parts).rstrip() + "\n"


def _picture(entry: Entry, out: Path) -> str:
    return entry.file.with_suffix(".png").relative_to(out).as_posix()


def _intro(ledger: pd.DataFrame, figures: list[Entry]) -> list[str]:
    totals = agreement.counts(ledger).attrs
    scales = []
    for scale in reversed(SCALES):
        if mine := [unfinished(e.about) for e in figures if e.about["scale"] == scale]:
            scales.append(
                f"{len(mine)} at scale {scale}"
                + (f" ({sum(mine)} of them unfinished)" if any(mine) else "")
            )
    return [
        "Made by `fldiag figures --ledger`; `ledger.csv` holds the same. Measured: mean ± one standard deviation over seeds. "
        "What the column *agrees* says:",
        "",
        "- yes, no: whether 0 lies in the 95 % t-interval of the difference (Welch's; a paper's number counts as the mean of "
        "three runs). Counts agree if they are equal to the last printed digit, and numbers worked out from others if the "
        "rounding of those may explain the difference.",
        "- one spread: only one standard deviation is known and is used for both; the difference is within its interval. Of "
        "an accuracy of one run it is the deviation over that run's last 20 rounds, if that is larger than the paper's.",
        "- no spread: no standard deviation is known.",
        "- other data (also public data), other model, other machine: not those of the paper.",
        "- protocol unknown: the paper's text does not say what the number depends on.",
        "- reduced: fewer rounds, clients or examples than in the paper, or bf16, as the caption says.",
        "- bound: the paper's number is a bound.",
        "",
        "A statement holds, or does not hold, where a paired t-test over its own seeds says so (95 %); of one seed it is "
        "undecided. Models whose accuracy is within 3 points of chance, or of what two classes alone give, are undecided too. "
        "A statement on every column of a table is not decided while columns are missing, unless one refutes it.",
        "",
        f"Figures and tables made: {', '.join(scales) or 'none'}. "
        f"Of {totals['printed']} reported numbers, {totals['like']} were measured under the paper's conditions (by kind: see "
        f"below), {totals['otherwise']} only under a reduced or unknown protocol or with other data or models. These do not "
        "show whether the paper's number is right. With one seed, they compare methods only where the difference is far "
        "larger than the changes from round to round.",
        "",
    ]


def _like(ledger: pd.DataFrame) -> list[str]:
    """How many agree, by what they rest on, and those that do not, each with what is known of the cause."""
    lines = [
        "| numbers of the papers | measured | agree | agree as profilers count | do not agree | undecided |",
        "|---" * 6 + "|",
    ]
    for basis, row in agreement.counts(ledger).iterrows():
        lines.append(f"| {agreement.BASES[str(basis)]} | " + " | ".join(str(n) for n in row) + " |")
    lines += [
        "",
        "Layer profilers count the pooling before the classifier, and no parameters of batch-norm. Numbers that do "
        "not agree:",
        "",
        "| source | method | model, data | metric | reported | measured | note |",
        "|---" * 7 + "|",
    ]
    for r in ledger[
        ledger["basis"].notna() & (ledger["agrees"] == "no") & ledger["measured"].notna()
    ].to_dict("records"):
        options = "; ".join(
            part
            for part in _text(r["setting"]).split(";")
            if part.split("=")[0] not in reported.FEDERATION
        )
        method = words.method(_text(r["method"])) + (f" ({options})" if options else "")
        protocol = ", ".join(filter(None, (_text(r["model"]), words.data(_text(r["data"])))))
        cells = [
            r["source"],
            method,
            protocol,
            pictures.words(r["metric"]),
            _pair(r["reported"], r["reported_std"]),
            _pair(r["measured"], r["measured_std"]),
            _text(r["note"]),
        ]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return [*lines, ""]


def _hours(figures: list[Entry]) -> list[str]:
    """What the runs of the papers' whole protocols took, each once, by machine and code: a part may have been trained
    elsewhere."""
    runs = {
        name: run
        for entry in figures
        if SCALES[entry.about["scale"]].is_unreduced
        for name, run in entry.about["runs"].items()
        if run.get("segments")
    }
    if not runs:
        return []
    lines = [
        "## Hours of the runs under the papers' whole protocols",
        "",
        "| run | rounds | machine | processor | precision | "
        "threads | main process [h] | clock [h] | code | PyTorch |",
        "|---" * 10 + "|",
    ]
    for name, run in sorted(runs.items()):
        keys = ("machine", "capability", "threads", "commit", "torch")
        precision = run.get("config", {}).get("train", {}).get("precision", "")
        segments = pd.DataFrame(run["segments"]).reindex(
            columns=[*keys, "first_round", "last_round", "cpu_seconds", "seconds"]
        )
        for key, part in segments.groupby(list(keys), dropna=False, sort=False):
            machine, capability, threads, commit, torch = map(_cell, key)
            rounds = int((part["last_round"] - part["first_round"] + 1).sum())
            spent = [f"{part[c].sum() / 3600:.2f}" for c in ("cpu_seconds", "seconds")]
            cells = [
                name,
                str(rounds),
                machine,
                capability,
                precision,
                threads,
                *spent,
                commit[:7],
                torch,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _claims(claims: pd.DataFrame) -> list[str]:
    lines = ["| statement | source | scale | outcome | numbers |", "|---|---|---|---|---|"]
    for r in claims.to_dict("records"):
        lines.append(
            "| "
            + " | ".join(_cell(r[k]) for k in ("metric", "source", "scale", "status", "note"))
            + " |"
        )
    return [*lines, ""]


def _numbers(part: pd.DataFrame) -> list[str]:
    if set(part["kind"]) == {"figure"}:
        return [
            *(
                f"{_text(r['scale']) or '–'}: {r['status']} ({r['note']})"
                for r in part.to_dict("records")
            ),
            "",
        ]
    if part["measured"].isna().all():
        counts = part["status"].value_counts(sort=False)
        return [
            "; ".join(f"{n} number{'s' * (n > 1)}: {status}" for status, n in counts.items())
            + " (see `ledger.csv`).",
            "",
        ]
    lines = [
        "| setting | method | model | data | metric | reported | scale | measured | seeds | trained | difference | agrees | "
        "status |",
        "|---" * 13 + "|",
    ]
    for r in part[part["kind"] == "number"].to_dict("records"):
        cells = [
            _cell(r[k]).replace(";", "; ") for k in ("setting", "method", "model", "data", "metric")
        ]
        trained = " on ".join(t for t in map(_cell, (r["trained_model"], r["trained_on"])) if t)
        cells += [
            _pair(r["reported"], r["reported_std"]),
            _text(r["scale"]),
            _pair(r["measured"], r["measured_std"]),
            "" if pd.isna(r["seeds"]) else f"{int(r['seeds'])}",
            trained,
            _pair(r["difference"], None),
            _cell(r["agrees"]),
            "" if r["status"] == "measured" else _cell(r["status"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _natural(id: str) -> list[tuple[int, str]]:
    """fig2 before fig10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", id)]


def _text(value: Any) -> str:
    return "" if value is None or pd.isna(value) else str(value)


def _cell(value: Any) -> str:
    return " ".join(_text(value).replace("|", "\\|").split())


def _pair(value: Any, std: Any) -> str:
    if value is None or pd.isna(value):
        return ""
    return f"{value:.5g}" + ("" if std is None or pd.isna(std) else f" ± {std:.2g}")
