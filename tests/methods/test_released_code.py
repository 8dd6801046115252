"""Replays of the authors' released code by ``fldiag.train``: same data, clients and minibatches, so the same vectors."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from reference import clients_of, vector
from torch import nn

import fldiag
from fldiag import Method, Part, registry

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def record(file):
    with np.load(GOLDEN / f"{file}.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


class Replay(Part):
    """Gives each client the minibatches of a record, in its float64; notes weights and gradients of the steps."""

    steps: ClassVar[list] = []

    def __init__(self, z):
        self.z = z

    def begin(self, local):
        local.memo["step"] = 0
        if "w_start" in self.z:
            local.w.copy_(torch.from_numpy(self.z["w_start"]))

    def batch(self, step):
        s, ids = step.local.memo["step"], step.local.ids[: step.k]
        step.local.memo["step"] += 1
        if "w_start" in self.z:
            rows = [(self.z["X"], self.z["y"], self.z["batches"][s])]
        else:
            z, t = self.z, step.local.t
            rows = [(z[f"X_{k}"], z[f"y_{k}"], z["batches"][t, k, s]) for k in ids]
        step.x = torch.from_numpy(np.stack([x[b] for x, _, b in rows]))
        step.y = torch.from_numpy(np.stack([y[b] for _, y, b in rows]))
        step.targets = [(step.y, 1.0)]

    def correct(self, step, g):
        self.steps.append((step.w[0].clone(), g[0].clone()))
        return g


def replay(file: str, method: str, options: str) -> Method:
    parts = registry.method.get(method).build(**json.loads(options))
    return Method(Replay(record(file)), *parts)


def net(shape, classes, file: str):
    """The release's MLP with the weights that it began with, in float64."""
    sizes, z = (8, 6, 5, 3), record(file)
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    module = nn.Sequential(*layers[:-1]).double()
    w = torch.from_numpy(z.get("w0", z.get("w_global")).copy())
    nn.utils.vector_to_parameters(w, module.parameters())
    return module


def train(tmp_path, file, method, options, stack, **overrides):
    z = record(file)
    hyper = json.loads(str(z["hyper"]))
    x, y = (
        np.concatenate([z[n] for n in sorted(z) if n.split("_")[0] == name]) for name in ("X", "y")
    )
    parts = {k: list(range(24 * k, 24 * k + 24)) for k in range(len(y) // 24)}
    np.savez(tmp_path / "d.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    config = fldiag.Config.load(
        "digits",
        rounds=len(z.get("sampled", [0])),
        data={"name": f"npz:{tmp_path / 'd.npz'}"},
        partition={"kind": "file", "path": str(tmp_path / "parts.json")},
        model={"name": "test_released_code:net", "file": file},
        method={"name": "test_released_code:replay", "file": file}
        | {"method": method, "options": json.dumps(options)},
        clients={"total": len(parts), "per_round": min(2, len(parts)), "sampling": "by_round"},
        train={"epochs": 2, "batch_size": 6, "precision": "fp64", "stack": stack, "lr": 0.05}
        | {"momentum": hyper["momentum"], "weight_decay": hyper["weight_decay"]}
        | {"lr_decay": hyper.get("lr_decay_per_round", hyper.get("lr_decay", 1.0))},
    )
    return z, fldiag.train(config.replace(**overrides), out=tmp_path / "run")


FIXED = {"rho": 1.0, "part": "full", "strength": "fixed", "tau": 3.0}
#: FL-Simulator: a uniform mean, and clients that fldiag draws with this seed.
UNIFORM = {"train__aggregate": "uniform", "clients__sampling": "fixed", "seed": 10}
CASES = [
    ("fedsol_repo_fedavg", "fedavg", {}, {}),
    ("fedsol_repo_fedprox", "fedprox", {"mu": 0.5}, {}),
    ("fedsol_repo_scaffold", "scaffold", {}, {}),
    ("fedsol_repo_feddyn", "feddyn", {"lam": 0.1}, {}),
    ("fedsol_repo_fedntd", "fedntd", {"mu": 1.0, "tau": 1.0}, {}),
    ("fedsol_repo_fedsam", "fedsam", {"rho": 0.5}, {}),
    ("fedsol_repo_fedsol_fixed_full_floor", "fedsol", FIXED, {}),
    ("flsim_fedcm", "fedcm", {"alpha_cm": 0.1}, UNIFORM),
    ("flsim_fedspeed", "fedspeed", {"rho": 0.1, "lam": 0.1}, UNIFORM),
]


@pytest.mark.parametrize("stack", ["on", "off"])
@pytest.mark.parametrize(("file", "method", "options", "more"), CASES, ids=[c[0] for c in CASES])
def test_rounds_of_the_released_code(file, method, options, more, stack, tmp_path):
    z, run = train(tmp_path, file, method, options, stack, **more)
    for t, ids in enumerate(z["sampled"].tolist()):
        stored = run.checkpoint(t + 1)
        ends = clients_of(stored)
        assert sorted(ends) == sorted(ids)
        for k, theirs in zip(ids, torch.from_numpy(z["w_clients"][t]), strict=True):
            torch.testing.assert_close(ends[k], theirs, rtol=0, atol=1e-10)
            assert (theirs - stored.received).abs().max() > 1e-2  # not a standstill
        theirs = torch.from_numpy(z["w_global"][t + 1])
        torch.testing.assert_close(vector(stored.state), theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("more", [{}, {"official_eps": True}])
def test_fedsol_with_its_perturbation_along_rounding_noise(more, tmp_path):
    """The release perturbs in the first step of a round, too, where the direction is noise: hence the tolerance."""
    z, run = train(tmp_path, "fedsol_repo_fedsol_fixed_full", "fedsol", FIXED | more, "off")
    theirs = torch.from_numpy(z["w_global"][-1])
    torch.testing.assert_close(vector(run.checkpoint(3).state), theirs, rtol=0, atol=1e-4)


def test_steps_of_fedsol_away_from_the_received_weights(tmp_path):
    Replay.steps.clear()
    z, run = train(tmp_path, "fedsol_repo_fedsol_fixed_full_offset", "fedsol", FIXED, "off")
    for name, ours in zip(("trace_w", "trace_gu"), zip(*Replay.steps, strict=True), strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.from_numpy(z[name]), rtol=0, atol=1e-10)
    theirs = torch.from_numpy(z["w_end"])
    torch.testing.assert_close(clients_of(run.checkpoint(1))[0], theirs, rtol=0, atol=1e-10)
