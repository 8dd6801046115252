"""Every method with a memory against its published algorithm, written out client by client for quadratics.

Four clients of unequal size, who take part in different rounds and take different numbers of full-batch steps, with a
learning rate that decays: a term with the wrong sign, state, weight or divisor shows.
"""

import pytest
import torch
from helpers import Recorded, federation, play, quadratics
from torch import zeros_like

SIZES, STEPS = (12, 8, 15, 10), (4, 2, 5, 3)
WHO = [[0, 2], [1, 2, 3], [0, 3], [0, 1, 2], [2, 3]]
N, LR, DECAY = 4, 0.08, 0.9
Q = quadratics(SIZES, spread=2.0)


def rounds():
    for t, who in enumerate(WHO):
        yield who, LR * DECAY**t


def p(k, who):
    return SIZES[k] / sum(SIZES[j] for j in who)


def sgd(k, w, lr, correct, at=lambda v, g: v):
    """The client's K_k steps: g_u = correct(v, gradient at ``at``)."""
    v = w.clone()
    for _ in range(STEPS[k]):
        v = v - lr * correct(v, Q.gradient(k, at(v, Q.gradient(k, v))))
    return v


def mean(who, ends):
    return sum(p(k, who) * ends[k] for k in who)


def unit(v):
    return v / (v.norm() + 1e-7)


def nothing(w):
    return {k: zeros_like(w) for k in range(N)}


def server_optimiser(step):
    """Clients as FedAvg; ``step(w, mean displacement, memory)`` gives the new weights."""

    def run(w):
        memory = {}
        for who, lr in rounds():
            w = step(w, mean(who, {k: sgd(k, w, lr, lambda v, g: g) for k in who}) - w, memory)
            yield w

    return run


def adaptive(kind):
    def step(w, delta, s, lr=0.3, beta1=0.8, beta2=0.7, tau=0.02, v0=0.01):
        s["m"] = beta1 * s.get("m", zeros_like(w)) + (1 - beta1) * delta
        v = s.get("v", torch.full_like(w, v0))
        s["v"] = (
            beta2 * v + (1 - beta2) * delta**2
            if kind == "adam"
            else v - (1 - beta2) * delta**2 * (v - delta**2).sign()
        )
        return w + lr * s["m"] / (s["v"].sqrt() + tau)

    return server_optimiser(step)


def avgm(w, delta, s):
    s["m"] = 0.7 * s.get("m", zeros_like(w)) - delta
    return w - 0.8 * s["m"]


def fedacg(w, beta=0.85, mu=0.05):
    m = zeros_like(w)
    for who, lr in rounds():
        a = w + beta * m
        ends = {k: sgd(k, a, lr, lambda v, g, a=a: g + 2 * mu * (v - a)) for k in who}
        m = beta * m + sum(p(k, who) * (ends[k] - a) for k in who)
        w = mean(who, ends)
        yield w


def fedcm(rho, alpha=0.3, server_lr=0.7):
    def run(w):
        delta = zeros_like(w)
        for who, lr in rounds():
            ends = {
                k: sgd(
                    k,
                    w,
                    lr,
                    lambda v, g, d=delta: alpha * g + (1 - alpha) * d,
                    lambda v, g: v + rho * unit(g),
                )
                for k in who
            }
            delta = -sum((ends[k] - w) / (STEPS[k] * lr) for k in who) / len(who)
            w = w + server_lr * (mean(who, ends) - w)
            yield w

    return run


def scaffold(rho, server_lr=0.7, last=False, withheld=None):
    """``last``: FedLESAM's point instead of SAM's; ``withheld``: FedSOL's, along c - c_k."""

    def run(w):
        c, own, seen = zeros_like(w), nothing(w), {}
        for who, lr in rounds():
            ends = {}
            for k in who:

                def at(v, g, k=k, w=w, c=c):
                    if withheld:
                        d = c - own[k]
                        return v + (withheld * d / d.norm() if d.norm() > 1e-12 else 0)
                    return v + rho * (unit(seen.get(k, w) - w) if last else unit(g))

                ends[k] = sgd(
                    k, w, lr, lambda v, g, k=k, c=c: g if withheld else g - own[k] + c, at
                )
                seen[k] = w
            news = {k: own[k] - c + (w - ends[k]) / (STEPS[k] * lr) for k in who}
            c = c + sum(news[k] - own[k] for k in who) / N
            own.update(news)
            w = w + server_lr * (mean(who, ends) - w)
            yield w

    return run


