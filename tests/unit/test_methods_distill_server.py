"""FedDF and FedET: teachers against their definitions, the student against a loop of torch's own."""

import numpy as np
import pytest
import torch
from helpers import classification, close, config, federation, play, quadratics, terms
from torch import nn
from torch.nn import functional as F

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.parts import ensemble
from fldiag.parts.ensemble import confidence, confident, confident_official, divergence, mean
from fldiag.seeding import torch_rng
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

UNEQUAL = (20, 13, 7)
PUBLIC = torch.randn(23, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
STRONG = {"lr": 0.02, "batch_size": 8}  # the student goes somewhere in a few steps


def build(method, options=None, *, module=None, public=PUBLIC, **more):
    data, parts = classification(UNEQUAL)
    return Federation(
        Setup(
            config(method, options, **more), dataset=data, parts=parts, module=module, public=public
        )
    )


def end(method, options=None, rounds=2, **more):
    made = build(method, options, **more)
    play(made, rounds)
    return made.w


def batch_norm_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).double()


def filled(made, w, buffers):
    """The federation's module with these weights and buffers, as a plain torch module."""
    module = made.setup.module
    nn.utils.vector_to_parameters(w.clone(), module.parameters())
    module.load_state_dict({**module.state_dict(), **buffers})
    return module.requires_grad_(True)


def mean_of_clients(made, seen):
    """zbar from one plain module a client, in eval mode."""
    total = 0.0
    for j in range(seen.m):
        net = filled(made, seen.rows[j], {n: b[j] for n, b in seen.buffers.items()}).eval()
        total = total + net(PUBLIC).detach() / seen.m
    return total


def logits(seed, shape=(4, 9, 5)):
    return 2 * torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


# --- the divergence


@pytest.mark.parametrize(
    ("tau", "direction"),
    [(1.0, "teacher_student"), (3.0, "teacher_student"), (3.0, "student_teacher")],
)
def test_the_divergence_is_its_definition(tau, direction):
    teacher, student = logits(0), logits(1)
    p, q = (
        np.exp(z.numpy() / tau) / np.exp(z.numpy() / tau).sum(-1, keepdims=True)
        for z in (teacher, student)
    )
    p, q = (q, p) if direction == "student_teacher" else (p, q)
    np.testing.assert_allclose(
        divergence(teacher, student, tau, direction), (p * np.log(p / q)).sum(-1), atol=1e-13
    )


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_T_DF_3_it_is_zero_for_equal_probabilities_and_positive_else(direction):
    z = logits(0)
    shifted = divergence(z, z + logits(2, (4, 9, 1)), 3.0, direction)  # a shift changes no softmax
    close(shifted, torch.zeros_like(shifted), terms=5, size=1)
    assert float(divergence(z, logits(1), 3.0, direction).min()) > 1e-3


# --- FedDF


@pytest.mark.parametrize("method", ["feddf", "fedet"])
def test_T_DF_1_no_epochs_asks_for_no_data(method):
    assert torch.equal(end(method, {"epochs": 0}, public=None), end("fedavg"))


@pytest.mark.parametrize("method", ["feddf", "fedet"])
def test_T_DF_2_a_single_client_teaches_itself_nothing(method):
    options = {**STRONG, "lr": 0.5, "optimizer": "sgd", "epochs": 2}
    [(seen, _)] = play(made := build(method, options, per_round=1))
    assert float((made.w - seen.rows[0]).abs().max()) <= 1e-13
    [(seen, _)] = play(made := build(method, options))
    assert float((made.w - seen.mean(seen.rows, seen.p)).abs().max()) > 1e-4


def torch_student(made, seen, options, buffers):
    """What torch's modules, optimisers and schedulers make of the aggregated model."""
    target = F.softmax(mean_of_clients(made, seen) / options["tau"], -1)
    net = filled(made, seen.mean(seen.rows, seen.p), buffers).train()
    adam = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options["optimizer"]](
        net.parameters(), lr=options["lr"], weight_decay=options["weight_decay"]
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)
    generator, size = torch_rng(0, "distillation", seen.t), options["batch_size"]
    for _ in range(options["epochs"]):
        order = torch.randperm(len(PUBLIC), generator=generator)
        for i in range(0, len(order), size):
            batch = order[i : i + size]
            if len(batch) > 1 or not buffers:
                loss = F.kl_div(
                    F.log_softmax(net(PUBLIC[batch]) / options["tau"], -1),
                    target[batch],
                    reduction="batchmean",
                )
                adam.zero_grad()
                (options["tau"] ** 2 * loss).backward()
                adam.step()
        if options["schedule"] == "cosine":
            schedule.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach(), dict(net.named_buffers())


