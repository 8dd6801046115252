"""Every method against its published algorithm, client by client, on the minibatches that the run drew."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import Watch, value, vector

import fldiag
from fldiag import registry

LR, DECAY, ROUNDS, HIDDEN = 0.1, 0.9, 4, 5
SEED = 8  # of four clients, 1 joins in round 2, 3 pauses in it, and 0 is gone in round 3
BODY = slice(0, 5 * HIDDEN)  # 4 -> HIDDEN -> 3
HEAD = slice(5 * HIDDEN, 8 * HIDDEN + 3)


def grad(loss):
    """The gradient of ``loss(v, ...)`` as a function of the same; that of torch.func takes twice as long."""

    def slope(v, *others):
        v = v.detach().requires_grad_()
        return torch.autograd.grad(loss(v, *others), v)[0]

    return slope


def parts_of(w):
    body, head = w[BODY], w[HEAD]
    return body[:-HIDDEN].view(HIDDEN, 4), body[-HIDDEN:], head[:-3].view(3, HIDDEN), head[-3:]


class Clients:
    """Those of the present round, as references see them: a gradient on a minibatch, and K local steps of one lr."""

    def __init__(self, toy, batches):
        self.toy, self.batches, self.sizes = toy, batches, toy.sizes
        self.number, self.public = len(toy.sizes), public_of(toy)
        self.slope = grad(lambda w, b: F.cross_entropy(self.outputs(w, b), toy.y[b]))

    def rounds(self):
        for self.t in range(ROUNDS):
            ids = [k for t, k in self.batches if t == self.t]
            total = sum(self.sizes[k] for k in ids)
            self.p, self.lr = {k: self.sizes[k] / total for k in ids}, LR * DECAY**self.t
            self.steps = {k: len(self.batches[self.t, k]) for k in ids}
            self.moving = [k for k in ids if self.steps[k]]
            yield

    def features(self, w, x):
        weight, bias, *_ = parts_of(w)
        return (x @ weight.T + bias).relu()

    def logits(self, w, x):
        *_, weight, bias = parts_of(w)
        return self.features(w, x) @ weight.T + bias

    def outputs(self, w, b):
        return self.logits(w, self.toy.x[b])

    def train(self, w, direction, starts=None):
        """Client -> weights after its steps against ``direction(k, v, b)``."""
        ends = {}
        for k in self.p:
            v = (w if starts is None else starts[k]).clone()
            for positions in self.batches[self.t, k]:
                v = v - self.lr * direction(k, v, self.toy.parts[k][positions])
            ends[k] = v
        return ends

    def mean(self, ends):
        return sum(self.p[k] * ends[k] for k in self.p)

    def kl(self, w, tau, x=None, reverse=False):
        """The gradient of KL(w || v) at temperature tau, of (v, b)."""

        def divergence(v, b):
            a, z = (self.logits(u, self.toy.x[b] if x is None else x) / tau for u in (w, v))
            return kl(z, a) if reverse else kl(a, z)

        return grad(divergence)


def kl(teacher, student):
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def unit(v, guard=0.0):
    return v / (v.norm() + guard) if v.norm() > 1e-12 else v * 0  # below: the noise of rounding


def sam(c, v, b, rho, guard=1e-7):
    """The gradient at SAM's point."""
    return c.slope(v + rho * unit(c.slope(v, b), guard), b)


def conflict_free(g, h):
    return g - g @ h / (h @ h) * h if g @ h < 0 else g


# Each: clients, memory (zero at first), received weights and options -> new weights.


def fedavg(c, m, w):
    return c.mean(c.train(w, lambda k, v, b: c.slope(v, b)))


def fedprox(c, m, w, mu):
    return c.mean(c.train(w, lambda k, v, b: c.slope(v, b) + mu * (v - w)))


def fedsam(c, m, w, rho):
    return c.mean(c.train(w, lambda k, v, b: sam(c, v, b, rho, 1e-12)))


def fedasam(c, m, w, rho):
    def direction(k, v, b):
        scaled = v.abs() * c.slope(v, b)
        return c.slope(v + rho * v.abs() * unit(scaled), b)

    return c.mean(c.train(w, direction))