def dynamic(
    lam,
    at,
    remember=lambda *a: None,
    extra=lambda s: 0,
    start=lambda w: {},
    pulled=True,
    corrected=False,
):
    """FedDyn's dual and server; ``at(s, k, v, g)`` is where the gradient is taken, s the method's memory."""

    def run(w):
        s = {"w": w, "h": nothing(w), **start(w)}
        for who, lr in rounds():
            s["w"], ends = w, {}
            for k in who:
                s["before"] = None

                def correct(v, g, k=k, w=w):
                    used = g + (lam * (v - w + s["h"][k]) if pulled else 0) + extra(s)
                    s["before"] = used if corrected else g
                    return used

                ends[k] = sgd(k, w, lr, correct, lambda v, g, k=k: at(s, k, v, g))
            for k in who:
                s["h"][k] = s["h"][k] + ends[k] - w
            remember(s, who, ends, lr)
            w = mean(who, ends) + sum(s["h"].values()) / N
            yield w

    return run


def smoo_point(s, k, v, g, rho=0.4):
    e = rho * unit(g - s["mu"][k] - s["s"])
    s["mu"][k] = s["mu"][k] + (e - s["s"])
    return v + e


def smoo_server(s, who, ends, lr):
    bar = sum(s["mu"][k] for k in who) / len(who)
    s["s"] = 0.4 * bar / bar.norm()


def last_point(s, k, v, g, rho=0.4):
    return v + rho * unit(s["old"].get(k, s["w"]) - s["w"])


def last_server(s, who, ends, lr):
    s["old"].update(dict.fromkeys(who, s["w"]))


def toga_point(mode, kappa=2.0, rho=0.4):
    def at(s, k, v, g):
        before, delta = s["before"], s["delta"]
        q = {
            "global": g,
            "neighbour": g if before is None else before,
            "fusion": g if before is None else g + before,
        }[mode]
        return v + rho * unit(q + kappa * delta)

    return at


def toga_server(scale):
    def remember(s, who, ends, lr):
        s["delta"] = -sum(
            (ends[k] - s["w"]) / (STEPS[k] * (lr if scale else 1)) for k in who
        ) / len(who)

    return remember


def fedtoga(mode, scale=False, corrected=False):
    return dynamic(
        0.2,
        toga_point(mode),
        toga_server(scale),
        lambda s: 0.9 * s["delta"],
        lambda w: {"delta": zeros_like(w)},
        corrected=corrected,
    )


def fedlesam(w, rho=0.4):
    old = {}
    for who, lr in rounds():
        ends = {
            k: sgd(
                k, w, lr, lambda v, g: g, lambda v, g, k=k, w=w: v + rho * unit(old.get(k, w) - w)
            )
            for k in who
        }
        old.update(dict.fromkeys(who, w))
        w = mean(who, ends)
        yield w


def feddc(by_size, initial, lam=0.2):
    def run(w):
        h, own, shared = nothing(w), nothing(w), zeros_like(w)
        for who, lr in rounds():
            ends, delta = {}, zeros_like(w)
            for k in who:
                o = SIZES[k] * N / sum(SIZES) if by_size else 1.0
                ends[k] = sgd(
                    k,
                    w,
                    lr,
                    lambda v, g, k=k, o=o, w=w, s=shared: (
                        g + lam / o * (v - (w - h[k])) + s / o - own[k]
                    ),
                )
            for k in who:
                o = SIZES[k] * N / sum(SIZES) if by_size else 1.0
                h[k] = h[k] + ends[k] - w
                new = own[k] - shared / o - (ends[k] - w) / (STEPS[k] * (LR if initial else lr))
                delta, own[k] = delta + o * (new - own[k]) / N, new
            shared = shared + delta
            w = mean(who, ends) + sum(h.values()) / N
            yield w

    return run


def fednova(ccvr, withheld=None):
    def run(w):
        d, own = zeros_like(w), nothing(w)
        for who, lr in rounds():
            ends = {}
            for k in who:

                def at(v, g, x=d - own[k]):
                    return v + withheld * x / x.norm() if withheld and x.norm() > 1e-12 else v

                ends[k] = sgd(
                    k,
                    w,
                    lr,
                    lambda v, g, k=k, d=d: g + (0 if ccvr == "off" or withheld else d - own[k]),
                    at,
                )
            own.update({k: (w - ends[k]) / (lr * STEPS[k]) for k in who})
            if ccvr == "fixed":
                share = sum(SIZES[k] for k in who) / sum(SIZES)
                d = (1 - share) * d + sum(SIZES[k] / sum(SIZES) * own[k] for k in who)
            tau = sum(p(k, who) * STEPS[k] for k in who)
            w = w + tau * sum(p(k, who) * (ends[k] - w) / STEPS[k] for k in who)
            yield w

    return run


