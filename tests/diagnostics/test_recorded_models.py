"""Fairness of a recorded loop, and of trained runs what personalising, adapters and a partition are, computed anew."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from loops import ask, outputs
from reference import clients_of, rows, typed, value, values
from scipy.special import expit, logit
from torch.nn.functional import cross_entropy

import fldiag


def spreads(each):
    gini = np.abs(each[:, None] - each).mean() / (2 * each.mean())
    return {
        "mean_accuracy": each.mean(),
        "worst_decile": each.min(),
        "accuracy_variance": each.var(),
        "accuracy_gini": gini,
    }


def test_fairness(loop):
    """With basic intervals of the Bayesian bootstrap over the examples, of accuracies on their log odds; here of other draws."""
    table = ask(loop, "fairness", on="train", bins=5)
    (x, y), client = loop.all, np.repeat([0, 1, 2], [len(y) for _, y in loop.data])
    p = outputs(loop.past[-1], x).softmax(1)
    confidence, answer = (v.numpy() for v in p.max(1))
    right = (answer == y.numpy()) * 1.0
    bins = np.ceil(confidence * 5)

    def numbers(w):
        each = np.array([np.average(right[client == k], weights=w[client == k]) for k in range(3)])
        gaps = [abs((w * (right - confidence))[bins == b].sum()) for b in range(1, 6)]
        whole = {"ece": sum(gaps) / w.sum(), "accuracy": np.average(right, weights=w)}
        return spreads(each) | whole

    found = rows(table, "accuracy", scope="client")["value"].tolist()
    assert found == pytest.approx([right[client == k].mean() for k in range(3)])
    rng = np.random.default_rng(0)
    draws = [numbers(rng.standard_exponential(len(y))) for _ in range(3000)]
    for name, number in numbers(np.ones(len(y))).items():
        (row,) = rows(table, name, scope="global", estimator="bayesian bootstrap").to_dict(
            "records"
        )
        assert row["value"] == pytest.approx(number), name
        drawn = np.array([d[name] for d in draws])
        quantiles = np.quantile(drawn, [0.975, 0.025])
        if name in ("accuracy", "mean_accuracy", "worst_decile"):
            ends = expit(2 * logit(number) - logit(quantiles))  # between 0 and 1
        else:
            ends = np.maximum(0, 2 * number - quantiles)
        assert (row["low"], row["high"]) == pytest.approx(ends, abs=0.2 * drawn.std()), name
        assert row["stderr"] == pytest.approx(drawn.std(), rel=0.1), name
    found = value(table, "loss", scope="global")
    assert found == pytest.approx(float(cross_entropy(outputs(loop.past[-1], x), y)))


def test_personalise(toy, tmp_path):
    """Full-batch steps from the final model at the decayed rate; tested on all examples of the client's classes."""
    run = toy.train("fedavg", tmp_path / "run")
    table = fldiag.diagnose(run, "personalise", epochs="0,4")
    state, accuracies = run.checkpoint(4).state, {0: [], 4: []}
    for k, part in enumerate(toy.parts):
        w, b = (v.clone().requires_grad_() for v in state.values())
        x, y = toy.x[part], toy.y[part]
        own = torch.isin(toy.y, y)
        for e in range(5):
            if e in accuracies:
                right = (toy.x @ w.T + b).argmax(1) == toy.y
                accuracies[e].append(float(right[own].double().mean()))
                found = value(table, "personal_accuracy", client=k, index=e)
                assert found == pytest.approx(accuracies[e][-1])
            loss = cross_entropy(x @ w.T + b, y)
            with torch.no_grad():
                for v, g in zip((w, b), torch.autograd.grad(loss, (w, b)), strict=True):
                    v -= 0.1 * 0.9**4 * g
    assert accuracies[0] != accuracies[4]
    for e, each in accuracies.items():
        at = {"scope": "global", "index": e}
        assert value(table, "personal_accuracy", **at) == pytest.approx(np.mean(each))
        assert value(table, "personal_accuracy_std", **at) == pytest.approx(np.std(each))


def test_adapters(toy, tmp_path):
    """sum p_k s B_k A_k against s (sum p_k B_k) (sum p_k A_k), of factors of rank 2."""
    model = {"name": "mlp", "hidden": (5,), "lora_rank": 2, "lora_alpha": 4.0}
    run = toy.train("fedavg", tmp_path / "run", rounds=2, model=model)
    stored, table = run.checkpoint(2), fldiag.diagnose(run, "lora", precision="fp64")
    n = np.array([toy.sizes[k] for k in clients_of(stored)])
    p, factors = n / n.sum(), {}
    for k, w in clients_of(stored).items():
        parts = w.split([v.numel() for v in stored.state.values()])
        views = {
            name: part.view_as(v)
            for (name, v), part in zip(stored.state.items(), parts, strict=True)
        }
        factors[k] = views["fc1.A"], views["fc1.B"]
    update = 2 * sum(q * b @ a for q, (a, b) in zip(p, factors.values(), strict=True))
    a, b = (sum(q * f[i] for q, f in zip(p, factors.values(), strict=True)) for i in (0, 1))
    at = {"round": 2, "layer": "fc1"}
    assert value(table, "update_norm", **at) == pytest.approx(float(update.norm()))
    error = float((update - 2 * b @ a).norm() / update.norm())
    assert value(table, "aggregation_error", **at) == pytest.approx(error)
    s = torch.linalg.svdvals(update)
    s = s[s > 1e-12 * s[0]] / s.sum()
    assert value(table, "effective_rank", **at) == pytest.approx(
        float((-(s * s.log()).sum()).exp())
    )
    for j, k in combinations(sorted(factors), 2):
        bases = [torch.linalg.qr(factors[i][0].T).Q for i in (j, k)]
        u, _, v = torch.linalg.svd(bases[0].T @ bases[1])
        found = value(table, "misalignment", client=j, client_b=k, **at)
        assert found == pytest.approx(float((bases[0] @ u @ v - bases[1]).norm()))


def test_partition(toy, tmp_path):
    """Sizes, and Jensen-Shannon distances (base 2) of class shares to those of all."""
    source = [f"data.name=npz:{toy.folder / 'toy.npz'}", "partition.kind=file"]
    source += [f"partition.path={toy.folder / 'parts.json'}", "clients.total=4"]
    words = [w for text in (*source, "clients.per_round=2") for w in ("--set", text)]
    answer = typed("partition", "digits", *words, "--json", "--out", tmp_path)
    assert answer.code == 0, answer.err
    paths = [Path(p) for p in json.loads(answer.out)["paths"]]
    tables = [pd.read_csv(p) for p in paths if p.suffix == ".csv"]
    (table,) = [t for t in tables if "metric" in t]
    y = toy.y.numpy()
    counts = np.array([np.bincount(y[part], minlength=3) for part in toy.parts])
    assert values(table, "size", scope="client") == counts.sum(1).tolist()

    def entropy(q):
        return -sum(v * np.log2(v) for v in q if v)

    q, whole = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    for k in range(4):
        js = entropy((q[k] + whole) / 2) - (entropy(q[k]) + entropy(whole)) / 2
        assert value(table, "jensen_shannon", client=k) == pytest.approx(js**0.5)
