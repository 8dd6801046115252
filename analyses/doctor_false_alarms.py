"""How often the doctor accuses a sound run: 200 clean federations on the digits, none of which deserves a fault or a warning.

    python analyses/doctor_false_alarms.py [--runs 200] [--out figures/doctor]

Three of four are runs of fldiag: its methods in turn (server optimisers among them), LDA 0.05 and 0.5, two classes a client,
IID and pathological partitions, 5, 5, 10 or 20 rounds. Every fourth is a plain loop of another program, recorded: a network
with batch-norm, and a server that takes the mean by examples, a server learning rate, momentum, FedAdam or FedYogi. Runs are
trained in a temporary folder. A table of findings by check and severity is written beside one row a run; a stopped script goes
on. Takes about five minutes of CPU time.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import fldiag
from fldiag import Config, registry
from fldiag.data import load, partition
from fldiag.results.provenance import provenance
from fldiag.runs.run import Run

PARTITIONS: tuple[dict[str, Any], ...] = (
    {"kind": "lda", "alpha": 0.05},
    {"kind": "sharding", "shards": 2},
    {"kind": "lda", "alpha": 0.5},
    {"kind": "iid"},
    {"kind": "pathological", "classes": 2},
)
ROUNDS = (5, 5, 10, 20)
SERVERS = ("mean", "fedadam", "momentum", "fedyogi", "rate")
SEVERITIES = ("fault", "warning", "information", "not checked")


def about(i: int) -> dict[str, Any]:
    """What the i-th run is."""
    dealt, rounds = (
        PARTITIONS[(i // 4 + i % 4) % len(PARTITIONS)],
        ROUNDS[(i // 20 + i) % len(ROUNDS)],
    )
    if i % 4 == 3:
        return {
            "source": "loop",
            "method": SERVERS[(i // 4) % len(SERVERS)],
            "rounds": rounds,
            **dealt,
        }
    names = registry.method.names()
    return {
        "source": "fldiag",
        "method": names[(i - i // 4) % len(names)],
        "rounds": rounds,
        **dealt,
    }


def trained(i: int, what: dict[str, Any], out: Path) -> Run:
    """A run of fldiag: the preset, with a small MLP where the method takes one."""
    options = {
        f"partition__{k}": v for k, v in what.items() if k in ("kind", "alpha", "shards", "classes")
    }
    small, rounds, epochs = {"model__name": "mlp"}, what["rounds"], 1 + i % 3
    if (
        Config.load("digits", method__name=what["method"]).model.name != "small_cnn"
    ):  # a residual net, which takes long
        small, rounds, epochs = {"clients__per_round": 4}, 5, 1
    config = Config.load(
        "digits",
        method__name=what["method"],
        rounds=rounds,
        seed=i,
        partition__seed=i,
        train__epochs=epochs,
        checkpoint__clients="sampled",
        **small,
        **options,
    )
    return fldiag.train(config, out=out)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)
    )


def recorded(i: int, what: dict[str, Any], out: Path) -> Run:
    """A plain loop. Batch-norm's buffers are averaged, the weights make a step of the server's rule."""
    data, rng = load("digits"), np.random.default_rng(i)
    options = {k: v for k, v in what.items() if k in ("alpha", "shards", "classes")}
    parts = partition.make(what["kind"], data.train_y, 20, i, **options)
    model, step = net(i), server(what["method"])
    weights, state = {n for n, _ in model.named_parameters()}, copy.deepcopy(model.state_dict())
    x = data.batch(torch.arange(len(data.train_y)))
    with fldiag.Recorder(out, model, data="digits", clients=parts, seed=i) as rec:
        for _ in range(what["rounds"]):
            ids = sorted(rng.choice(20, 10, replace=False).tolist())
            replies = {
                k: local(model, state, x[parts[k]], data.train_y[parts[k]], rng) for k in ids
            }
            p = np.array([len(parts[k]) for k in ids]) / sum(len(parts[k]) for k in ids)
            mean = {
                n: sum(float(w) * r[n].double() for w, r in zip(p, replies.values(), strict=True))
                if v.is_floating_point()
                else v
                for n, v in state.items()
            }
            new = {
                n: (state[n] + step(n, mean[n] - state[n]) if n in weights else mean[n]).to(v.dtype)
                for n, v in state.items()
            }
            rec.round(
                received=state,
                clients=replies,
                aggregated=new,
                metrics={"lr": 0.05, "test_accuracy": right(model, new, data)},
            )
            state = new
    return rec.run


def local(
    model: nn.Module,
    state: dict[str, Any],
    x: torch.Tensor,
    y: torch.Tensor,
    rng: np.random.Generator,
) -> dict[str, Any]:
    model.load_state_dict(state)
    optimiser = torch.optim.SGD(model.train().parameters(), 0.05)
    for _ in range(2):
        for batch in np.array_split(rng.permutation(len(y)), max(len(y) // 20, 1)):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    return copy.deepcopy(model.state_dict())


def right(model: nn.Module, state: dict[str, Any], data: Any) -> float:
    model.load_state_dict(state)
    with torch.no_grad():
        return float(
            (model.eval()(data.normalise(data.test_x)).argmax(1) == data.test_y).double().mean()
        )


def server(kind: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """(name of the tensor, mean update) -> the server's step."""
    m: dict[str, torch.Tensor] = {}
    v: dict[str, torch.Tensor] = {}

    def step(name: str, d: torch.Tensor) -> torch.Tensor:
        if kind in ("mean", "rate"):
            return d if kind == "mean" else 0.7 * d
        if kind == "momentum":
            m[name] = 0.9 * m.get(name, 0 * d) + d
            return 0.5 * m[name]
        m[name] = 0.9 * m.get(name, 0 * d) + 0.1 * d
        old = v.get(name, 0 * d)
        v[name] = (
            0.99 * old + 0.01 * d**2
            if kind == "fedadam"
            else old - 0.01 * d**2 * torch.sign(old - d**2)
        )
        return 0.03 * m[name] / (v[name].sqrt() + 1e-3)

    return step


