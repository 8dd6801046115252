"""Runs and tables as the verbs leave them on disk, made up in a moment: what a report is made from."""

import base64
import gzip
import json
import shutil

import numpy as np
import pandas as pd

from fldiag import config as configs
from fldiag.results.table import table
from fldiag.runs.run import Run

EVIL = "<script>alert(1)</script>"
CLIENTS, CLASSES = (1, 4, 7), 3


def unpacked(text):
    """What ``pages.pack`` packed."""
    return gzip.decompress(base64.b85decode(text.translate(str.maketrans("/,.", "&<>"))))


def run(
    folder,
    method="fedavg",
    seed=0,
    rounds=3,
    data="d0",
    keep="sampled",
    accuracy=0.5,
    status="finished",
    salt="",
    steps=0,
    **options,
):
    """A run folder; round r has accuracy + r/100 (0.99 at most). ``salt``: other weights. ``steps``: local steps recorded in each round."""
    config = configs.load(
        "digits",
        [
            f"method.name={method}",
            f"seed={seed}",
            f"rounds={rounds}",
            "model.name=mlp",
            f"checkpoint.clients={keep}",
            *(f"{k.replace('__', '.')}={v}" for k, v in options.items()),
        ],
    )
    about = {"data": data, "fldiag": "1.2.3", "torch": "2", "device": "cpu", "dtype": "float32"}
    if folder.exists():  # the tables beside it stay
        (folder / "rounds.jsonl").unlink(missing_ok=True)
        shutil.rmtree(folder / "rounds", ignore_errors=True)
    made = Run.create(
        folder, config.model_dump(mode="json"), about | {"seed": seed}, hash=config.hash
    )
    made.put("partition.npz", lambda f: f.write(f"partition {config.partition}".encode()))
    made.begin()
    for r in range(1, rounds + 1):
        made.put(made.round_file(r), lambda f, r=r: f.write(f"{folder} {r} {salt}".encode()))
        if steps:
            made.put_steps(r, step_rows(r, steps, folder.name))
    rows = [
        {
            "round": r,
            "moment": "aggregated",
            "scope": "global",
            "slice": "test",
            "metric": m,
            "value": v,
            "n_examples": 200,
            "estimator": "exact",
        }
        for r in range(1, rounds + 1)
        for m, v in (("accuracy", min(accuracy + r / 100, 0.99)), ("loss", 2 / r))
    ]
    made.append(rounds, rows)
    made.append(rounds, [], status=status)
    return made


def step_rows(r, steps, name):
    """loss = client + step / 10 and, by layer, lambda_mean; scaled is ten times the value."""
    base = {"round": r, "moment": "trained", "scope": "client", "estimator": "minibatch"}
    rows = [
        {
            **base,
            "client": k,
            "index": s,
            "metric": "loss",
            "value": k + s / 10,
            "proximal": None,
            "scaled": None,
        }
        for k in CLIENTS
        for s in range(1, steps + 1)
    ]
    rows += [
        {
            **base,
            "client": k,
            "index": s,
            "metric": "lambda_mean",
            "layer": layer,
            "value": k / 100,
            "scaled": k / 10,
            "proximal": None,
        }
        for k in CLIENTS
        for s in range(1, steps + 1)
        for layer in ("fc1", "head")
    ]
    return table(rows, run=name)


def sha(made, r):
    return made.files[f"rounds/{r:04d}.safetensors"]


