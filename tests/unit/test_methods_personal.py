"""Local-only, FedBABU, Per-FedAvg: what they train, held to other runs, closed forms and PyTorch's own optimiser."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    PLAIN,
    Recorded,
    classification,
    config,
    federation,
    final,
    play,
    quadratics,
    setup,
)
from torch import nn
from torch.nn import functional as F

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.runs.run import Run
from fldiag.training import train
from fldiag.training.setup import Seeded

UNEQUAL = (20, 13, 7)


class Normed(nn.Module):
    """Batch-norm with running statistics, features and a head."""

    def __init__(self, features=6, classes=3):
        super().__init__()
        self.body, self.norm, self.fc = (
            nn.Linear(features, 5),
            nn.BatchNorm1d(5),
            nn.Linear(5, classes),
        )

    def features(self, x):
        return torch.relu(self.norm(self.body(x)))

    def forward(self, x):
        return self.fc(self.features(x))


def normed(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Normed()


# -- local-only


def alone(client, rounds, module=None, **train):
    """The global model of a FedAvg federation that holds this client only, with the client's own schedule."""
    data, parts = classification(UNEQUAL)
    seeded = Seeded(0, 3, 3, train.get("epochs", 2), 8)
    positions = [{0: seeded.batches(t, client, len(parts[client]))} for t in range(rounds)]
    made = federation(
        config("fedavg", total=1, **train),
        (data, [parts[client]]),
        module=module,
        schedule=Recorded([[0]] * rounds, positions),
    )
    play(made, rounds)
    return made


@pytest.mark.parametrize("stack", ["off", "on"])
def test_local_only_is_fedavg_with_one_client(stack):
    """Each client's weights after three rounds, and the lr decays once a round."""
    made = federation(config("local_only", stack=stack, lr_decay=0.8), classification(UNEQUAL))
    start = made.w.clone()
    play(made, 3)
    for i in range(3):
        torch.testing.assert_close(
            made.clients[i]["own"], alone(i, 3, lr_decay=0.8).w, rtol=1e-10, atol=1e-12
        )
    assert torch.equal(made.w, start)


def test_local_only_keeps_batch_norm_statistics_with_the_client():
    module = normed()
    made = federation(config("local_only", batch_size=5), (classification(UNEQUAL)), module=module)
    initial = {n: b.clone() for n, b in made.buffers.items()}
    play(made, 2)
    data, parts = classification(UNEQUAL)
    seeded = Seeded(0, 3, 3, 2, 5)
    for i in range(3):
        one = federation(
            config("fedavg", total=1, batch_size=5),
            (data, [parts[i]]),
            module=module,
            schedule=Recorded(
                [[0]] * 2, [{0: seeded.batches(t, i, len(parts[i]))} for t in range(2)]
            ),
        )
        play(one, 2)
        assert torch.equal(made.clients[i]["own"], one.w)
        for name, b in one.buffers.items():
            assert torch.equal(made.clients[i][f"own/{name}"], b)
    assert all(torch.equal(made.buffers[n], b) for n, b in initial.items())
    assert not torch.equal(
        made.clients[0]["own/norm.running_mean"], made.clients[1]["own/norm.running_mean"]
    )


def test_local_only_sends_nothing_and_goes_on_after_an_interruption(tmp_path):
    chosen = config("local_only", rounds=3, total=5, per_round=2)
    whole = train.train(chosen, out=tmp_path / "whole")
    traffic = whole.metrics[whole.metrics["metric"].isin(["uplink", "downlink"])]
    assert len(traffic) == 6 and (traffic["value"] == 0).all()

    def stop(event):
        if event.get("round") == 2 and event["event"] == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(chosen, out=tmp_path / "cut", on_event=stop)
    cut = train.train(chosen, out=tmp_path / "cut", resume=True)
    mine, other = cut.states, Run.open(tmp_path / "whole").states
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[i]["own"], other[i]["own"]) for i in other)


# -- FedBABU