def examined(i: int) -> dict[str, Any]:
    """One row: what the run is, and which checks found what."""
    what = about(i)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = (recorded if what["source"] == "loop" else trained)(i, what, out)
        own = {"model": net(i)} if what["source"] == "loop" else {}
        table = fldiag.diagnose(run, "doctor", device="cpu", **own)
        found = {
            s: " ".join(table[table["severity"] == s]["metric"].drop_duplicates())
            for s in SEVERITIES
        }
        return {"run": i, **what, "rounds": run.done, "status": run.status, **found}


def text(frame: pd.DataFrame) -> str:
    """The table that is committed: runs accused by kind of run, and findings by check."""
    clean = frame[frame["status"] != "diverged"]
    clean = clean.reindex(columns=[*dict.fromkeys([*clean.columns, "alpha", "shards", "classes"])])
    accused = clean[(clean["fault"] != "") | (clean["warning"] != "")]
    lines = [
        f"{len(clean)} clean runs, {len(accused)} with a fault or a warning ({len(accused) / max(len(clean), 1):.1%})",
        f"({len(frame) - len(clean)} of {len(frame)} diverged and do not count).",
        "",
        "| runs | clean | accused |",
        "|---|---|---|",
    ]
    groups = {
        "fldiag's own": clean["source"] == "fldiag",
        "recorded loops": clean["source"] == "loop",
        "server optimisers": clean["method"].isin(
            ["fedadam", "fedyogi", "fedavgm", "momentum", "rate"]
        ),
        "LDA 0.05": clean["alpha"] == 0.05,
        "two classes a client": (clean["shards"] == 2) | (clean["classes"] == 2),
        "five rounds": clean["rounds"] == 5,
    }
    lines += [
        f"| {name} | {int(mask.sum())} | {int(mask[accused.index].sum())} |"
        for name, mask in groups.items()
    ]
    lines += [
        "",
        "| check | fault | warning | information | not checked |",
        "|---|---|---|---|---|",
    ]
    checks = sorted({c for s in SEVERITIES for cell in clean[s] for c in cell.split()})
    for check in checks:
        counts = [
            int(clean[s].str.split().map(lambda cell, check=check: check in cell).sum())
            for s in SEVERITIES
        ]
        lines.append(f"| {check} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("figures/doctor"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "false_alarms.csv"
    rows = (
        pd.read_csv(
            file, keep_default_na=False, na_values={"alpha": "", "shards": "", "classes": ""}
        ).to_dict("records")
        if file.is_file()
        else []
    )
    for i in sorted(set(range(args.runs)) - {int(row["run"]) for row in rows}):
        rows.append(examined(i))
        print(f"[{len(rows)}/{args.runs}] {rows[-1]}", flush=True)
        pd.DataFrame(rows).sort_values("run").to_csv(file, index=False)
    frame = pd.DataFrame(rows).sort_values("run", ignore_index=True)
    (args.out / "false_alarms.md").write_text(text(frame), "utf-8")
    (args.out / "false_alarms.json").write_text(
        json.dumps(provenance(runs=args.runs), indent=1), "utf-8"
    )
    print(text(frame))
    print(args.out / "false_alarms.md")


if __name__ == "__main__":
    main()
