"""Replays of the FL-Simulator release (FedCM, FedSpeed): uniform average, no momentum, clip 10 (never active)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Recorded, config, federation, play, split
from test_golden import far, recorded

HERE = Path(__file__).parent
CASES = [
    ("fedcm", {"alpha_cm": 0.1}),
    ("fedspeed", {"rho": 0.1, "lam": 0.1}),
    # FedTOGA without its two corrections is FedSpeed
    ("fedtoga", {"rho": 0.1, "lam": 0.1, "kappa": 0.0, "beta_dual": 0.0}),
]


@pytest.mark.parametrize("stack", ["off", "on"])
@pytest.mark.parametrize(("method", "options"), CASES)
def test_rounds_of_the_released_code(method, options, stack):
    name = "fedspeed" if method == "fedtoga" else method
    with np.load(HERE / f"flsim_{name}.npz", allow_pickle=False) as file:
        z = {k: file[k] for k in file.files}
    hyper = json.loads(str(z["hyper"]))
    n, rounds = len(z["n_k"]), len(z["sampled"])
    data = recorded(
        np.concatenate([z[f"X_{k}"] for k in range(n)]),
        np.concatenate([z[f"y_{k}"] for k in range(n)]),
    )
    positions = [
        {k: [b[b >= 0].tolist() for b in z["batches"][t, k]] for k in range(n)}
        for t in range(rounds)
    ]
    chosen = config(
        method,
        options,
        model_options={"hidden": (6, 5)},
        lr=hyper["local_learning_rate"],
        momentum=0.0,
        lr_decay=hyper["lr_decay"],
        weight_decay=hyper["weight_decay"],
        aggregate="uniform",
        clip=10.0,
        rounds=rounds,
        stack=stack,
    )
    made = federation(
        chosen,
        (data, split(z["n_k"])),
        schedule=Recorded(z["sampled"].tolist(), positions),
        start=torch.from_numpy(z["w0"]),
    )
    for t, order in enumerate(z["sampled"]):
        assert far(made.w, z["w_global"][t]) <= 1e-10
        if method == "fedcm":
            assert far(made.state["delta"], z["sent_Client_momentum"][t, 0]) <= 1e-10
        [(seen, _)] = play(made)
        for position, k in enumerate(order):
            assert far(seen.rows[seen.ids.index(k)], z["w_clients"][t, position]) <= 1e-10
        if name == "fedspeed":
            for k, state in made.clients.items():
                assert far(state["h_k"], z["h_k"][t + 1, k]) <= 1e-10
    assert far(made.w, z["w_global"][-1]) <= 1e-10