def write(path, rows, about, text=None, **common):
    """NAME.csv with NAME.json beside it, as verbs write them; returns the CSV's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    csv = path.with_name(path.name + ".csv")
    csv.write_text(
        table(rows, **common).to_csv(index=False, float_format="%.9g") if text is None else text
    )
    path.with_name(path.name + ".json").write_text(
        json.dumps({"fldiag": "1.2.3", "device": "cpu", "seed": 0, **about})
    )
    return csv


def of_run(made, kind, rows, name=None, rounds=None, folder=None, label=None, **options):
    """A table of a whole run, such as that of ``fldiag forgetting``."""
    there = list(range(1, made.done + 1)) if rounds is None else rounds
    about = {
        "diagnostic": kind,
        "run": made.path.name,
        "config": made.hash,
        "options": options,
        "checkpoints": {**{str(r): sha(made, r) for r in there}, "metrics": "0" * 64},
    }
    return write(
        (folder or made.path / "diagnostics") / (name or f"{kind}-1"),
        rows,
        about,
        run=label or made.path.name,
    )


def of_checkpoints(
    made,
    verb,
    rows,
    name=None,
    folder=None,
    round=None,
    labels=None,
    slice="train",
    n=100,
    **options,
):
    """A table of checkpoints (of one run, or a list of runs), such as that of ``fldiag landscape``; ``rows``: label -> rows."""
    runs = made if isinstance(made, list) else [made]
    labels = labels or [f"checkpoint {i}" for i in range(len(runs))]
    about = {
        "diagnostic": verb,
        "options": options,
        "checkpoints": {
            label: {
                "file": "x.pt",
                "sha256": sha(m, round or m.done),
                "run": m.path.name,
                "slice": slice,
                "n": n,
            }
            for label, m in zip(labels, runs, strict=True)
        },
    }
    whole = [
        {**row, "run": label, "slice": slice, "n_examples": n}
        for label in labels
        for row in rows(label)
    ]
    return write((folder or runs[0].path / "diagnostics") / (name or f"{verb}-1"), whole, about)


def surface(top=4.0, points=5):
    axis = np.linspace(-1, 1, points)
    rows = [
        {
            "metric": "loss",
            "x": x,
            "y": y,
            "value": 1 + (top - 1) / 2 * (x * x + y * y),
            "stderr": 0.01,
        }
        for y in axis
        for x in axis
    ]
    return rows + eigenvalues(top)


def eigenvalues(top=4.0):
    return [
        {
            "metric": "eigenvalue",
            "index": i,
            "value": top / i,
            "residual": 1e-3,
            "converged": True,
            "moment": "aggregated",
            "scope": "global",
        }
        for i in (1, 2, 3)
    ]


def forgetting(rounds=3, clients=CLIENTS, classes=CLASSES, drop=0.2):
    rows = []
    for r in range(1, rounds + 1):
        base = {"round": r, "slice": "test", "estimator": "exact", "masked": False}
        for moment, value in (("received", 0.5), ("trained", 0.5 - drop), ("aggregated", 0.55)):
            rows.append(
                {
                    **base,
                    "metric": "accuracy",
                    "moment": moment,
                    "scope": "global",
                    "value": value + r / 100,
                    "low": value - 0.1 if moment != "trained" else None,
                    "high": value + 0.1 if moment != "trained" else None,
                }
            )
        trained = {**base, "moment": "trained", "scope": "global"}
        rows += [
            {**trained, "metric": m, "value": v}
            for m, v in (
                ("accuracy_std", 0.05),
                ("drop", drop + r / 100),
                ("drop_std", 0.04),
                ("forgotten", drop + 0.02),
                ("learned", 0.02),
                ("restored", 0.9),
                ("forgetting", 0.6),
            )
        ]
        rows += [
            {
                **base,
                "metric": "class_forgetting",
                "moment": "trained",
                "scope": "client",
                "client": c,
                "index": k,
                "value": None if (c, k) == (clients[0], 0) else (c - 4) * (k + 1) * r / 100,
            }
            for c in clients
            for k in range(classes)
        ]
        rows += [
            {**base, "metric": m, "moment": "trained", "scope": "client", "client": c, "value": v}
            for i, c in enumerate(clients)
            for m, v in (
                ("drop", drop + (0.1, -0.1, 0.05)[i % 3]),
                ("accuracy_seen", 0.9),
                ("forgotten", 0.05 + i / 10),
            )
        ]
    return rows + [
        {
            "metric": "class_examples",
            "scope": "client",
            "client": c,
            "index": k,
            "value": float(k != 1),
        }
        for c in clients
        for k in range(classes)
    ]


def drift(rounds=3, size=1.0):
    rows = []
    for r in range(1, rounds + 1):
        base = {
            "round": r,
            "moment": "trained",
            "scope": "global",
            "estimator": "exact",
            "rho": None,
            "proximal": None,
            "stderr": 0.1 * size,
        }
        rows += [
            {**base, "metric": m, "value": size / r}
            for m in (
                "global_local_divergence",
                "local_local_divergence",
                "update_cosine",
                "server_cosine",
                "proximal_loss",
                "cka",
            )
        ]
        rows.append({**base, "metric": "gradient_cosine", "moment": "received", "value": 0.3})
        rows += [
            {**base, "metric": "cos_gu_gp", "rho": rho, "value": 0.1 * rho - 0.2}
            for rho in (0.0, 2.0)
        ]
        rows.append({**base, "metric": "global_local_divergence", "layer": "fc1", "value": 99.0})
    return rows


def matching(round=3, clients=CLIENTS, size=1.0):
    base = {"round": round, "moment": "trained", "estimator": "exact"}
    rows = []
    for mode, data in (("diag", "client"), ("tensor_trace", "global")):
        for metric, value in (("H_N", size), ("H_D", 0.5)):
            about = {**base, "metric": metric, "diag_mode": mode, "data": data}
            rows += [
                {
                    **about,
                    "scope": "pair",
                    "client": a,
                    "client_b": b,
                    "value": value * (a + b) / 10,
                    "self_pairs": None,
                }
                for a in clients
                for b in clients
                if a < b
            ]
            rows += [
                {**about, "scope": "global", "value": value, "self_pairs": False},
                {**about, "scope": "global", "value": value / 2, "self_pairs": True},
            ]
    for c in clients:
        about = {
            **base,
            "scope": "client",
            "client": c,
            "slice": f"client:{c}/train",
            "converged": True,
        }
        rows += [
            {**about, "metric": "eigenvalue", "index": 1, "value": size * c, "residual": 0.01},
            {**about, "metric": "trace", "value": 3 * size * c, "stderr": 0.1},
        ]
    return rows


def account(round=3, clients=CLIENTS, size=1.0):
    rows = []
    for c in (*clients, None):
        base = {
            "round": round,
            "slice": "train",
            "client": c,
            "moment": "trained" if c else "aggregated",
            "scope": "client" if c else "global",
        }
        rows += [
            {**base, "metric": m, "estimator": "exact", "value": size * v * (c or 2)}
            for m, v in (("change", 0.5), ("linear", -0.2), ("quadratic", 0.6), ("rest", 0.1))
        ]
        rows += [
            {**base, "metric": m, "estimator": "eigen", "index": i, "value": 0.1 * i}
            for m in ("linear", "quadratic")
            for i in (1, 2, 0)
        ]
        rows += [
            {**base, "metric": m, "estimator": "layer", "layer": layer, "value": 0.3}
            for m in ("linear", "quadratic")
            for layer in ("fc1", "<b>head</b>")
        ]
    return rows


def personal(clients=CLIENTS):
    return [
        {
            "metric": "personal_accuracy",
            "scope": "client",
            "moment": "trained",
            "client": c,
            "index": e,
            "slice": "x",
            "value": 0.5 + c / 100 + e / 20,
        }
        for c in clients
        for e in (0, 1, 5)
    ]


def everything(made, size=1.0, **more):
    """All tables of a run in its own folder."""
    rounds = made.done
    of_run(made, "forgetting", forgetting(rounds, drop=0.2 * size), **more)
    of_run(made, "drift", drift(rounds, size), rho=[0.0, 2.0], **more)
    of_run(made, "matching", matching(rounds, size=size), **more)
    of_run(made, "account", account(rounds, size=size), **more)
    of_checkpoints(made, "landscape", lambda _: surface(4 * size), directions="eigen")
    of_checkpoints(made, "spectrum", lambda _: eigenvalues(4 * size), which="largest")
    write(
        made.path / "diagnostics" / "personalise-1",
        personal(),
        {
            "run": made.path.name,
            "diagnostic": "personalise",
            "options": {"epochs": None},
            "checkpoint": {"file": "x.pt", "sha256": sha(made, rounds)},
        },
        run=made.path.name,
    )
    return made


def frame(rows, **common):
    return pd.DataFrame(table(rows, **common))
