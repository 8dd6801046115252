"""Models with randomness or state of their own: dropout, batch-norm, features that are not quite the head's input."""

import copy

import pytest
import torch
from helpers import classification, config, images
from torch import nn

from fldiag import FldiagError
from fldiag.models.network import Network, forward_macs
from fldiag.training.server import Federation
from fldiag.training.setup import Setup


class Noisy(nn.Module):
    """head(dropout(features(x))): in eval mode it looks like head(features(x))."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def features(self, x):
        return torch.relu(self.body(x))

    def forward(self, x):
        return self.head(nn.functional.dropout(self.features(x), 0.5, self.training))


class Quiet(Noisy):
    def forward(self, x):
        return self.head(self.features(x))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def features(self, x):
        return torch.relu(self.norm(self.body(x)))

    def forward(self, x):
        return self.head(self.features(x))


def federation(module, **train):
    dataset, parts = classification((20, 13, 9))
    return Federation(
        Setup(config(batch_size=7, **train), dataset=dataset, parts=parts, module=module)
    )


def play(f, rounds=2):
    for _ in range(rounds):
        f.round(lambda units: map(f.setup.train, units))
    return f.w


def test_dropout_trains_with_the_runs_own_seed_and_leaves_the_global_state():
    torch.manual_seed(3)
    net = Noisy()
    before = torch.get_rng_state()
    first = play(federation(net))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(play(federation(net)), first)


def test_dropout_between_features_and_head_is_not_cut_out():
    f = federation(Noisy())
    assert not f.setup.network.has_split
    quiet = Quiet()
    quiet.load_state_dict({k: v.float() for k, v in f.setup.module.state_dict().items()})
    assert not torch.allclose(play(f), play(federation(quiet)))


def test_a_true_split_is_kept():
    assert federation(Normed()).setup.network.has_split


@pytest.mark.parametrize("method", ["fedntd", "fedsol"])
def test_the_received_model_is_judged_with_its_received_statistics(method, monkeypatch):
    """Cached and uncached logits of the received model agree, although the client's statistics move every step."""
    from fldiag.local import Local

    torch.manual_seed(0)
    net = Normed().double()
    cached = play(federation(net, method=method))
    monkeypatch.setattr(Local, "received_logits", None)
    assert torch.allclose(play(federation(net, method=method)), cached, rtol=0, atol=1e-12)


def test_a_minibatch_of_one_with_batch_norm_says_what_to_change():
    """Before training, whether or not that client will be sampled."""
    data = classification((20, 13, 8))

    def made(sizes=data, method="fedavg", **train):
        return Setup(
            config(method, batch_size=7, **train), dataset=sizes[0], parts=sizes[1], module=Normed()
        )

    with pytest.raises(
        FldiagError, match="client 2 has a minibatch of 1 example, and batch-norm cannot train"
    ) as error:
        made()
    assert "train.batch_size" in str(error.value)
    made(drop_last=True)
    thirds = classification((20, 13, 10))  # last minibatches of 6, 6 and 3: halves of 2 and 1
    made(thirds)
    with pytest.raises(
        FldiagError,
        match="client 2 has a minibatch of 3 examples, of which this method makes parts",
    ):
        made(thirds, "perfedavg")
    one = config(batch_size=7, model="small_resnet", model_options={})
    Setup(
        one, dataset=images((20, 13, 8))[0], parts=images((20, 13, 8))[1]
    )  # its maps have several positions


def test_the_callers_module_is_not_touched():
    net = Normed()
    before = copy.deepcopy(net.state_dict())
    play(federation(net))
    assert next(net.parameters()).dtype == torch.float32
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_multiply_adds_are_counted_wherever_the_model_lies(monkeypatch):
    """The probe must follow the model off its device; ``cpu`` is counted here because no other device is at hand."""
    net, moved = nn.Sequential(nn.Linear(6, 4)), []
    inner = nn.Module.cpu
    monkeypatch.setattr(nn.Module, "cpu", lambda self: moved.append(1) or inner(self))
    assert forward_macs(net, (6,)) == 24 and moved


def test_pooling_before_relu_changes_no_bit():
    from fldiag import models
    from fldiag.models.network import chain_of
    from fldiag.params import flatten

    net = models.build("small_cnn", (1, 8, 8), 10)
    w, x = (
        flatten(net)[None].requires_grad_(),
        torch.randn(1, 30, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
    )
    fast = Network(net)
    plain = Network(net)
    plain.chain = chain_of(plain.module)
    assert [n for n, _ in fast.chain] != [n for n, _ in plain.chain]
    outputs = [n.bind(w)(x) for n in (fast, plain)]
    gradients = [torch.autograd.grad(o.square().sum(), w)[0] for o in outputs]
    assert torch.equal(*outputs) and torch.equal(*gradients)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_effective_steps_are_the_weights_of_the_gradients_in_the_displacement(nesterov, momentum):
    """With a constant gradient the optimiser moves by lr * a * g."""
    import types

    from fldiag.local import Local
    from fldiag.training.optim import SGD

    train = config(momentum=momentum, nesterov=nesterov, weight_decay=0.0).train
    for steps in (1, 2, 5, 9):
        w = torch.zeros(1, 1, dtype=torch.float64)
        optimizer = SGD(train, w)
        for _ in range(steps):
            optimizer.step(w, torch.ones_like(w), lr=0.1)
        local = types.SimpleNamespace(steps=torch.tensor([steps]), train=train, w=w)
        assert Local.effective_steps(local).item() == pytest.approx(-w.item() / 0.1, rel=1e-12)