@pytest.mark.parametrize("module", [None, batch_norm_net], ids=["plain", "batch-norm"])
@pytest.mark.parametrize(
    "options",
    [
        {
            "tau": 3.0,
            "lr": 0.02,
            "batch_size": 8,
            "epochs": 2,
            "optimizer": "adam",
            "schedule": "constant",
            "weight_decay": 0.0,
        },
        {
            "tau": 1.5,
            "lr": 0.01,
            "batch_size": 11,
            "epochs": 13,
            "optimizer": "adam",
            "schedule": "cosine",
            "weight_decay": 0.1,
        },
        {
            "tau": 2.0,
            "lr": 0.1,
            "batch_size": 100,
            "epochs": 3,
            "optimizer": "sgd",
            "schedule": "cosine",
            "weight_decay": 0.05,
        },
    ],
)
def test_the_student_is_that_of_a_plain_torch_loop(module, options):
    """batch_size = 11 leaves a last minibatch of one example, which is passed over where there is batch-norm."""
    made = build("feddf", options, module=module and module(), batch_size=5)
    play(made)  # a second round has other seeds
    [(seen, _)] = play(made)
    start = averaged_buffers(seen)
    w, buffers = torch_student(made, seen, options, start)
    # Adam makes up to lr 1e-8 of the rounding noise that is the gradient of a bias before batch-norm
    assert float((made.w - w).abs().max()) <= 1e-9
    assert made.buffers.keys() == buffers.keys()
    for name in buffers:
        torch.testing.assert_close(made.buffers[name], buffers[name], rtol=1e-9, atol=1e-9)
    if module is not None:
        assert float((made.buffers["1.running_mean"] - start["1.running_mean"]).abs().max()) > 1e-3


def averaged_buffers(seen):
    p = seen.n.double() / seen.n.sum()
    return {
        n: (torch.einsum("k,kd->d", p, b) if b.is_floating_point() else b.max(0).values)
        for n, b in seen.buffers.items()
    }


def test_stacked_forwards_are_those_of_one_client_after_another(monkeypatch):
    made = build("feddf", {"epochs": 0})
    [(seen, _)] = play(made)
    monkeypatch.setattr(ensemble, "BATCH", 7)
    stacked = torch.cat(list(ensemble.client_logits(seen)), 1)
    monkeypatch.setattr(ensemble, "STACK", 1)
    single = torch.cat(list(ensemble.client_logits(seen)), 1)
    assert stacked.shape == (3, 23, 3)
    close(stacked, single, terms=terms(made.setup.module))
    close(stacked.mean(0), mean_of_clients(made, seen), terms=terms(made.setup.module))


@pytest.mark.parametrize("method", ["feddf", "fedet"])
def test_the_order_of_the_public_minibatches_is_its_own(method):
    """Clients of the first round are those of FedAvg, and the second round draws another order."""
    plain, ours = build("fedavg"), build(method, STRONG)
    [(a, _)], [(b, _)] = play(plain), play(ours)
    assert torch.equal(a.rows, b.rows)
    assert not torch.equal(plain.w, ours.w)
    assert not torch.equal(
        *(torch.randperm(23, generator=torch_rng(0, "distillation", t)) for t in (0, 1))
    )


# --- FedET


def test_T_ET_1_clients_that_agree_are_their_own_teacher():
    z = logits(0, (1, 9, 5))
    close(confident(z.expand(4, -1, -1)), z[0], terms=4)


