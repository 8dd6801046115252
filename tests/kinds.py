"""One picture of every kind, from tables made up in a moment: what the tests of print quality look at."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import torch

from fldiag.compare import picture as difference
from fldiag.diagnostics import (
    account,
    drift,
    fairness,
    flatness,
    forgetting,
    geometry,
    landscape,
    lora,
    matching,
    partition,
    paths,
    sharpness,
    spectrum,
)
from fldiag.diagnostics import personalise as personal
from fldiag.results.table import table

RUNS = ("fedavg round 30", "fedsol rho=2.0 round 30")
CLIENTS = (0, 3, 12, 13, 14, 15, 17, 18)


def rng():
    return np.random.default_rng(0)


def over_rounds(metrics, **more):
    return [
        dict(
            metric=m,
            run="fedavg",
            round=r,
            slice="test",
            scope="global",
            moment=moment,
            estimator="exact",
            value=v,
            **more,
        )
        for m, moment in metrics
        for r, v in enumerate(0.2 + 0.5 * rng().random(8), 1)
    ]


def surface(log=False):
    grid = np.linspace(-1, 1, 11)
    rows = [
        dict(
            metric="loss",
            run=run,
            slice="test",
            n_examples=500,
            x=x,
            y=y,
            value=0.5 + (300 if log else 5) * x * x + y * y + 0.1 * x,
        )
        for run in RUNS
        for y in grid
        for x in grid
    ]
    return table(
        rows
        + [
            dict(metric="eigenvalue", run=run, index=i, value=9.0 / i, residual=1e-6)
            for run in RUNS
            for i in range(1, 6)
        ]
    )


def accounted(spread=1.0):
    draw, rows = rng(), []
    common = dict(run="fedavg", round=30, slice="train", moment="trained")
    for k in (*CLIENTS, None):
        who = {
            **common,
            "scope": "global" if k is None else "client",
            "client": k,
            "estimator": "exact",
        }
        rows += [
            {**who, "metric": m, "value": v * (spread if k == 3 else 1)}
            for m, v in zip(
                ("change", "linear", "quadratic", "rest"), draw.normal(size=4), strict=True
            )
        ]
        rows += [
            {**who, "estimator": "eigen", "metric": m, "index": i, "value": draw.normal()}
            for i in range(6)
            for m in ("linear", "quadratic")
        ]
    return account.draw(table(rows))


def matched():
    draw, common = rng(), dict(run="fedavg", round=30, moment="trained")
    rows = [
        {
            **common,
            "scope": "pair",
            "metric": m,
            "client": a,
            "client_b": b,
            "diag_mode": mode,
            "data": "client",
            "value": 10 ** draw.uniform(-2, 4) if m == "H_N" else draw.random(),
        }
        for m in ("H_N", "H_D")
        for mode in ("diag", "tensor_trace")
        for a, b in itertools.combinations(CLIENTS, 2)
    ]
    rows += [
        {
            **common,
            "scope": "global",
            "metric": m,
            "diag_mode": mode,
            "data": "client",
            "self_pairs": False,
            "value": 0.5,
        }
        for m in ("H_N", "H_D")
        for mode in ("diag", "tensor_trace")
    ]
    rows += [
        {
            **common,
            "scope": "client" if k is not None else "global",
            "moment": "trained" if k is not None else "aggregated",
            "metric": m,
            "client": k,
            "index": 1,
            "value": draw.uniform(1, 200),
            "slice": "train",
            "converged": True,
        }
        for m in ("eigenvalue", "trace")
        for k in (*CLIENTS, None)
    ]
    return matching.draw(table(rows))


def held(clients, classes=10):
    labels = torch.arange(1700 * classes) % classes
    owners = np.minimum(rng().geometric(0.1, len(labels)) * (1 + labels.numpy() % 3), clients) - 1
    parts = [np.flatnonzero(owners == k) for k in range(clients)]
    return partition.measure(parts, labels, f"CIFAR-10, LDA, α = 0.1, {clients} clients")


def forgotten():
    rows = over_rounds([("accuracy", m) for m in ("received", "trained", "aggregated")])
    rows += [
        dict(
            metric=m,
            run="fedavg",
            round=8,
            moment="trained",
            scope="client",
            slice="test",
            client=k,
            index=c,
            value=v,
        )
        for m in ("class_forgetting", "class_examples")
        for k in CLIENTS
        for c, v in enumerate(rng().uniform(-1, 1, 10))
    ]
    return forgetting.draw(table(rows))


def drifted():
    rows = over_rounds(
        [
            (m, "trained")
            for m in (
                "global_local_divergence",
                "local_local_divergence",
                "update_cosine",
                "server_cosine",
                "gradient_cosine",
                "cka",
                "proximal_loss",
            )
        ]
    )
    rows += [
        r for rho in (0.0, 0.5, 1.0, 2.0) for r in over_rounds([("cos_gu_gp", "trained")], rho=rho)
    ]
    rows += [
        dict(
            metric="lambda_mean",
            run="fedavg",
            round=8,
            scope="global",
            moment="trained",
            estimator="exact",
            layer=name,
            value=0.1,
            scaled=0.7,
        )
        for name in ("conv1", "conv2", "fc", "classifier")
    ]
    return drift.draw(table(rows, rho=None, proximal=None))


def eigenvalues(per_layer=False):
    rows = [
        dict(metric="eigenvalue", run=r, index=i, value=30.0 / i, residual=1e-3)
        for r in RUNS
        for i in range(1, 6)
    ]
    names = ("conv1", "conv2", "fc", "classifier") if per_layer else ()
    return table(
        rows + [dict(metric="trace", run=r, layer=name, value=3.0) for r in RUNS for name in names]
    )


def own():
    return personal.draw(
        pd.DataFrame(
            [
                {
                    "metric": "personal_accuracy",
                    "run": run,
                    "scope": "client",
                    "client": i,
                    "index": e,
                    "value": 0.3 + 0.02 * i,
                }
                for run in RUNS
                for e in (0, 1, 5)
                for i in range(20)
            ]
        )
    )


def fair(clients=20):
    draw, whole = rng(), dict(round=30, scope="global", moment="aggregated", slice="test")
    right = np.sort(draw.uniform(0.3, 1, clients))
    rows = [
        dict(
            round=30,
            scope="client",
            metric="accuracy",
            client=k,
            value=v,
            low=v - 0.1,
            high=min(v + 0.1, 1),
            size=draw.integers(20, 200),
            n_examples=30,
        )
        for k, v in enumerate(right)
    ]
    rows += [
        {**whole, "metric": m, "value": v, "estimator": "bayesian bootstrap"}
        for m, v in (
            ("mean_accuracy", right.mean()),
            ("worst_decile", 0.35),
            ("accuracy_gini", 0.08),
            ("ece", 0.12),
        )
    ]
    rows += [{**whole, "metric": m, "value": v} for m, v in (("ece_floor", 0.02),)]
    return fairness.draw(table(rows))


def sharp():
    rows = [
        dict(run=run, metric=f"{kind}_{case}", value=v, stderr=v / 9)
        for run, v in (("fedsol-digits", 0.04), ("fedavg-digits", 0.05))
        for kind in ("adaptive", "plain")
        for case in ("sharpness", "average")
    ]
    return sharpness.draw(table(rows))


def shapes():
    metrics = ("nc1", "nc2_norms", "nc2_cosines", "nc3", "nc4", "effective_rank")
    rows = [
        dict(metric=m, round=r, moment=moment, scope="global", slice="train", value=v, stderr=v / 9)
        for r, v in enumerate(1 + rng().random(6), 1)
        for m in metrics
        for moment in ("received", "aggregated", "trained")
    ]
    rows += [
        dict(metric="cka", round=r, moment="trained", scope="global", layer=n, value=v, stderr=0.1)
        for r in (1, 6)
        for n, v in (("features.0", 0.9), ("features.4", 0.7), ("classifier", 0.4 + r / 20))
    ]
    return geometry.draw(table(rows))


def flat():
    rows = []
    for r, v in enumerate(1 + rng().random(6), 1):
        both = [
            (f"{m}{end}", moment, v * factor)
            for m in ("sharpness", "adaptive_sharpness", "eigenvalue", "trace")
            for end, moment, factor in (
                ("", "aggregated", 1),
                ("_parts", "trained", 40),
                ("_parts", "aggregated", 2),
            )
        ]
        both += [(m, "trained", v / 4) for m in ("trace_gap",)]
        rows += [
            dict(metric=m, round=r, moment=moment, scope="global", value=x, stderr=0.1 * x)
            for m, moment, x in both
        ]
        rows += [
            dict(metric=m, round=r, moment="trained", scope="client", client=k, value=v * (k + 1))
            for k in range(5)
            for m in (
                "sharpness",
                "adaptive_sharpness",
                "eigenvalue",
                "trace",
            )
        ]
    return flatness.draw(table(rows))


def connected(models):
    x, rows = np.linspace(0, 1, 11), []
    for i, (a, b) in enumerate(itertools.combinations(range(models), 2), 1):
        ends = dict(run=f"run {a}", run_b=f"run {b}", index=i, slice="train", n_examples=1000)
        rows += [
            {**ends, "metric": "loss", "x": v, "value": 1 + i * v * (1 - v), "stderr": 0.02}
            for v in x
        ]
        rows.append({**ends, "metric": "barrier", "x": 0.5, "value": i / 4, "stderr": 0.02})
    return paths.draw(table(rows))


def adapters():
    return lora.draw(
        table(
            [
                dict(metric=m, round=r, layer=f"layer{i}.query", value=i + r / 10, scaled=scaled)
                for r in range(1, 9)
                for i in range(8)
                for m, scaled in (
                    ("aggregation_error", None),
                    ("misalignment", r / 10),
                    ("effective_rank", None),
                )
            ]
        )
    )


def differing():
    rows = [
        dict(
            metric=m,
            run="fedsol",
            baseline_run="fedavg",
            value=1.0,
            baseline=0.9,
            difference=d,
            low=d - 0.1,
            high=d + 0.1,
            better=b,
            note="",
            p=0.01,
            p_holm=0.02,
            masked=False,
        )
        for m, d, b in (
            ("accuracy", 0.02, "undecided"),
            ("loss", -0.2, "A"),
            ("lambda_1", 2.0, "B"),
            ("ece", 0.15, "B"),
        )
    ]
    rows.append(
        {
            **rows[0],
            "metric": "forgetting",
            "low": None,
            "high": None,
            "note": "one seed, and no examples to draw from",
        }
    )
    return difference.draw(table(rows))


def travelled():
    way = [
        dict(
            metric="trajectory",
            run=RUNS[0],
            slice="test",
            round=i,
            x=0.9 - 0.1 * i,
            y=0.8 - 0.09 * i,
        )
        for i in range(10)
    ]
    way += [dict(metric="point", run=RUNS[0], slice="test", index=1, x=-0.5, y=-0.6)]
    return landscape.draw(table([*surface().query(f"run == {RUNS[0]!r}").to_dict("records"), *way]))


KINDS = {
    "landscape": lambda: landscape.draw(surface()),
    "landscape, log": lambda: landscape.draw(surface(True)),
    "account": accounted,
    "account, far": lambda: accounted(1e3),
    "matching": matched,
    "partition": lambda: partition.draw(held(12)),
    "partition, many": lambda: partition.draw(held(50)),
    "forgetting": forgotten,
    "drift": drifted,
    "spectrum": lambda: spectrum.draw(eigenvalues()),
    "personalise": own,
    "fairness": fair,
    "fairness, many": lambda: fair(90),
    "flatness": flat,
    "geometry": shapes,
    "sharpness": sharp,
    "paths": lambda: connected(3),
    "paths, many": lambda: connected(5),
    "adapters": adapters,
    "difference": differing,
    "trajectory": travelled,
}
