"""Methods against their published algorithm, client by client on a small convex problem; neutral settings; aggregation."""

import pytest
import torch
import torch.nn.functional as F
from reference import clients_of, train, values, vector
from torch import zeros_like
from torch.func import grad

import fldiag
from fldiag import registry

LR, DECAY, STEPS = 0.1, 0.9, 3


class Clients:
    """The reference's clients of a run: mean gradients of the softmax regression on each one's data."""

    def __init__(self, toy, who, batch=1000):
        self.toy, self.who = toy, who  # who: the clients of every round
        self.number = len(toy.sizes)
        #: Smaller clients than a batch take no step where the last batch is dropped.
        self.steps = {k: STEPS * (batch == 1000 or n >= batch) for k, n in enumerate(toy.sizes)}

    def outputs(self, k, w):
        return self.toy.x[self.toy.parts[k]] @ w[:12].view(3, 4).T + w[12:]

    def loss(self, k):
        y = self.toy.y[self.toy.parts[k]]
        return lambda w: F.cross_entropy(self.outputs(k, w), y)

    def rounds(self):
        """Of every round: its clients' shares of the examples, and the learning rate."""
        for t, who in enumerate(self.who):
            total = sum(self.toy.sizes[k] for k in who)
            yield {k: self.toy.sizes[k] / total for k in who}, LR * DECAY**t

    def descend(self, k, w, lr, correct=lambda v, g: g, at=lambda v, g: v):
        slope, v = grad(self.loss(k)), w.clone()
        for _ in range(self.steps[k]):
            v = v - lr * correct(v, slope(at(v, slope(v))))
        return v


def fedavg(c, w):
    for p, lr in c.rounds():
        w = sum(p[k] * c.descend(k, w, lr) for k in p)
        yield w


def fedprox(c, w, mu):
    for p, lr in c.rounds():
        w = sum(p[k] * c.descend(k, w, lr, lambda v, g, w=w: g + mu * (v - w)) for k in p)
        yield w


def fedsam(c, w, rho):
    for p, lr in c.rounds():
        w = sum(p[k] * c.descend(k, w, lr, at=lambda v, g: v + rho * g / g.norm()) for k in p)
        yield w


def fedavgm(c, w, beta, server_lr):
    m = zeros_like(w)
    for p, lr in c.rounds():
        m = beta * m + w - sum(p[k] * c.descend(k, w, lr) for k in p)
        w = w - server_lr * m
        yield w


def fedyogi(c, w, server_lr, beta1, beta2, tau, v0):
    m, v = zeros_like(w), torch.full_like(w, v0)
    for p, lr in c.rounds():
        delta = sum(p[k] * c.descend(k, w, lr) for k in p) - w
        m = beta1 * m + (1 - beta1) * delta
        v = v - (1 - beta2) * delta**2 * (v - delta**2).sign()
        w = w + server_lr * m / (v.sqrt() + tau)
        yield w


def scaffold(c, w, server_lr):
    control, own = zeros_like(w), {k: zeros_like(w) for k in range(c.number)}
    for p, lr in c.rounds():
        ends = {k: c.descend(k, w, lr, lambda v, g, k=k: g - own[k] + control) for k in p}
        news = {k: own[k] - control + (w - ends[k]) / (STEPS * lr) for k in p if c.steps[k]}
        control = control + sum(news[k] - own[k] for k in news) / c.number
        own.update(news)
        w = w + server_lr * (sum(p[k] * ends[k] for k in p) - w)
        yield w


def feddyn(c, w, lam):
    memory = {k: zeros_like(w) for k in range(c.number)}
    for p, lr in c.rounds():
        pull = {k: (lambda v, g, w=w, h=memory[k]: g + lam * (v - w + h)) for k in p}
        ends = {k: c.descend(k, w, lr, pull[k]) for k in p}
        memory |= {k: memory[k] + ends[k] - w for k in p}
        w = sum(p[k] * ends[k] for k in p) + sum(memory.values()) / c.number
        yield w


def fednova(c, w, ccvr):
    d, own = zeros_like(w), {k: zeros_like(w) for k in range(c.number)}
    for p, lr in c.rounds():
        ends = {k: c.descend(k, w, lr, lambda v, g, k=k: g + d - own[k]) for k in p if c.steps[k]}
        own |= {k: (w - end) / (lr * STEPS) for k, end in ends.items()}
        share = {k: c.toy.sizes[k] / sum(c.toy.sizes) for k in p}
        d = (1 - sum(share.values())) * d + sum(share[k] * own[k] for k in ends)
        w = w - sum(p[k] * STEPS for k in ends) * sum(p[k] * lr * own[k] for k in ends)
        yield w


def fedntd(c, w, mu, tau):
    def distance(k, w):
        """tau^2 KL between the received and the client's model, over the classes that are not the true one."""
        y = c.toy.y[c.toy.parts[k]]
        others = ~F.one_hot(y, 3).bool()

        def log_probabilities(v):
            return (c.outputs(k, v)[others].view(len(y), 2) / tau).log_softmax(1)

        teacher = log_probabilities(w)
        return lambda v: (
            tau**2 * F.kl_div(log_probabilities(v), teacher, log_target=True, reduction="batchmean")
        )

    for p, lr in c.rounds():
        slope = {k: grad(distance(k, w)) for k in p}
        w = sum(p[k] * c.descend(k, w, lr, lambda v, g, k=k: g + mu * slope[k](v)) for k in p)
        yield w