def fedntd(c, m, w, mu, tau):
    def distance(v, b):
        others = ~F.one_hot(c.toy.y[b], 3).bool()
        a, z = (c.outputs(u, b)[others].view(len(b), 2) / tau for u in (w, v))
        return tau**2 * kl(a, z)

    return c.mean(c.train(w, lambda k, v, b: c.slope(v, b) + mu * grad(distance)(v, b)))


def moon(c, m, w, mu, tau):
    def contrast(v, b, before):
        z, received, previous = (c.features(u, c.toy.x[b]) for u in (v, w, before))
        closer = torch.exp(F.cosine_similarity(z, received) / tau)
        return -(closer / (closer + torch.exp(F.cosine_similarity(z, previous) / tau))).log().mean()

    def direction(k, v, b):
        return c.slope(v, b) + mu * grad(contrast)(v, b, m.get(k, m["w0"]))

    ends = c.train(w, direction)
    m.update(ends)
    return c.mean(ends)


def relaxed(z, y, attract, penalty, tau, threshold):
    """FedRCL's loss of representations [B, d]."""
    unit = F.normalize(z, dim=1)
    s, same = unit @ unit.T / tau, y[:, None] == y
    positive = s.where(same, torch.inf).min(1, keepdim=True).values  # the anchor among them
    negative = s.where(~same, -torch.inf).topk(2).values
    pull = -torch.cat([positive, negative], 1).log_softmax(1)[:, 0]
    least = s.where(same & ~torch.eye(len(y)).bool(), torch.inf).min(1).values
    close = least.isfinite() & (least >= threshold / tau)
    push = F.softplus(least.where(close, -1 / tau) - 1 / tau)
    return (attract * pull + penalty * push).mean()


def fedrcl(c, m, w, **options):
    def contrast(v, b):
        return relaxed(c.features(v, c.toy.x[b]), c.toy.y[b], **options)

    return c.mean(c.train(w, lambda k, v, b: c.slope(v, b) + grad(contrast)(v, b)))


def fedbabu(c, m, w):
    return c.mean(
        c.train(w, lambda k, v, b: c.slope(v, b).index_fill(0, torch.arange(25, 43), 0.0))
    )


def perfedavg(c, m, w, beta_outer):
    def direction(k, v, b):
        half = (len(b) + 1) // 2
        inner = v - c.lr * c.slope(v, b[:half])
        return beta_outer / c.lr * c.slope(inner, b[half:] if len(b) > 1 else b)

    return c.mean(c.train(w, direction))


def local_only(c, m, w):
    m.update(c.train(w, lambda k, v, b: c.slope(v, b), {k: m.get(k, w) for k in c.p}))
    return w


def strengths(d, rule):
    """|d| over its norm: of a layer, of a tensor, or along the first axis of a tensor."""
    if rule == "layer":
        return torch.cat([unit(d[layer]).abs() for layer in (BODY, HEAD)])
    tensors = [t if rule == "dim0" else t.flatten() for t in parts_of(d)]
    return torch.cat([F.normalize(t, dim=0).abs().flatten() for t in tensors])


def proximal_slope(c, w, loss, tau):
    return c.kl(w, tau) if loss == "kl" else lambda v, b: v - w


def fedsol(c, m, w, **options):
    return strategy(c, m, w, id="A1", beta_prox=0.0, **options)


def strategy(c, m, w, id, rho, beta_prox, part="head", strength="adaptive", **more):
    slope_p = proximal_slope(c, w, more.get("loss", "kl"), more.get("tau", 3.0))
    where = {"full": slice(None), "head": HEAD, "body": BODY}[part]

    def direction(k, v, b):
        g, g_p, e = c.slope(v, b), slope_p(v, b), torch.zeros_like(v)
        e[where] = rho * unit((g_p + g if id == "A4" else g_p)[where], 1e-12)
        if strength == "adaptive":
            e = e * strengths(v - w, more.get("lambda_norm", "layer"))
        local = g if id in ("A0", "A2", "A5") else c.slope(v + e, b)
        proximal = slope_p(v + e, b) if id in ("A2", "A3", "A4") else g_p
        return local + beta_prox * proximal * (id not in ("A0", "A1"))

    return c.mean(c.train(w, direction))


