"""GradAug and FedAlign against their definitions, written out example by example."""

import pytest
import torch
from test_algorithms import kl
from test_methods_regularisation import normal, step_of
from torch.nn import functional as F

from fldiag import models
from fldiag.parts.alignment import Clip, LipschitzAlignment, spectral_norm
from fldiag.parts.augmentation import SubNetworks
from fldiag.seeding import torch_rng

SIDES = (1.0, 0.875, 0.75, 0.625)
Y = torch.tensor([[0, 1, 2, 3, 1]])


def resnet(seed=1):
    return models.build("small_resnet", (1, 8, 8), 4, seed=seed).double().train()


def gradient_of(loss, module):
    found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for g, p in zip(found, module.parameters(), strict=True)
        ]
    )


# --- GradAug


def drawn_step(part, x, y=Y, module=None):
    step = step_of(module or resnet(), x, y, maps=part.maps)
    part.begin(step.local)
    part.batch(step)
    return step


def test_the_augmented_loss_is_its_definition():
    module, part, x = resnet(), SubNetworks(1.75, 2, 0.6, SIDES, "code"), normal(1, 5, 1, 8, 8)
    step = drawn_step(part, x)
    (first, _), (second, _) = pairs = part.draw(
        torch_rng(5, "gradaug", 3, 0)
    )  # the client's own generator
    assert first == 0.6 < second < 1
    _, ours = step.gradient(lambda s, out: s.mean(s.label_loss(out.logits)) + part.loss(s, out))
    logits = module(x[0])
    loss = F.cross_entropy(logits, Y[0])
    for width, side in pairs:
        n = round(8 * side)
        small = F.interpolate(x[0], (n, n), mode="bilinear", align_corners=True)
        loss = loss + 1.75 * kl(logits.detach(), module.sub(small, width))
    theirs = gradient_of(loss, module)
    torch.testing.assert_close(ours[0], theirs, rtol=1e-8, atol=1e-11)
    plain = gradient_of(F.cross_entropy(module(x[0]), Y[0]), module)
    assert float((theirs - plain).norm()) > 1e-2 * float(plain.norm())


@pytest.mark.parametrize("widths", ["code", "paper"])
def test_widths_and_sides_follow_their_rule(widths):
    generator = torch_rng(0, "test")
    draws = [SubNetworks(1.0, 3, 0.8, SIDES, widths).draw(generator) for _ in range(400)]
    for i in range(3):
        found = torch.tensor([d[i][0] for d in draws])
        if i == 0 and widths == "code":
            assert found.unique().tolist() == pytest.approx([0.8])
        else:
            assert 0.8 <= float(found.min()) < 0.81 < 0.99 < float(found.max()) <= 1
            assert float(found.mean()) == pytest.approx(0.9, abs=0.01)
        shares = [sum(d[i][1] == side for d in draws) / 400 for side in SIDES]
        assert shares == pytest.approx([0.25] * 4, abs=0.08)


# --- FedAlign


def naive_lipschitz(module, x, width, kept):
    """mean (K_S - K_F)^2, example by example, matrix by matrix."""
    before, after = (F.relu(m.detach()) for m in module.stages(x)[-2:])
    inside = module.last_stage(before[:, :kept], width)

    def constant(a, b):
        h, v = a.shape[1] // b.shape[1], a.shape[2] // b.shape[2]
        matrix = torch.zeros(len(a), len(b), dtype=a.dtype)
        for i in range(b.shape[1]):
            for j in range(b.shape[2]):
                matrix = matrix + torch.outer(
                    a[:, i * h : (i + 1) * h, j * v : (j + 1) * v].mean((1, 2)), b[:, i, j]
                )
        square = (matrix / (b.shape[1] * b.shape[2])) @ (matrix / (b.shape[1] * b.shape[2])).T
        v = torch.ones(len(a), dtype=a.dtype)
        for _ in range(10):
            u = square @ v
            n = u.norm()
            v = u / n
        return n.sqrt()

    gaps = [
        constant(before[i, :kept], inside[i]) - constant(before[i], after[i]) for i in range(len(x))
    ]
    return sum(g**2 for g in gaps) / len(gaps)


X = normal(1, 5, 1, 8, 8)


@pytest.mark.parametrize(
    ("scale", "width", "kept"), [("raw", 0.25, 8), ("ce", 0.25, 8), ("ce", 0.5, 16)]
)
def test_the_alignment_is_its_definition(scale, width, kept):
    module = resnet()
    step = step_of(module, X, Y, maps=True)
    value, ours = step.gradient(LipschitzAlignment(0.45, width, scale).loss)
    lip = naive_lipschitz(module, X[0], width, kept)
    factor = (
        0.45
        if scale == "raw"
        else 0.45 * float(F.cross_entropy(module(X[0]), Y[0]).detach() / lip.detach())
    )
    theirs = gradient_of(factor * lip, module)
    assert float(value) == pytest.approx(factor * lip.item(), rel=1e-9)
    torch.testing.assert_close(ours[0], theirs, rtol=1e-7, atol=1e-11)
    assert float(theirs.norm()) > 1e-2


def test_T_FA_3_the_power_iteration_finds_the_largest_singular_value():
    x = normal(20, 12, 30).abs()
    exact = torch.linalg.matrix_norm(x, 2)
    found = spectral_norm(x)
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)
    assert bool((found <= exact + 1e-12).all())
    # a small gap tells ten products from nine or eleven: the start is (1, 1), not of unit length
    a, b = 1.1, 1.0
    matrix = torch.diag(torch.tensor([a, b], dtype=torch.float64))[None]
    assert float(spectral_norm(matrix)) == pytest.approx(
        ((a**40 + b**40) / (a**36 + b**36)) ** 0.25, rel=1e-12
    )


def test_fedalign_clips_long_gradients_alone():
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    expected = torch.tensor([[1.2, 1.6], [0.3, 0.4]])
    torch.testing.assert_close(Clip(2.0).correct(None, g), expected)
