"""What the json beside a picture says: the caption, the runs, what is missing and why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.checkpoint.run import Run
from fldiag.config import Config
from fldiag.figures import gather
from fldiag.figures.plan import Plan, answers
from fldiag.figures.questions import CLOCK
from fldiag.figures.scales import questions, reduction
from fldiag.figures.study import Study
from fldiag.results.machine import machine
from fldiag.results.provenance import provenance

#: What is said of runs that are missing or not asked everything, where they are not to be trained.
NOT_YET = "not finished yet"


def about(study: Study, the_plan: Plan, found: pd.DataFrame, paths: Mapping[str, Path],
          errors: Mapping[str, str]) -> dict[str, Any]:
    """What the json beside a picture says."""
    scale, cells = the_plan.scale, {k: v for k, v in the_plan.cells.items() if k[0] == study.name}
    seeds, tasks, there = scale.seed_list(study.seeds), the_plan.tasks, gather.answered(study, the_plan, paths)
    pairs = [(study.trials[n].protocol(), tasks[core].config) for (_, n, seed), core in cells.items() if seed == seeds[0]]
    pairs += [(t.protocol(), scale.config(t, 0, the_plan.store)) for n, t in enumerate(study.trials)
              if not t.train and (study.name, n) not in the_plan.left_out]
    less = reduction(pairs)
    if cells:
        seeds = sorted({seed for (_, _, seed), core in cells.items() if core in there})
    else:  # nothing was trained
        seeds = sorted({int(s) for s in found.loc[found["origin"] == "measured", "seed"].dropna()}) or [0]
    asked = questions(scale, [a for n, t in enumerate(study.trials) if (study.name, n) not in the_plan.left_out
                              for a in (*study.ask, *t.ask)] + list(study.alone), len(seeds))
    left = [{**study.trials[n].key(), "label": study.trials[n].name, "why": why}
            for (name, n), why in the_plan.left_out.items() if name == study.name]
    yet = {core for core in cells.values() if errors.get(core) == NOT_YET}
    left += [{**study.trials[n].key(), "label": study.trials[n].name, "why": NOT_YET}
             for (_, n, _), core in cells.items() if core in yet]
    why = sorted({hit["why"] for hit in left} - {NOT_YET})
    why += [f"{len(yet)} of {len(set(cells.values()))} runs, {NOT_YET}"] if yet else []
    runs = {paths[c].name: run_about(the_plan, c, paths[c]) for c in sorted(set(cells.values()) & paths.keys())}
    lost = dict.fromkeys(f"{study.trials[n].name}{f' ({s})' if (s := study.trials[n].setting) else ''}, seed {seed}"
                         for (_, n, seed), c in cells.items() if c in paths and runs[paths[c].name]["status"] == "diverged")
    named = "Heads and axes name the paper's settings. " if any(t.setting for t in study.trials) else ""
    few = scale.test_images if scale.test_images and cells else 0
    failed = [{**study.trials[n].key(), "seed": seed, "why": public(errors[c], the_plan.store)}
              for (_, n, seed), c in cells.items() if errors.get(c, NOT_YET) != NOT_YET]
    failed += [{**study.trials[n].key(), "seed": 0, "why": public(why, the_plan.store)}
               for (name, n), why in the_plan.failed.items() if name == study.name]
    parts = [study.caption, protocol([theirs for theirs, _ in pairs]),
             f"{named}Scale {scale.name}: {less}." if less else "",
             f"{few:,} test images: an accuracy's standard error is up to {50 / few ** 0.5:.1f} points." if few else "",
             f"Asked with {asked}." if asked else "",
             f"{len(seeds)} seed{'s' * (len(seeds) > 1)}." if (cells and seeds) or len(seeds) > 1 else "",
             f"Left out: {'; '.join(why)}." if why else "",
             f"Failed: {'; '.join(sorted({str(hit['why']) for hit in failed}))}." if failed else "",
             f"Diverged: {'; '.join(lost)}." if lost else ""]
    return {
        "paper": study.paper, "id": study.id, "title": study.title, "source": study.source,
        "caption": " ".join(p for p in parts if p), "scale": scale.name, "reduction": less, "seeds": seeds,
        "machine": machines(paths[c] for c in cells.values() if c in paths), **provenance(),
        "runs": runs,
        "failed": failed,
        "left_out": left, "measured": gather.measured(found, study, the_plan, there)}


def protocol(configs: Sequence[Config]) -> str:
    """The paper's data and partition, as far as they are the same in all parts of the figure."""
    data = {c.data.name for c in configs}
    splits = {" ".join([c.partition.kind, *(f"{k} {v}" for k, v in c.partition.options.items() if k != "min_size")])
              for c in configs}
    said = [f"{what} {found.pop()}" for what, found in (("data", data), ("partition", splits)) if len(found) == 1]
    return f"In the paper: {', '.join(said)}." if said else ""


def unfinished(about: Mapping[str, Any]) -> bool:
    """Whether runs that the scale has are missing from what was made."""
    return bool(about.get("failed")) or any(hit.get("why") == NOT_YET for hit in about.get("left_out", ()))


def run_about(the_plan: Plan, core: str, path: Path) -> dict[str, Any]:
    config = the_plan.tasks[core].config.model_dump(mode="json")
    config["data"].pop("root")  # where data lie is nobody's business
    run = Run.open(path)
    where = {k: run.index["provenance"].get(k) for k in ("fldiag", "commit", "torch", "capability", "device_name",
                                                                 "threads")}
    there = answers(path)
    unverified = [key for key in the_plan.tasks[core].asks if there.unverified(key)]
    return {"hash": core[:10], "status": run.status, "rounds": run.done, **where, "segments": run.index.get("segments", []),
            "config": config, **({"unverified": unverified} if unverified else {})}


def public(text: str, store: Path) -> str:
    """A message without the names of folders, which are nobody's business."""
    for folder in sorted({store, store.absolute(), Path.cwd(), Path.home()}, key=lambda p: -len(str(p))):
        if len(str(folder)) > 1:
            text = text.replace(str(folder), folder.name or "~")
    return " ".join(re.sub(r"(?<![:/\w])(?:/[^\s/:;,'\"]+)+/([^\s/:;,'\"]+)", r"\1", text).split())


def machines(paths: Any) -> str:
    """Where the runs were trained."""
    found = set()
    for path in paths:
        try:
            found.add(json.loads((path / CLOCK).read_text())["machine"])
        except (OSError, ValueError, KeyError):
            continue
    return "; ".join(sorted(found)) or machine()