def test_T_ET_2_weights_sum_to_one_and_follow_the_variance_over_classes():
    z = logits(0)
    z[:, 0] = 1.5  # nobody is confident of this example
    alpha = confidence(z)
    close(alpha.sum(0), torch.ones_like(alpha[0]), terms=4)
    assert torch.equal(alpha[:, 0, 0], torch.full((4,), 0.25, dtype=torch.float64))
    v = z.numpy().var(-1)[:, 1:]
    np.testing.assert_allclose(alpha[:, 1:, 0], v / v.sum(0), rtol=1e-12)
    np.testing.assert_allclose(
        confident(z)[1:], np.einsum("kx,kxc->xc", v / v.sum(0), z.numpy()[:, 1:]), rtol=1e-12
    )
    assert float((confident(z) - mean(z)).abs().max()) > 0.1


def test_the_released_code_weighs_by_the_variance_over_examples_and_sums():
    z = logits(3)
    z[1] *= 5
    v = z.numpy().var(1)
    np.testing.assert_allclose(
        confident_official(z), np.einsum("kc,kxc->xc", v / v.mean(), z.numpy()), rtol=1e-12
    )
    assert torch.equal(
        confident_official(torch.ones_like(z)), torch.full((9, 5), 4.0, dtype=torch.float64)
    )


@pytest.mark.parametrize("official", [False, True])
def test_fedet_distils_from_its_own_teacher(official, monkeypatch):
    monkeypatch.setattr(ensemble, "BATCH", 7)  # several blocks
    made = build("fedet", {**STRONG, "official_p3": official})
    part = made.setup.method.parts[0]
    [(seen, _)] = play(made)
    z = torch.cat(list(ensemble.client_logits(seen)), 1)
    assert torch.allclose(
        seen.memo[part.teacher], (confident_official if official else confident)(z), rtol=1e-13
    )
    assert part.weight_decay == (5e-5 if official else 0.0)
    assert (
        registry.method.get("fedet")
        .build(official_p3=official, weight_decay=0.1)
        .parts[0]
        .weight_decay
        == 0.1
    )


# --- refusals


@pytest.mark.parametrize("method", ["feddf", "fedet", "fedproj"])
def test_without_public_data_the_remedy_is_named(method):
    with pytest.raises(FldiagError) as error:
        build(method, public=None)
    assert f"method {method!r} distils on public inputs" in str(error.value)
    assert "holdout:200" in str(error.value)


@pytest.mark.parametrize("method", ["feddf", "fedet", "fedproj"])
def test_regression_is_refused(method):
    problem = quadratics()
    with pytest.raises(FldiagError, match="class probabilities"):
        federation(problem.config(method), problem.data)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("feddf", {"batch_size": 1}),
        ("fedproj", {"memory_batch": 1}),
        ("fedproj", {"memory_size": 1}),
    ],
)
def test_batch_norm_cannot_learn_from_one_example(method, options):
    with pytest.raises(FldiagError, match="minibatches of one example"):
        build(method, options, module=batch_norm_net())
    build(method, options)


@pytest.mark.parametrize("method", ["feddf", "fedet", "fedproj"])
def test_batch_norm_cannot_learn_from_one_public_input(method):
    with pytest.raises(FldiagError, match="or one, for batch-norm"):
        build(method, module=batch_norm_net(), public=PUBLIC[:1])
    build(method, public=PUBLIC[:1])
    build("fedavg", module=batch_norm_net(), public=PUBLIC[:1])


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("feddf", "epochs", -1),
        ("feddf", "tau", 0.0),
        ("feddf", "lr", 0.0),
        ("feddf", "batch_size", 0),
        ("feddf", "optimizer", "lion"),
        ("fedet", "schedule", "step"),
        ("fedet", "weight_decay", -1.0),
        ("fedproj", "gamma_wd", -0.1),
        ("fedproj", "proj_rate", 1.1),
        ("fedproj", "memory_size", -2),
        ("fedproj", "memory_batch", 0),
        ("fedproj", "first_round", -1),
        ("fedproj", "eps", -1e-9),
        ("fedproj", "clamp", 0.0),
        ("fedproj", "reference", "mean"),
        ("fedproj", "direction", "both"),
    ],
)
def test_values_out_of_range_are_refused(method, option, value):
    with pytest.raises(FldiagError, match=option):
        registry.method.get(method).validate({option: value})
