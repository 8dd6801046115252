"""Every method at its documented defaults on digits: accuracy, sharpness, forgetting and cost in one table.

    python analyses/methods_on_digits.py [--rounds 20] [--seeds 3] [--only fedavg,fedsol] [--out figures/methods]

The ``digits`` preset (20 clients, 10 a round, LDA 0.1). Methods that distil get 200 training examples as public inputs
(no client has them); methods that need stages train the small residual net, and are compared with FedAvg on it. Runs are
kept under ``checkpoints/`` and used again. Per method, mean and deviation over the seeds:

accuracy     of the final global model on the test set (for methods with a personal phase also the clients' mean on test
             sets with their own class mixture)
lambda_1     largest Hessian eigenvalue of the final global model on the training set
forgetting   accuracy of the received model minus that of a client's trained model, on the test set, mean over the clients
             of the last round
cost         time of a round over FedAvg's on the same model, median of alternating rounds
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pandas as pd

import fldiag
from fldiag import Config, FldiagError, registry
from fldiag import config as configs
from fldiag.checkpoint.schema import Checkpoint
from fldiag.checkpoint.store import Run
from fldiag.diagnostics import target
from fldiag.results.provenance import provenance
from fldiag.training.rounds import Federation
from fldiag.training.setup import Setup

RESIDUAL = {"model.name": "small_resnet"}
PUBLIC = {"data.public": "holdout:200"}


def config_for(method: str, rounds: int, seed: int) -> Config:
    """The preset with what the method needs."""
    keys = {"method.name": method, "rounds": rounds, "seed": seed, "checkpoint.every": rounds, "checkpoint.clients": "sampled"}
    refusals = []
    for more in ({}, PUBLIC, RESIDUAL):
        try:
            config = configs.load("digits", [f"{k}={v}" for k, v in {**keys, **more}.items()])
            Setup(config)
        except FldiagError as refusal:
            refusals.append(str(refusal))
        else:
            return config
    raise FldiagError(f"{method} takes neither of the settings: {refusals}", "add one to analyses/methods_on_digits.py")


def accuracy(checkpoint: Checkpoint, client: int | None = None) -> float:
    problem = target.problem(checkpoint, slice="test", client=client)
    outputs, y = problem.outputs()
    return float((outputs.argmax(-1) == y).double().mean())


def measure(run: Run) -> dict[str, float]:
    """The numbers of one run."""
    last = run.checkpoint()
    if run.status == "diverged":
        return {"diverged": 1.0}
    before = accuracy(dataclasses.replace(last, state={**last.state, **received(last)}))
    after = [accuracy(last, client) for client in last.client_ids]
    spectrum = fldiag.diagnose(last, "spectrum", k=1)
    found = {"accuracy": accuracy(last), "lambda_1": float(spectrum[spectrum.metric == "eigenvalue"].value.iloc[0]),
             "forgetting": before - statistics.fmean(after)}
    personal = run.metrics.query("metric == 'personal_accuracy' and scope == 'global'")
    if len(personal):
        found["personal"] = float(personal.value.iloc[-1])
    return found


def received(checkpoint: Checkpoint) -> dict[str, Any]:
    """The weights that the last round's clients started from, by name."""
    from fldiag.params import Layout

    names = [n for n in checkpoint.state if n not in checkpoint.buffers]
    layout = Layout(tuple(names), tuple(checkpoint.state[n].shape for n in names), "")
    return layout.views(checkpoint.received)


def cost(method: str, rounds: int = 5) -> float:
    """Time of a round over FedAvg's on the same model and data, alternating; evaluation and files left out."""
    config = config_for(method, 1, 0)
    sides = [Federation(Setup(config)), Federation(Setup(config.replace(method__name="fedavg")))]
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for side, taken in zip(sides, times, strict=True):
            began = time.perf_counter()
            side.round(lambda units, side=side: map(side.setup.train, units))
            taken.append(time.perf_counter() - began)
    return statistics.median(a / b for a, b in zip(times[0][1:], times[1][1:], strict=True))


def row(method: str, rounds: int, seeds: int) -> dict[str, Any]:
    runs = []
    for seed in range(seeds):
        config = config_for(method, rounds, seed)
        runs.append(measure(fldiag.train(config, resume=True)))
    frame = pd.DataFrame(runs)
    line: dict[str, Any] = {"method": method, "model": config.model.name, "public": config.data.public or ""}
    for key in frame:
        line[key], line[f"{key}_std"] = frame[key].mean(), frame[key].std(ddof=1) if seeds > 1 else float("nan")
    return {**line, "cost": cost(method), "seeds": seeds, "rounds": rounds}


def text(frame: pd.DataFrame) -> str:
    """The table in Markdown."""
    def cell(r: Any, key: str, scale: float = 1.0, digits: int = 1) -> str:
        value, spread = r.get(key), r.get(f"{key}_std")
        if value is None or pd.isna(value):
            return "–"
        return f"{scale * value:.{digits}f}" + ("" if pd.isna(spread) else f" ± {scale * spread:.{digits}f}")

    head = "| method | model | accuracy % | personal % | λ1 | forgetting % | cost |\n|---|---|---|---|---|---|---|\n"
    return head + "\n".join(
        f"| {r['method']}{'' if not r['public'] else ' (public data)'} | {r['model']} | {cell(r, 'accuracy', 100)} | "
        f"{cell(r, 'personal', 100)} | {cell(r, 'lambda_1', 1, 2)} | {cell(r, 'forgetting', 100)} | {r['cost']:.2f} |"
        for r in frame.to_dict("records")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="comma-separated methods")
    parser.add_argument("--out", type=Path, default=Path("figures/methods"))
    args = parser.parse_args()
    names = args.only.split(",") if args.only else registry.method.names()
    rows = []
    for i, name in enumerate(names, start=1):
        rows.append(row(name, args.rounds, args.seeds))
        print(f"[{i}/{len(names)}] {name}: " + ", ".join(f"{k} {v:.3g}" for k, v in rows[-1].items() if isinstance(v, float)),
              flush=True)
    frame = pd.DataFrame(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(args.out / "digits.csv", index=False)
    (args.out / "digits.json").write_text(json.dumps(provenance(rounds=args.rounds, seeds=args.seeds, preset="digits"), indent=1))
    (args.out / "digits.md").write_text(text(frame))
    print(text(frame))
    print(args.out / "digits.md")


if __name__ == "__main__":
    main()