def gradient_projection(c, m, w, loss="kl", tau=3.0):
    slope_p = proximal_slope(c, w, loss, tau)

    def direction(k, v, b):
        g, g_p = c.slope(v, b), slope_p(v, b)
        return conflict_free(g, g_p) if g_p.norm() > 1e-12 else g

    return c.mean(c.train(w, direction))


def fedavgm(c, m, w, beta, server_lr):
    m["m"] = beta * m["m"] + w - fedavg(c, m, w)
    return w - server_lr * m["m"]


def fedadam(c, m, w, server_lr, beta1, beta2, tau, v0, yogi=False):
    delta, v = fedavg(c, m, w) - w, m.get("v", torch.full_like(w, v0))
    m["m"] = beta1 * m["m"] + (1 - beta1) * delta
    m["v"] = (
        v - (1 - beta2) * delta**2 * (v - delta**2).sign()
        if yogi
        else (beta2 * v + (1 - beta2) * delta**2)
    )
    return w + server_lr * m["m"] / (m["v"].sqrt() + tau)


def fedyogi(c, m, w, **options):
    return fedadam(c, m, w, yogi=True, **options)


def fedacg(c, m, w, beta, mu):
    a = w + beta * m["m"]
    ends = c.train(a, lambda k, v, b: c.slope(v, b) + 2 * mu * (v - a))
    m["m"] = c.mean(ends) - w
    return c.mean(ends)


def fedcm(c, m, w, alpha_cm, server_lr, rho=0.0):
    def direction(k, v, b):
        return alpha_cm * sam(c, v, b, rho) + (1 - alpha_cm) * m["delta"]

    ends = c.train(w, direction)
    m["delta"] = -sum((ends[k] - w) / (c.steps[k] * c.lr) for k in c.moving) / len(c.p)
    return w + server_lr * (c.mean(ends) - w)


def last_received(m, k, w):
    """FedLESAM's direction: from here to what the client had received when it took part last."""
    return unit(m["w", k] - w) if ("w", k) in m else torch.zeros_like(w)


def fedlesam(c, m, w, rho, estimate="client"):
    e = {k: rho * last_received(m, k, w) for k in c.p}
    m.update({("w", k): w for k in (c.p if estimate == "client" else range(c.number))})
    return c.mean(c.train(w, lambda k, v, b: c.slope(v + e[k], b)))


def scaffold(c, m, w, server_lr=1.0, rho=0.0, last=False, withheld=False):
    """``last``: FedLESAM's point, else SAM's; ``withheld``: c - c_k only says where FedSOL takes the gradient."""
    e = {k: rho * last_received(m, k, w) for k in c.p}
    m.update({("w", k): w for k in c.p})

    def direction(k, v, b):
        correction = m["c"] - m[k]
        if withheld:
            return c.slope(v + rho * unit(correction), b)
        return (c.slope(v + e[k], b) if last else sam(c, v, b, rho)) + correction

    ends = c.train(w, direction)
    change = {k: (w - ends[k]) / (c.steps[k] * c.lr) - m["c"] for k in c.moving}
    m.update({k: m[k] + change[k] for k in change})
    m["c"] = m["c"] + sum(change.values()) / c.number
    return w + server_lr * (c.mean(ends) - w)


def fedlesam_s(c, m, w, **options):
    return scaffold(c, m, w, last=True, **options)


