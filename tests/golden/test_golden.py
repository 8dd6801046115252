"""Replays of the authors' released code: same data, clients and minibatches, so the same vectors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Recorded, StartAt, config, federation, play, split, trace

from fldiag.data import Dataset
from fldiag.method import Method

HERE = Path(__file__).parent
FIXED = {"rho": 1.0, "part": "full", "strength": "fixed", "tau": 3.0}
CASES = [
    ("fedavg", "fedavg", {}, 1e-10),
    ("fedprox", "fedprox", {"mu": 0.5}, 1e-10),
    ("scaffold", "scaffold", {}, 1e-10),
    ("feddyn", "feddyn", {"lam": 0.1}, 1e-10),
    ("fedntd", "fedntd", {"mu": 1.0, "tau": 1.0}, 1e-10),
    ("fedsam", "fedsam", {"rho": 0.5}, 1e-10),
    ("fedsol_fixed_full_floor", "fedsol", FIXED, 1e-10),
    ("fedsol_fixed_full", "fedsol", FIXED, 1e-4),
    ("fedsol_fixed_full", "fedsol", {**FIXED, "official_eps": True}, 1e-4),
]


def load(name):
    with np.load(HERE / f"fedsol_repo_{name}.npz", allow_pickle=False) as z:
        return {k: z[k] for k in z.files}


def recorded(x, y):
    """A data set with the recorded float64 inputs (a Dataset stores float32, which would round them)."""
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    data = Dataset("golden", x.float(), y, x.float(), y, 3)
    object.__setattr__(data, "train_x", x)
    return data


def golden_config(method, options, hyper, **more):
    return config(
        method,
        options,
        model_options={"hidden": (6, 5)},
        lr=hyper["lr"],
        momentum=hyper["momentum"],
        lr_decay=hyper.get("lr_decay_per_round", 1.0),
        weight_decay=hyper["weight_decay"],
        **more,
    )


def replay(name, method, options, stack):
    z = load(name)
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
    made = federation(
        golden_config(method, options, hyper, rounds=rounds, stack=stack),
        (data, split(z["n_k"])),
        schedule=Recorded(z["sampled"].tolist(), positions),
        start=torch.from_numpy(z["w0"]),
    )
    return z, made


def far(ours, theirs):
    return float(np.abs(ours.numpy() - theirs).max())


@pytest.mark.parametrize("stack", ["off", "on"])
@pytest.mark.parametrize(("name", "method", "options", "tolerance"), CASES)
def test_rounds_of_the_released_code(name, method, options, tolerance, stack):
    z, made = replay(name, method, options, stack)
    for t, order in enumerate(z["sampled"]):
        assert far(made.w, z["w_global"][t]) <= tolerance
        [(seen, _)] = play(made)
        for position, k in enumerate(order):
            theirs = z["w_clients"][t, position]
            assert far(seen.rows[seen.ids.index(k)], theirs) <= tolerance
            assert (
                np.abs(theirs - z["w_global"][t]).max() > 1e-2
            )  # the comparison is not of a standstill
    assert far(made.w, z["w_global"][-1]) <= tolerance


def test_control_variates_of_the_released_code():
    z, made = replay("scaffold", "scaffold", {}, "off")
    for t in range(len(z["sampled"])):
        play(made)
        assert far(made.state["c"], z["c"][t + 1]) <= 1e-10
        for k, state in made.clients.items():
            assert far(state["c_k"], z["c_k"][t + 1, k]) <= 1e-10
    assert np.abs(z["c"][-1]).max() > 1e-2


def test_gradient_memories_of_the_released_code():
    """The release keeps -lam h_k; the two forms are one method."""
    z, made = replay("feddyn", "feddyn", {"lam": 0.1}, "off")
    for t in range(len(z["sampled"])):
        play(made)
        assert far(-0.1 * made.state["h"], z["h_server"][t + 1]) <= 1e-10
        for k, state in made.clients.items():
            assert far(-0.1 * state["h_k"], z["grad_k"][t + 1, k]) <= 1e-10
    assert np.abs(z["h_server"][-1]).max() > 1e-3


def test_norms_of_the_gradients_that_define_the_perturbation():
    z, made = replay("fedsam", "fedsam", {"rho": 0.5}, "off")
    [part] = made.setup.method.parts
    inner, norms = part.perturb, []

    def perturb(step):
        norms.append(float(step.local_gradient()[1].norm()))
        return inner(step)

    part.perturb = perturb
    play(made, len(z["sampled"]))
    theirs = [
        z["trace_first_grad_norm"][t, list(order).index(k)]
        for t, order in enumerate(z["sampled"])
        for k in sorted(order)
    ]
    assert np.abs(np.array(norms) - np.concatenate(theirs)).max() <= 1e-10


def test_steps_of_the_released_code_away_from_the_received_weights():
    z = load("fedsol_fixed_full_offset")
    hyper = json.loads(str(z["hyper"]))
    data = recorded(z["X"], z["y"])
    made = federation(
        golden_config("fedsol", FIXED, hyper, total=1),
        (data, [np.arange(24)]),
        schedule=Recorded([[0]], [{0: z["batches"].tolist()}]),
        start=torch.from_numpy(z["w_global"]),
    )
    made.setup.method = Method(StartAt(torch.from_numpy(z["w_start"])), *made.setup.method.parts)
    spy = trace(made)
    proximal = []
    part = made.setup.method.parts[1]
    whole = part.gradient
    part.gradient = lambda *a: proximal.append(whole(*a)) or proximal[-1]
    [(seen, _)] = play(made)
    for s in range(len(z["batches"])):
        assert far(spy.w[s][0], z["trace_w"][s]) <= 1e-10
        assert far(proximal[s][0], z["trace_gp"][s]) <= 1e-10
        assert far(spy.e[s][0], z["trace_eps"][s]) <= 1e-10
        assert far(spy.g[s][0], z["trace_gu"][s]) <= 1e-10
    assert far(seen.rows[0], z["w_end"]) <= 1e-10
