"""FedDF and FedET: teachers against their definitions, the student against a loop of torch's own."""

import numpy as np
import pytest
import torch
from helpers import classification, config, play
from torch import nn
from torch.nn import functional as F

from fldiag.parts.ensemble import confident, confident_official
from fldiag.seeding import torch_rng
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

UNEQUAL = (20, 13, 7)
PUBLIC = torch.randn(23, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def build(method, options=None, *, module=None, public=PUBLIC, **more):
    data, parts = classification(UNEQUAL)
    return Federation(
        Setup(
            config(method, options, **more), dataset=data, parts=parts, module=module, public=public
        )
    )


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


# --- FedDF


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


ADAM = {"optimizer": "adam", "schedule": "cosine", "lr": 0.01, "batch_size": 11, "epochs": 13}
SGD = {"optimizer": "sgd", "schedule": "constant", "lr": 0.1, "batch_size": 100, "epochs": 3}


@pytest.mark.parametrize("module", [None, batch_norm_net], ids=["plain", "batch-norm"])
@pytest.mark.parametrize("options", [ADAM, SGD], ids=["adam", "sgd"])
def test_the_student_is_that_of_a_plain_torch_loop(module, options):
    """batch_size = 11 leaves a last minibatch of one example, which is passed over where there is batch-norm."""
    options = {"tau": 1.5, "weight_decay": 0.1} | options
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
    return {n: p @ b if b.is_floating_point() else b.amax(0) for n, b in seen.buffers.items()}


# --- FedET


def test_where_nobody_is_confident_all_clients_count_alike():
    z = logits(0)
    z[:, 0] = torch.arange(4.0)[:, None]
    torch.testing.assert_close(confident(z)[0], z[:, 0].mean(0))
    assert float((confident(z) - z.mean(0)).abs().max()) > 0.1


def test_the_released_code_weighs_by_the_variance_over_examples_and_sums():
    z = logits(3)
    z[1] *= 5
    v = z.numpy().var(1)
    expected = np.einsum("kc,kxc->xc", v / v.mean(), z.numpy())
    np.testing.assert_allclose(confident_official(z), expected, rtol=1e-12)
    ones = torch.ones_like(z)
    assert torch.equal(confident_official(ones), ones.sum(0))