def projection(w):
    for who, lr in rounds():

        def away(v, g, w=w):
            d = v - w
            return g - g @ d / (d @ d) * d if g @ d < 0 else g

        w = mean(who, {k: sgd(k, w, lr, away) for k in who})
        yield w


def sol_feddyn(s, k, v, g, rho=0.4):
    d = v - s["w"] + s["h"][k]
    return v + (rho * d / d.norm() if d.norm() > 1e-12 else 0)


FULL = {"part": "full", "strength": "fixed", "rho": 0.4}
SPEED = {"rho": 0.4, "lam": 0.2}
TOGA = {**SPEED, "kappa": 2.0, "beta_dual": 0.9}
ADAPT = {"server_lr": 0.3, "beta1": 0.8, "beta2": 0.7, "tau": 0.02, "v0": 0.01}
CASES = [
    ("fedadam", ADAPT, adaptive("adam")),
    ("fedyogi", ADAPT, adaptive("yogi")),
    ("fedavgm", {"beta": 0.7, "server_lr": 0.8}, server_optimiser(avgm)),
    ("fedacg", {"beta": 0.85, "mu": 0.05}, fedacg),
    ("fedcm", {"alpha_cm": 0.3, "server_lr": 0.7}, fedcm(0.0)),
    ("mofedsam", {"rho": 0.4, "alpha_cm": 0.3, "server_lr": 0.7}, fedcm(0.4)),
    ("scaffold", {"server_lr": 0.7}, scaffold(0.0)),
    ("fedgamma", {"rho": 0.4, "server_lr": 0.7}, scaffold(0.4)),
    ("fedlesam", {"rho": 0.4}, fedlesam),
    ("fedlesam_s", {"rho": 0.4}, scaffold(0.4, 1.0, last=True)),
    ("fedlesam_d", SPEED, dynamic(0.2, last_point, last_server, start=lambda w: {"old": {}})),
    ("feddyn", {"lam": 0.2}, dynamic(0.2, lambda s, k, v, g: v)),
    ("fedspeed", SPEED, dynamic(0.2, lambda s, k, v, g: v + 0.4 * unit(g))),
    (
        "fedsmoo",
        SPEED,
        dynamic(
            0.2, smoo_point, smoo_server, start=lambda w: {"mu": nothing(w), "s": zeros_like(w)}
        ),
    ),
    *[
        ("fedtoga", {**TOGA, "mode": mode}, fedtoga(mode))
        for mode in ("global", "neighbour", "fusion")
    ],
    ("fedtoga", {**TOGA, "delta_scale": "steps_lr"}, fedtoga("global", True)),
    (
        "fedtoga",
        {**TOGA, "mode": "fusion", "registered": "corrected"},
        fedtoga("fusion", corrected=True),
    ),
    *[
        (
            "feddc",
            {"lam": 0.2, "omega": omega, "rate": rate},
            feddc(omega == "n", rate == "initial"),
        )
        for omega in ("equal", "n")
        for rate in ("decayed", "initial")
    ],
    *[("fednova", {"ccvr": ccvr}, fednova(ccvr)) for ccvr in ("off", "fixed", "official")],
    ("gradient_projection", {"loss": "l2"}, projection),
    ("fedsol", {**FULL, "loss": "scaffold"}, scaffold(0.0, 1.0, withheld=0.4)),
    ("fedsol", {**FULL, "loss": "fednova"}, fednova("fixed", withheld=0.4)),
    ("fedsol", {**FULL, "loss": "feddyn"}, dynamic(0.0, sol_feddyn, pulled=False)),
]


@pytest.mark.parametrize("stack", ["off", "on"])
@pytest.mark.parametrize(
    ("method", "options", "algorithm"),
    CASES,
    ids=["-".join([m, *(str(v) for v in o.values() if isinstance(v, str))]) for m, o, _ in CASES],
)
def test_rounds_are_those_of_the_algorithm(method, options, algorithm, stack):
    full = {k: [list(range(n))] * s for k, (n, s) in enumerate(zip(SIZES, STEPS, strict=True))}
    made = federation(
        Q.config(method, options, lr=LR, lr_decay=DECAY, rounds=len(WHO), per_round=2, stack=stack),
        Q.data,
        schedule=Recorded(WHO, [full] * len(WHO)),
    )
    start = made.w.clone()
    for w in algorithm(start):
        play(made)
        assert float((made.w - w).abs().max()) <= 1e-6 * (w - start).abs().max(), made.t