@pytest.mark.parametrize("stack", ["off", "on"])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_fedbabu_never_moves_the_head(stack, precision):
    """T-BABU-1: bitwise, on the clients and in the weighted mean, with momentum and weight decay."""
    # these sizes' shares of w do not add up to w in floating point
    made = federation(
        config("fedbabu", stack=stack, precision=precision), classification((17, 13, 7))
    )
    head, start = made.setup.network.layout.head_size, made.w.clone()
    for seen, _ in play(made, 3):
        assert torch.equal(seen.rows[:, -head:], start[-head:].expand(3, -1))
    assert torch.equal(made.w[-head:], start[-head:])
    assert not torch.isclose(made.w[:-head], start[:-head]).all()


def test_the_first_body_step_of_fedbabu_is_that_of_fedavg():
    data = classification((20,))
    schedule = Recorded([[0]], [{0: [list(range(20))]}])
    ends = [final(config(m, total=1), data, 1, schedule=schedule) for m in ("fedbabu", "fedavg")]
    head = setup(config("fedavg", total=1), data).network.layout.head_size
    assert torch.equal(ends[0][:-head], ends[1][:-head])
    assert not torch.equal(ends[0][-head:], ends[1][-head:])


def test_fedbabu_asks_for_a_head():
    with pytest.raises(FldiagError, match="no head apart from its body"):
        setup(config("fedbabu", model_options={"hidden": ()}), classification(UNEQUAL))


# -- Per-FedAvg