def fednova(c, m, w, ccvr, rho=0.0):
    """``rho``: FedSOL's, d - d_k only says where the gradient is taken."""

    def direction(k, v, b):
        correction = (m["d"] - m[k]) * (ccvr != "off")
        return c.slope(v + rho * unit(correction), b) + correction * (not rho)

    ends = c.train(w, direction)
    m.update({k: (w - ends[k]) / (c.lr * c.steps[k]) for k in c.moving})
    share = {k: c.sizes[k] / sum(c.sizes) for k in c.p}
    if ccvr == "fixed":
        m["d"] = (1 - sum(share.values())) * m["d"] + sum(share[k] * m[k] for k in c.moving)
    moved = sum(c.p[k] * c.lr * (w - ends[k]) / (c.lr * c.steps[k]) for k in c.moving)
    return w - sum(c.p[k] * c.steps[k] for k in c.p) * moved


def dynamic(c, m, w, lam, point, extra=lambda: 0.0, withheld=False, note=lambda k, g, used: None):
    """FedDyn's clients and server; the gradient is taken at ``point(k, v, b)``."""

    def direction(k, v, b):
        g = c.slope(point(k, v, b), b)
        used = g if withheld else g + lam * (v - w + m["h", k]) + extra()
        note(k, g, used)
        return used

    ends = c.train(w, direction)
    m.update({("h", k): m["h", k] + ends[k] - w for k in c.p})
    m["H"] = m["H"] + sum(ends[k] - w for k in c.p) / c.number
    return ends, c.mean(ends) + m["H"]


def feddyn(c, m, w, lam):
    return dynamic(c, m, w, lam, lambda k, v, b: v)[1]


def fedspeed(c, m, w, lam, rho):
    return dynamic(c, m, w, lam, lambda k, v, b: v + rho * unit(c.slope(v, b), 1e-7))[1]


def fedlesam_d(c, m, w, lam, rho):
    e = {k: rho * last_received(m, k, w) for k in c.p}
    m.update({("w", k): w for k in c.p})
    return dynamic(c, m, w, lam, lambda k, v, b: v + e[k])[1]


def fedsmoo(c, m, w, lam, rho):
    def point(k, v, b):
        e = rho * unit(c.slope(v, b) - m["mu", k] - m["s"], 1e-7)
        m["mu", k] = m["mu", k] + e - m["s"]
        return v + e

    _, new = dynamic(c, m, w, lam, point)
    m["s"] = rho * unit(sum(m["mu", k] for k in c.p))
    return new


def fedtoga(
    c, m, w, lam, rho, kappa, beta_dual, mode="global", registered="gradient", delta_scale="steps"
):
    before = {}

    def point(k, v, b):
        g, last = c.slope(v, b), before.get(k)
        q = {"global": g, "neighbour": last, "fusion": g if last is None else g + last}[mode]
        return v + rho * unit((g if q is None else q) + kappa * m["delta"], 1e-7)

    def note(k, g, used):
        before[k] = g if registered == "gradient" else used

    ends, new = dynamic(c, m, w, lam, point, lambda: beta_dual * m["delta"], note=note)
    lr = c.lr if delta_scale == "steps_lr" else 1.0
    m["delta"] = -sum((ends[k] - w) / (c.steps[k] * lr) for k in c.moving) / len(c.p)
    return new


def feddc(c, m, w, lam, omega="equal", rate="decayed"):
    size = {k: c.sizes[k] * c.number / sum(c.sizes) if omega == "n" else 1.0 for k in c.p}

    def direction(k, v, b):
        pull = lam / size[k] * (v - w + m["h", k])
        return c.slope(v, b) + pull + m["g"] / size[k] - m[k]

    ends = c.train(w, direction)
    lr = LR if rate == "initial" else c.lr
    change = {k: -m["g"] / size[k] - (ends[k] - w) / (c.steps[k] * lr) for k in c.moving}
    m.update({k: m[k] + change[k] for k in change})
    m["g"] = m["g"] + sum(size[k] * change[k] for k in change) / c.number
    m["H"] = m["H"] + sum(ends[k] - w for k in c.p) / c.number
    m.update({("h", k): m["h", k] + ends[k] - w for k in c.p})
    return c.mean(ends) + m["H"]


def fedsol_of(c, m, w, loss, rho, **_):
    """FedSOL with the proximal loss of another method."""
    if loss == "scaffold":
        return scaffold(c, m, w, rho=rho, withheld=True)
    if loss == "fednova":
        return fednova(c, m, w, "fixed", rho)
    return dynamic(c, m, w, 0.0, lambda k, v, b: v + rho * unit(v - w + m["h", k]), withheld=True)[
        1
    ]