METHODS = {
    fedavg: {},
    fednova: {"ccvr": "fixed"},
    fedntd: {"mu": 0.8, "tau": 2.0},
    fedprox: {"mu": 0.7},
    fedsam: {"rho": 0.3},
    fedavgm: {"beta": 0.7, "server_lr": 0.8},
    fedyogi: {"server_lr": 0.3, "beta1": 0.8, "beta2": 0.7, "tau": 0.02, "v0": 0.01},
    scaffold: {"server_lr": 0.7},
    feddyn: {"lam": 0.2},
}


@pytest.mark.parametrize(("stack", "batch"), [("on", 1000), ("off", 1000), ("on", 14)])
@pytest.mark.parametrize("reference", METHODS, ids=lambda f: f.__name__)
def test_a_method_is_its_algorithm(reference, stack, batch, toy, tmp_path):
    options = METHODS[reference]
    local = {"stack": stack, "batch_size": batch, "drop_last": batch < 1000}
    how = {"rounds": 7, "per_round": 3 if batch < 1000 else 2, "train": local}
    run = toy.train(reference.__name__, tmp_path / "run", **how, **options)
    stored = [run.checkpoint(r) for r in run.rounds]
    who = [list(clients_of(s)) for s in stored]
    assert len({tuple(w) for w in who}) > 2  # clients that come and go
    found = [vector(s.state) for s in stored]
    expected = list(reference(Clients(toy, who, batch), stored[0].received.double(), **options))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stack", ["on", "off"])
def test_the_mean_and_the_losses_of_unequal_clients(stack, toy, tmp_path):
    """The mean is weighted by examples in float64; the reported loss is each client's own, step by step."""
    run = toy.train("fedavg", tmp_path / "run", rounds=2, train={"stack": stack})
    for r in run.rounds:
        stored = run.checkpoint(r)
        ends = clients_of(stored)
        n = {k: toy.sizes[k] for k in ends}
        mean = sum(n[k] * ends[k] for k in ends) / sum(n.values())
        torch.testing.assert_close(vector(stored.state), mean, rtol=1e-14, atol=1e-15)
        clients, lr = Clients(toy, []), LR * DECAY ** (r - 1)
        losses = {}
        for k in ends:
            w, slope, total = stored.received.double(), grad(clients.loss(k)), 0.0
            for _ in range(STEPS):
                total, w = total + float(clients.loss(k)(w)), w - lr * slope(w)
            losses[k] = total / STEPS
        expected = sum(n[k] * losses[k] for k in ends) / sum(n.values())
        (found,) = values(run.metrics, "minibatch_loss", round=r)
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_stack_trains_as_its_clients_one_by_one(tmp_path):
    """Of more clients than one stack holds."""
    how = {"clients__total": 20, "clients__per_round": 20, "rounds": 1, "train__precision": "fp64"}
    on, off = (train(tmp_path / s, train__stack=s, **how).checkpoint(1) for s in ("on", "off"))
    torch.testing.assert_close(clients_of(on), clients_of(off), rtol=1e-9, atol=1e-11)


@registry.model("seam_batch_norm")
def batch_norm(shape, classes):
    """Inputs through batch-norm, and an affine map."""
    return torch.nn.Sequential(torch.nn.BatchNorm1d(*shape), torch.nn.Linear(*shape, classes))


def test_the_buffers_of_unequal_clients(toy, tmp_path):
    """The running mean of the inputs does not depend on the weights: its mean is weighted by examples, too."""
    run = toy.train("fedavg", tmp_path / "run", rounds=1, model={"name": "seam_batch_norm"})
    ends = clients_of(run.checkpoint(1))
    n = {k: toy.sizes[k] for k in ends}
    means = {k: (1 - 0.9**STEPS) * toy.x[toy.parts[k]].mean(0) for k in ends}
    expected = sum(n[k] * means[k] for k in ends) / sum(n.values())
    found = run.checkpoint(1).state["0.running_mean"].double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


WORLDS = (
    {"rounds": 2, "model__name": "mlp", "model__hidden": (8,)},
    {"rounds": 2, "model__name": "mlp", "model__hidden": (8,), "data__public": "holdout:40"},
    {"rounds": 1, "model__name": "small_resnet", "clients__per_round": 2},
)


def final(name, options, out):
    """The last weights of a short training in the first world that the method accepts."""
    for i, world in enumerate(WORLDS):
        world = {"clients__total": 12, "clients__per_round": 3, "train__epochs": 1} | world
        try:
            config = fldiag.Config.load("digits", method={"name": name, **options}, **world)
            run = fldiag.train(config, out=out / f"{name}{i}")
        except fldiag.FldiagError:
            continue
        return i, run.checkpoint(run.done).state
    raise AssertionError(f"{name} trains in no world")


@pytest.mark.parametrize(
    "name", [n for n in registry.method.names() if registry.method.get(n).meta["equals"]]
)
def test_a_neutral_setting_is_the_simpler_method(name, tmp_path, monkeypatch):
    meta = registry.method.get(name).meta
    world, state = final(name, meta["neutral"], tmp_path)
    monkeypatch.setattr("test_algorithms.WORLDS", WORLDS[world : world + 1])
    shared = registry.method.get(meta["equals"]).options.model_fields
    simpler = {k: v for k, v in meta["neutral"].items() if k in shared}
    _, expected = final(meta["equals"], simpler, tmp_path / "simpler")
    for n, v in state.items():
        torch.testing.assert_close(v, expected[n], rtol=1e-5, atol=1e-6)