@pytest.mark.parametrize("stack", ["off", "on"])
def test_perfedavg_with_inner_lr_0_is_sgd_on_the_second_halves(stack):
    """T-PER-1, with short and odd minibatches; beta_outer does not decay, wherever the round's lr goes."""
    data, parts = classification((21, 13, 1))
    seeded = Seeded(0, 3, 3, 2, 8)
    whole = [{i: seeded.batches(t, i, len(p)) for i, p in enumerate(parts)} for t in range(2)]
    second = [
        {i: [b[-max(len(b) // 2, 1) :] for b in plan] for i, plan in now.items()} for now in whole
    ]
    assert {len(b) for now in whole for plan in now.values() for b in plan} == {8, 5, 1}
    ids = [[0, 1, 2]] * 2
    meta = final(
        config("perfedavg", {"inner_lr": 0.0, "beta_outer": 0.07}, stack=stack, lr_decay=0.5),
        (data, parts),
        schedule=Recorded(ids, whole),
    )
    plain = final(
        config("fedavg", lr=0.07, lr_decay=1.0), (data, parts), schedule=Recorded(ids, second)
    )
    torch.testing.assert_close(meta, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wd", [0.0, 0.3])
def test_perfedavg_on_a_quadratic(wd):
    """T-PER-2: with both halves the client's whole data, the outer gradient is A (w - eta (A w - b)) - b; in round 1
    the inner lr has decayed. Weight decay: in the inner step, and in the outer one at the restored w."""
    q, eta, beta, decay = quadratics((12,)), 0.2, 0.05, 0.6
    twice = Recorded([[0]] * 2, [{0: [[*range(12), *range(12)]]}] * 2)
    made = federation(
        q.config("perfedavg", {"beta_outer": beta}, lr=eta, lr_decay=decay, weight_decay=wd),
        q.data,
        schedule=twice,
    )
    for t in range(2):
        w = made.w.clone()
        play(made)
        inner = w - eta * decay**t * (q.gradient(0, w) + wd * w)
        torch.testing.assert_close(
            made.w, w - beta * (q.gradient(0, inner) + wd * w), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("official", [False, True])
def test_perfedavg_against_torch_sgd(official):
    """With ``official`` one torch.optim.SGD sees both gradients; else the inner step is plain."""
    data, parts = classification((16,))
    plan, eta, beta = [[*range(8)], [*range(8, 16)], [*range(4, 12)]], 0.1, 0.03
    chosen = config(
        "perfedavg",
        {"official": official, "beta_outer": beta},
        total=1,
        lr=eta,
        momentum=0.9,
        weight_decay=1e-2,
    )
    made = federation(chosen, (data, parts), schedule=Recorded([[0]], [{0: plan}]))
    net = made.setup.module
    outer = torch.optim.SGD(net.parameters(), lr=beta, momentum=0.9, weight_decay=1e-2)
    inner = outer if official else torch.optim.SGD(net.parameters(), lr=eta, weight_decay=1e-2)

    def gradient(optimizer, lr, half):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        F.cross_entropy(net(data.train_x[half].double()), data.train_y[half]).backward()

    for b in plan:
        saved = [p.detach().clone() for p in net.parameters()]
        gradient(inner, eta, b[:4])
        inner.step()
        gradient(outer, beta, b[4:])
        with torch.no_grad():
            for p, s in zip(net.parameters(), saved, strict=True):
                p.copy_(s)
        outer.step()
    play(made)
    torch.testing.assert_close(
        made.w, torch.cat([p.detach().flatten() for p in net.parameters()]), rtol=1e-9, atol=1e-11
    )


def test_perfedavg_learns_to_adapt():
    """Two clients with mirrored optima: FedAvg ends between them, and so does the meta model; but one inner step from
    a point of a quadratic lowers both losses, and the meta objective is what falls."""
    q = quadratics((12, 12))
    eta = 0.3
    schedule = Recorded([[0, 1]] * 60, [{k: [[*range(12), *range(12)]] for k in range(2)}] * 60)
    made = federation(q.config("perfedavg", {"beta_outer": 0.1}, lr=eta), q.data, schedule=schedule)

    def meta(w):
        return sum(float(q.loss(k, w - eta * q.gradient(k, w))) for k in range(2))

    values = [meta(made.w)]
    for _ in range(60):
        play(made)
        values.append(meta(made.w))
    assert values[-1] < 0.5 * values[0]


@pytest.mark.parametrize(
    ("n", "batch", "split", "steps"),
    [
        (500, 100, 5, 2),
        (75, 20, 5, 2),
        (75, 20, 1, 8),
        (3, 100, 5, 1),
        (550, 100, 5, 3),
        (9, 1, 3, 3),
    ],
)
def test_steps_of_a_fine_tuning_epoch(n, batch, split, steps):
    """ceil(L / E), L = ceil(n / B) for minibatches of B = batch_size / 2."""
    plan = registry.method.get("perfedavg").build(tune_split=split).personal
    assert plan.steps(n, SimpleNamespace(batch_size=batch)) == steps
    assert steps == math.ceil(math.ceil(n / max(batch // 2, 1)) / split)


@pytest.mark.parametrize(
    "train",
    [
        {"clip": 1.0},
        {"nesterov": True},
        {"keep_momentum": True},
        {"optimizer": "adam", "momentum": 0.0},
    ],
)
def test_shared_momentum_is_that_of_plain_sgd(train):
    with pytest.raises(FldiagError, match="shared"):
        setup(config("perfedavg", {"official": True}, **train), classification(UNEQUAL))
    setup(config("perfedavg", **train), classification(UNEQUAL))


# -- kNN-Per


def test_knnper_asks_for_features_and_classes():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    class Other(Opaque):
        """Its output is not head(features(x)), which only a forward shows."""

        def features(self, x):
            return self.a(x)

    for module in (Opaque(), Other()):
        with pytest.raises(FldiagError, match="features"):
            setup(config("knnper"), classification(UNEQUAL), module=module)
    with pytest.raises(FldiagError, match="real targets"):
        setup(quadratics().config("knnper"), quadratics().data)


@pytest.mark.parametrize("name", ["fedavg_ft", "knnper"])
def test_training_before_the_fine_tuning_is_fedavg(name):
    data = classification(UNEQUAL)
    assert torch.equal(final(config(name, **PLAIN), data), final(config("fedavg", **PLAIN), data))


def test_training_before_the_fine_tuning_is_fedsol():
    data = classification(UNEQUAL)
    options = {"rho": 0.7, "part": "full", "strength": "fixed", "loss": "l2"}
    assert torch.equal(
        final(config("fedsol_ft", options), data), final(config("fedsol", options), data)
    )
