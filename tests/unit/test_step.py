"""One local step: losses, gradients at w + e, and the shortcuts through the head, against plain autograd."""

import pytest
import torch
from helpers import classification, close, config, images, local_of, setup, terms
from torch.func import functional_call
from torch.nn import functional as F

from fldiag.losses import per_example
from fldiag.step import Perturbation, Step

UNEQUAL = (20, 13, 7)


def far(a, b):
    return float((a - b).abs().max())


def losses(step, out):
    return step.mean(per_example(out.logits, step.y))


def made(data, rows=3, **more):
    """A step of ``rows`` clients with different weights, on minibatches of unequal size (padded and weighted)."""
    built = setup(config(stack="on", **more), data)
    generator = torch.Generator().manual_seed(1)
    w_g = built.initial()
    w = w_g + 0.1 * torch.randn(rows, len(w_g), generator=generator, dtype=w_g.dtype)
    dataset = data[0]
    x = dataset.normalise(dataset.train_x[: 5 * rows]).to(w.dtype).view(rows, 5, *dataset.shape)
    y = dataset.train_y[: 5 * rows].view(rows, 5)
    sizes = [5, 4, 2][:rows]
    weight = torch.tensor([[1 / n] * n + [0.0] * (5 - n) for n in sizes], dtype=w.dtype)
    local = local_of(built.network, built.config.train, w, [1] * rows, w_g=w_g)
    step = Step(local, losses, x, y, weight, torch.arange(5).expand(rows, 5))
    return built, step, sizes


def naive(built, w, x, y):
    leaf = w.clone().requires_grad_()
    views = {n: v[0] for n, v in built.network.layout.views(leaf[None]).items()}
    loss = F.cross_entropy(functional_call(built.module, views, (x,)), y)
    (g,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), g


CASES = [(classification(UNEQUAL), {}), (images(), {"model": "small_cnn", "model_options": {}})]
both = pytest.mark.parametrize(("data", "more"), CASES, ids=["mlp", "cnn"])


@both
@pytest.mark.parametrize("where", ["w", "full", "body", "head"])
def test_values_and_gradients_are_autograds(data, more, where):
    built, step, sizes = made(data, **more)
    layout = built.network.layout
    start, stop = (0, 0) if where == "w" else layout.span(where)
    e = 0.3 * torch.randn(
        3, stop - start, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    before = step.w.clone()
    values, g = step.local_gradient(Perturbation(e, start, stop) if where != "w" else None)
    for k, n in enumerate(sizes):
        there = before[k].clone()
        there[start:stop] += e[k]
        loss, exact = naive(built, there, step.x[k, :n], step.y[k, :n])
        assert abs(float(values[k] - loss)) <= 1e-12
        assert far(g[k], exact) <= 1e-12
    assert torch.equal(step.w, before)


@both
def test_the_gradient_of_the_head_alone_is_the_tail_of_the_gradient(data, more):
    built, step, _ = made(data, **more)
    values, head = step.head_gradient(losses)
    other = made(data, **more)[1]
    everything = other.gradient(losses)
    sums = terms(built.module, examples=5)
    close(values, everything[0], terms=sums)
    close(head, everything[1][:, -built.network.layout.head_size :], terms=sums)
    # the step's own gradient is still to be had after it, with and without a perturbation of the head
    close(step.local_gradient()[1], everything[1], terms=sums)


def test_the_gradient_at_w_is_computed_once():
    _, step, _ = made(classification(UNEQUAL))
    assert step.local_gradient()[1] is step.local_gradient()[1]


def test_the_mean_of_a_minibatch_leaves_padding_out():
    _, step, sizes = made(classification(UNEQUAL))
    values = torch.arange(15.0, dtype=torch.float64).view(3, 5)
    assert torch.allclose(
        step.mean(values), torch.stack([values[k, :n].mean() for k, n in enumerate(sizes)])
    )


@both
def test_logits_of_a_frozen_model(data, more):
    built, step, _ = made(data, **more)
    w = step.local.w_g
    views = {n: v[0] for n, v in built.network.layout.views(w[None]).items()}
    exact = torch.stack([functional_call(built.module, views, (x,)) for x in step.x])
    assert far(step.received_logits(), exact.detach()) <= 1e-12
    vars(step.local).pop("received_logits", None)  # cached as None while there was no x
    step.local.x, step.local.offset = step.x.flatten(0, 1), torch.tensor([0, 5, 10])
    assert far(step.received_logits(), exact.detach()) <= 1e-12
    assert not step.received_logits().requires_grad


def test_generators_of_a_part_are_of_the_client_and_the_round():
    _, step, _ = made(classification(UNEQUAL))
    draws = [torch.rand(2, generator=g) for g in step.local.rng("dropout")]
    again = [torch.rand(2, generator=g) for g in step.local.rng("dropout")]
    assert all(torch.equal(a, b) for a, b in zip(draws, again, strict=True))
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], torch.rand(2, generator=step.local.rng("mixup")[0]))
