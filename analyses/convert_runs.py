"""Convert run folders that fldiag wrote before its runs became run.json and rounds.jsonl.

    python analyses/convert_runs.py RUN... --out FOLDER

Each RUN, a folder with an earlier run.json, becomes FOLDER/NAME; the original stays. Weights,
metrics, steps, states and what was recorded of another program are the same. One line a run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file

from fldiag.results import files
from fldiag.runs.run import Run, lock

#: Entries of a checkpoint beside its manifest and the global model.
GROUPS = ("received", "clients", "buffers", "starts", "start_buffers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    for path in args.runs:
        target = args.out / path.name
        with lock(target):
            run = convert(path, target)
        print(f"{run}")


def convert(path: Path, target: Path) -> Run:
    """The run in the new folder. Raises ValueError for one that was not trained to its end."""
    index = files.read_json(path / "run.json")
    if "journal" in index or index["status"] not in ("finished", "diverged"):
        raise ValueError(f"{path} is {index['status']}: finish it with the fldiag that began it")
    origin = {"origin": index["origin"]} if "origin" in index else {}
    index["config"].get("checkpoint", {}).pop("keep", None)
    run = Run.create(target, index["config"], index["provenance"], hash=index["hash"], **origin)
    if not origin:
        run.about["hash"] = run.config.hash
    for name, digest in index["files"].items():
        if files.sha256(path / name) != digest:
            raise ValueError(f"{path / name} was changed")
        if "/" not in name:
            copy(run, path, name)
    run.begin()
    rows = metrics(path / index["metrics"]) if "metrics" in index else []
    names = {int(Path(n).stem): n for n in index["files"] if n.startswith("rounds/")}
    segments = index.get("segments", [])
    facts: dict[str, Any] = {"segment": segments[-1]} if segments else {}
    written = 0
    for t, name in sorted(names.items()):
        for step in [f"steps/{r:04d}.parquet" for r in range(written + 1, t + 1)]:
            if step in index["files"]:
                copy(run, path, step)
        checkpoint(run, t, load(path / name))
        if t == max(names):
            facts |= state(run, t, path, index["state"])
        run.append(t, [row for row in rows if written < row["round"] <= t], **facts)
        written, facts = t, {}
    rest = [row for row in rows if row["round"] > written]
    run.append(index["done"], rest, status=index["status"])
    return Run.open(target)


def copy(run: Run, source: Path, name: str) -> None:
    content = (source / name).read_bytes()
    run.put(name, lambda f: f.write(content))


def metrics(path: Path) -> list[dict[str, Any]]:
    frame = pd.read_parquet(path).drop(columns=["run", "method", "seed"]).astype(object)
    rows = frame.to_dict("records")
    return [{str(k): v for k, v in row.items() if not pd.isna(v)} for row in rows]


def load(path: Path) -> dict[str, Any]:
    """The entries of a file of tensors."""
    if path.suffix == ".pt":
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    return dict(load_file(path))


def checkpoint(run: Run, t: int, content: dict[str, Any]) -> None:
    manifest = json.loads(content["manifest"])
    for key in ("schema", "method", "model", "data", "partition"):
        manifest.pop(key, None)
    rows = {name: content[name] for name in GROUPS if name in content}
    run.put_checkpoint(t, manifest, content["model"], **rows)


def state(run: Run, t: int, path: Path, names: dict[str, str]) -> dict[str, Any]:
    """What server and clients carry on, as one file; what the line says of it."""
    server = load(path / names["server"])["state"] if "server" in names else {}
    clients: dict[int, dict[str, torch.Tensor]] = {}
    for key in sorted(names.keys() - {"server"}):
        tensors = load(path / names[key])
        for j, i in enumerate(tensors["ids"].tolist()):
            entries = {n[3:]: rows[j] for n, rows in tensors.items() if n.startswith("of/")}
            clients[i] = entries
    return run.put_state(t, server, clients) if server or clients else {}


if __name__ == "__main__":
    main()
