"""Every method at its documented defaults on digits: accuracy, sharpness, forgetting and cost in one table.

    python analyses/methods_on_digits.py [--rounds 20] [--seeds 3] [--only fedavg,fedsol] [--out figures/methods]

The ``digits`` preset as it is (20 clients, 10 a round, LDA 0.1, 5 epochs in batches of 20; plain SGD with lr 0.1, gradients
clipped at 10). It gives methods that distil 200 training examples as public inputs (no client has them) and methods that need
stages the small residual net; these are compared with FedAvg on it. Runs are kept under ``checkpoints/`` and used
again. Per method, mean and deviation over the seeds:

accuracy     of the final global model on the test set (for methods with a personal phase also the clients' mean on test
             sets with their own class mixture)
lambda_1     largest Hessian eigenvalue of the final global model on the training set
forgetting   accuracy of the received model minus that of a client's trained model, on the test set, mean over the clients
             of the last round
cost         multiply-adds of a round (all clients and the server) over those of FedAvg on the same model, counted
uplink       bytes a client sends a round over those of FedAvg
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
from torch.utils.flop_counter import FlopCounterMode

import fldiag
from fldiag import Config, registry
from fldiag.results.provenance import provenance
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run
from fldiag.training.server import Federation
from fldiag.training.setup import Setup


def config_for(method: str, rounds: int, seed: int) -> Config:
    return Config.load(
        "digits", method__name=method, rounds=rounds, seed=seed, checkpoint__every=rounds
    )


def accuracy(checkpoint: Checkpoint, client: int | None = None) -> float:
    problem = open_problem(checkpoint, slice="test", client=client)
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
    found = {
        "accuracy": accuracy(last),
        "lambda_1": float(spectrum[spectrum.metric == "eigenvalue"].value.iloc[0]),
        "forgetting": before - statistics.fmean(after),
    }
    if not run.metrics.query("metric == 'uplink'").value.any():
        found = {}  # nothing is sent: the global model is the one that training began with
    personal = run.metrics.query("metric == 'personal_accuracy' and scope == 'global'")
    return {**found, "personal": float(personal.value.iloc[-1])} if len(personal) else found


def received(checkpoint: Checkpoint) -> dict[str, Any]:
    """The weights that the last round's clients started from, by name."""
    from fldiag.params import Layout

    names = [n for n in checkpoint.state if n not in checkpoint.buffers]
    layout = Layout(tuple(names), tuple(checkpoint.state[n].shape for n in names), "")
    return layout.views(checkpoint.received)


@cache
def operations(method: str, model: str, public: str | None) -> int:
    """Multiply-adds of the second round (in the first, many methods have nothing to correct yet)."""
    config = config_for(method, 1, 0).replace(
        train__stack="off", model__name=model, data__public=public
    )
    made = Federation(Setup(config))
    made.round(partial(map, made.setup.train))
    with FlopCounterMode(display=False) as counter:
        made.round(partial(map, made.setup.train))
    return counter.get_total_flops() // 2


def row(method: str, rounds: int, seeds: int) -> dict[str, Any]:
    config = config_for(method, rounds, 0)
    plain = config.replace(method__name="fedavg")
    stored = [
        fldiag.train(c.replace(seed=seed), resume=True)
        for c in (config, plain)
        for seed in range(seeds)
    ]
    frame = pd.DataFrame([measure(run) for run in stored[:seeds]])
    line: dict[str, Any] = {
        "method": method,
        "model": config.model.name,
        "public": config.data.public or "",
    }
    for key in frame:
        line[key], line[f"{key}_std"] = (
            frame[key].mean(),
            frame[key].std(ddof=1) if seeds > 1 else float("nan"),
        )
    model, public = config.model.name, config.data.public
    uplink = [
        run.metrics.query("metric == 'uplink'").value.iloc[0] for run in (stored[0], stored[-1])
    ]
    return {
        **line,
        "cost": operations(method, model, public) / operations("fedavg", model, public),
        "uplink": uplink[0] / uplink[1],
        "seeds": seeds,
        "rounds": rounds,
    }


def text(frame: pd.DataFrame) -> str:
    """The table in Markdown."""

    def cell(r: Any, key: str, scale: float = 1.0, digits: int = 1) -> str:
        value, spread = r.get(key), r.get(f"{key}_std")
        if value is None or pd.isna(value):
            return "–"
        return f"{scale * value:.{digits}f}" + (
            "" if pd.isna(spread) else f" ± {scale * spread:.{digits}f}"
        )

    head = "| method | model | accuracy % | personal % | λ1 | forgetting % | cost | uplink |\n|---|---|---|---|---|---|---|---|\n"
    return (
        head
        + "\n".join(
            f"| {r['method']}{'' if not r['public'] else ' (public data)'} | {r['model']} | {cell(r, 'accuracy', 100)} | "
            f"{cell(r, 'personal', 100)} | {cell(r, 'lambda_1', 1, 2)} | {cell(r, 'forgetting', 100)} | {r['cost']:.2f} | "
            f"{r['uplink']:.2f} |"
            for r in frame.to_dict("records")
        )
        + "\n"
    )


def write(frame: pd.DataFrame, out: Path, rounds: int, seeds: int) -> None:
    about = provenance(
        rounds=rounds, seeds=seeds, preset="digits"
    )  # the commit, before its own files change the tree
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out / "digits.csv", index=False)
    (out / "digits.json").write_text(json.dumps(about, indent=1), "utf-8")
    (out / "digits.md").write_text(text(frame), "utf-8")


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
        print(
            f"[{i}/{len(names)}] {name}: "
            + ", ".join(f"{k} {v:.3g}" for k, v in rows[-1].items() if isinstance(v, float)),
            flush=True,
        )
        write(pd.DataFrame(rows), args.out, args.rounds, args.seeds)
    print((args.out / "digits.md").read_text("utf-8"))
    print(args.out / "digits.md")


if __name__ == "__main__":
    main()