def distilled(c, w, teacher, tau, lr, epochs, gamma=0.0, reverse=False):
    """The server's part, in epochs of one minibatch."""

    def loss(v):
        a, z = teacher / tau, c.logits(v, c.public) / tau
        return tau**2 * (kl(z, a) if reverse else kl(a, z)) + gamma * (v - w).square().sum()

    v = w
    for _ in range(epochs):
        v = v - lr * grad(loss)(v)
    return v


def feddf(c, m, w, **options):
    ends = c.train(w, lambda k, v, b: c.slope(v, b))
    teacher = sum(c.logits(v, c.public) for v in ends.values()) / len(ends)
    return distilled(c, c.mean(ends), teacher, **options)


def fedet(c, m, w, **options):
    ends = c.train(w, lambda k, v, b: c.slope(v, b))
    z = torch.stack([c.logits(v, c.public) for v in ends.values()])
    alpha = z.var(-1, correction=0, keepdim=True)
    return distilled(c, c.mean(ends), (alpha / alpha.sum(0) * z).sum(0), **options)


def fedproj(c, m, w, gamma_wd, eps, direction="teacher_student", **options):
    reverse = direction == "student_teacher"

    def forgetting(v):
        a, z = m["teacher"] / options["tau"], c.logits(v, c.public) / options["tau"]
        return kl(z, a) if reverse else kl(a, z)

    def free(k, v, b):
        return conflict_free(c.slope(v, b), grad(forgetting)(v)) if c.t else c.slope(v, b)

    ends = c.train(w, free)
    m["teacher"] = sum(c.logits(v, c.public) for v in ends.values()) / len(ends)
    return distilled(c, c.mean(ends), m["teacher"], gamma=gamma_wd, reverse=reverse, **options)


FULL = {"part": "full", "strength": "fixed", "rho": 0.4}
ADAPT = {"server_lr": 0.3, "beta1": 0.8, "beta2": 0.7, "tau": 0.02, "v0": 0.01}
SPEED = {"lam": 0.2, "rho": 0.4}
TOGA = SPEED | {"kappa": 2.0, "beta_dual": 0.9}
SERVER = {"tau": 2.0, "lr": 0.3, "epochs": 2}
CASES = [
    (fedavg, {}),
    (fedprox, {"mu": 0.7}),
    (fedsam, {"rho": 0.3}),
    (fedasam, {"rho": 0.5}),
    (fedntd, {"mu": 0.8, "tau": 2.0}),
    (moon, {"mu": 0.9, "tau": 0.5}),
    (fedrcl, {"attract": 0.5, "penalty": 0.7, "tau": 0.4, "threshold": 0.6}),
    (fedbabu, {}),
    (perfedavg, {"beta_outer": 0.07}),
    (local_only, {}),
    *[(fedsol, {"rho": 1.5, "lambda_norm": rule}) for rule in ("layer", "tensor", "dim0")],
    (fedsol, {"rho": 0.4, "part": "body", "strength": "fixed"}),
    (fedsol, {"rho": 2.0, "part": "full", "loss": "l2"}),
    *[(strategy, {"id": f"A{i}", "rho": 0.8, "beta_prox": 0.6}) for i in range(7)],
    (strategy, FULL | {"id": "A4", "beta_prox": 0.6, "loss": "l2"}),
    (gradient_projection, {"loss": "l2"}),
    (gradient_projection, {"tau": 2.0}),
    (fedavgm, {"beta": 0.7, "server_lr": 0.8}),
    (fedadam, ADAPT),
    (fedyogi, ADAPT),
    (fedacg, {"beta": 0.85, "mu": 0.05}),
    (fedcm, {"alpha_cm": 0.3, "server_lr": 0.7}),
    ("mofedsam", fedcm, {"alpha_cm": 0.3, "server_lr": 0.7, "rho": 0.4}),
    (scaffold, {"server_lr": 0.7}),
    ("fedgamma", scaffold, {"server_lr": 0.7, "rho": 0.4}),
    (fednova, {"ccvr": "off"}),
    (fednova, {"ccvr": "fixed"}),
    (fednova, {"ccvr": "official"}),
    *[(fedlesam, {"rho": 0.4, "estimate": estimate}) for estimate in ("client", "server")],
    (fedlesam_s, {"rho": 0.4}),
    (fedlesam_d, SPEED),
    (feddyn, {"lam": 0.2}),
    (fedspeed, SPEED),
    (fedsmoo, SPEED),
    *[(fedtoga, TOGA | {"mode": mode}) for mode in ("global", "neighbour", "fusion")],
    (fedtoga, TOGA | {"delta_scale": "steps_lr"}),
    (fedtoga, TOGA | {"mode": "fusion", "registered": "corrected"}),
    *[
        (feddc, {"lam": 0.2, "omega": o, "rate": r})
        for o, r in (("equal", "decayed"), ("n", "initial"))
    ],
    *[("fedsol", fedsol_of, FULL | {"loss": loss}) for loss in ("scaffold", "fednova", "feddyn")],
    (feddf, SERVER),
    (fedet, SERVER),
    *[
        (fedproj, SERVER | {"gamma_wd": 0.2, "eps": 0.0, "direction": d})
        for d in ("teacher_student", "student_teacher")
    ],
]
CASES = [case if len(case) == 3 else (case[0].__name__, *case) for case in CASES]


def config(toy, **overrides):
    """Unequal clients in small minibatches, plain SGD in float64."""
    train = {"epochs": 2, "batch_size": 6, "lr": LR, "lr_decay": DECAY, "precision": "fp64"}
    sections = {
        "rounds": ROUNDS,
        "seed": SEED,
        "data": {"name": f"npz:{toy.folder / 'toy.npz'}"},
        "partition": {"kind": "file", "path": str(toy.folder / "parts.json")},
        "clients": {"total": len(toy.sizes), "per_round": 3},
        "model": {"name": "mlp", "hidden": (HIDDEN,)},
        "train": train | {"momentum": 0.0, "weight_decay": 0.0},
    }
    return fldiag.Config.load("digits", **sections).replace(**overrides)


def public_of(toy):
    return toy.x[::3] / 2


@pytest.fixture(scope="module")
def public(toy, tmp_path_factory):
    path, x = tmp_path_factory.mktemp("public") / "public.npz", public_of(toy).float().numpy()
    y = torch.zeros(len(x), dtype=torch.int64).numpy()
    np.savez(path, train_images=x, train_labels=y, test_images=x, test_labels=y)
    return f"npz:{path}"


@pytest.mark.parametrize(("stack", "drop_last"), [("on", False), ("off", True)])
@pytest.mark.parametrize(
    ("name", "algorithm", "options"),
    CASES,
    ids=["-".join([n, *(v for v in o.values() if isinstance(v, str))]) for n, _, o in CASES],
)
def test_rounds_are_those_of_the_algorithm(
    name, algorithm, options, stack, drop_last, toy, public, tmp_path
):
    """Clients come and go and differ in their steps; with ``drop_last`` the smallest takes none."""
    Watch.batches.clear()
    needs_public = "public" in registry.method.get(name).meta["needs"]
    server = {"optimizer": "sgd"} if needs_public else {}
    method = {"of": name, "options": json.dumps(options | server)}
    chosen = config(
        toy,
        method={"name": "reference:watched", **method},
        data__public=public if needs_public else None,
        train__stack=stack,
        train__drop_last=drop_last,
    )
    run = fldiag.train(chosen, out=tmp_path / "run")
    clients, memory = (
        Clients(toy, dict(Watch.batches)),
        defaultdict(lambda: torch.zeros(1).double()),
    )
    w = memory["w0"] = run.checkpoint(1).received.double()
    assert {len(b) for b in clients.batches.values()} == ({0, 2, 4} if drop_last else {2, 4, 6})
    for t, _ in enumerate(clients.rounds()):
        w = algorithm(clients, memory, w, **options)
        torch.testing.assert_close(vector(run.checkpoint(t + 1).state), w, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("stack", ["on", "off"])
def test_the_reported_loss_is_each_clients_own(stack, toy, tmp_path):
    """Averaged over its steps, as its weights were before each; then over the clients by their examples."""
    Watch.batches.clear()
    method = {"name": "reference:watched", "of": "fedavg", "options": "{}"}
    run = fldiag.train(config(toy, method=method, train__stack=stack), out=tmp_path / "run")
    clients = Clients(toy, dict(Watch.batches))
    for t, _ in enumerate(clients.rounds()):
        losses = defaultdict(list)

        def direction(k, v, b, losses=losses):
            losses[k].append(float(F.cross_entropy(clients.outputs(v, b), toy.y[b])))
            return clients.slope(v, b)

        clients.train(run.checkpoint(t + 1).received.double(), direction)
        expected = sum(p * np.mean(losses[k]) for k, p in clients.p.items())
        assert value(run.metrics, "minibatch_loss", round=t + 1) == pytest.approx(expected, 1e-9)


def world_of(name):
    """Where a method can train on the digits, in float64."""
    needs = registry.method.get(name).meta["needs"]
    world = {"model": {"name": "mlp", "hidden": (8,)}, "rounds": 2, "clients__per_round": 2}
    world |= {"train__epochs": 1, "train__precision": "fp64"}
    world |= {"data__public": "holdout:200"} if "public" in needs else {}
    return world | ({"model": {"name": "small_resnet"}} if "stages" in needs else {})


@pytest.fixture(scope="module")
def simple():
    """The last weights of methods that several others are like, by how they were trained."""
    return {}


def last(out, name, options, world):
    chosen = fldiag.Config.load("digits", method={"name": name, **options}, **world)
    return fldiag.train(chosen, out=out).checkpoint(2).state


@pytest.mark.parametrize(
    "name", [n for n in registry.method.names() if registry.method.get(n).meta["equals"]]
)
def test_a_neutral_setting_is_the_simpler_method(name, simple, tmp_path):
    meta, world = registry.method.get(name).meta, world_of(name) | {"train__stack": "off"}
    shared = registry.method.get(meta["equals"]).options.model_fields
    simpler = {k: v for k, v in meta["neutral"].items() if k in shared}
    how = str((meta["equals"], simpler, world))
    if how not in simple:
        simple[how] = last(tmp_path / "simpler", meta["equals"], simpler, world)
    neutral = last(tmp_path / "neutral", name, meta["neutral"], world)
    assert all(torch.equal(neutral[n], expected) for n, expected in simple[how].items())


#: The norm of the last weights of methods with draws of their own, which no formula gives. Computed by commit 35863d3: who
#: draws otherwise cannot go on with runs that are there. Of stochastic depth, processors differ by 2e-5 and other draws by 3e-2.
DRAWS = [
    (
        "fedproj",
        {"memory_batch": 20, "proj_rate": 0.7, "lr": 0.001},
        pytest.approx(2.6307497798510706, rel=1e-7),
    ),
    (
        "fedproj",
        {"memory_size": 50, "memory_batch": 20, "lr": 0.001},
        pytest.approx(2.605380505479829, rel=1e-7),
    ),
    (
        "feddf",
        {"batch_size": 30, "epochs": 2, "lr": 0.001},
        pytest.approx(2.6059829469411198, rel=1e-7),
    ),
    ("mixup", {"g": 0.5}, pytest.approx(2.6076142278592767, rel=1e-7)),
    ("gradaug", {}, pytest.approx(55.3131682671036, rel=1e-7)),
    ("stochdepth", {"keep_last": 0.5}, pytest.approx(49.4923, rel=1e-4)),
]


@pytest.mark.parametrize(("name", "options", "norm"), DRAWS)
def test_a_method_keeps_its_own_draws(name, options, norm, tmp_path):
    state = last(tmp_path / "run", name, options, world_of(name))
    assert float(vector(state).norm()) == norm
