"""GradAug and FedAlign against their definitions, written out example by example."""

import math

import pytest
import torch
from helpers import classification, config, federation, final, images, play, quadratics, trace
from test_methods_regularisation import RESNET, normal, step_of
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fldiag import FldiagError, models
from fldiag.models.network import Network
from fldiag.params import norm
from fldiag.parts.alignment import LipschitzAlignment, spectral_norm, transmitting
from fldiag.parts.augmentation import SubNetworks, resized
from fldiag.registry import method
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


def naive_kl(teacher, student):
    """mean_x sum_c p_c (log p_c - log q_c), example by example."""
    total = 0.0
    for t, s in zip(teacher, student, strict=True):
        p, q = t.exp() / t.exp().sum(), s.exp() / s.exp().sum()
        total = total + sum(p[c] * torch.log(p[c] / q[c]) for c in range(len(p)))
    return total / len(teacher)


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
        loss = loss + 1.75 * naive_kl(logits.detach(), module.sub(small, width))
    theirs = gradient_of(loss, module)
    torch.testing.assert_close(ours[0], theirs, rtol=1e-8, atol=1e-11)
    plain = gradient_of(F.cross_entropy(module(x[0]), Y[0]), module)
    assert float((theirs - plain).norm()) > 1e-2 * float(plain.norm())


def test_every_pass_of_a_step_sees_the_same_sub_networks_and_the_next_step_others():
    part = SubNetworks(1.0, 2, 0.6, SIDES, "paper")
    step = drawn_step(part, normal(1, 5, 1, 8, 8))
    one, two = (part.loss(step, step.forward()) for _ in range(2))
    assert torch.equal(one, two)
    part.batch(step)
    assert not torch.allclose(part.loss(step, step.forward()), one, rtol=1e-3)


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


def test_resizing_is_bilinear_with_aligned_corners():
    x = normal(2, 3, 32, 28)
    for side, size in ((0.875, (28, 24)), (0.75, (24, 21)), (0.625, (20, 18))):
        small = resized(x, side)
        assert small.shape == (2, 3, *size)
        for i, j in ((0, 0), (3, 5), (size[0] - 1, size[1] - 1)):
            u, v = i * 31 / (size[0] - 1), j * 27 / (size[1] - 1)
            a, b = min(int(u + 1e-9), 30), min(int(v + 1e-9), 26)
            p, q = u - a, v - b
            value = (1 - p) * ((1 - q) * x[0, 0, a, b] + q * x[0, 0, a, b + 1]) + p * (
                (1 - q) * x[0, 0, a + 1, b] + q * x[0, 0, a + 1, b + 1]
            )
            assert float(small[0, 0, i, j]) == pytest.approx(float(value), rel=1e-9)
    assert resized(x, 1.0) is x


def test_T_GA_2_the_whole_network_on_whole_images_learns_nothing_from_itself():
    part, x = SubNetworks(2.0, 2, 1.0, (1.0,), "code"), normal(1, 5, 1, 8, 8)
    step = drawn_step(part, x)
    assert abs(float(part.loss(step, step.forward()).detach())) <= 1e-12
    assert float(step.gradient(part.loss)[1].abs().max()) <= 1e-10
    slim = drawn_step(SubNetworks(2.0, 2, 0.8, (1.0,), "code"), x)
    assert (
        float(SubNetworks(2.0, 2, 0.8, (1.0,), "code").loss(slim, slim.forward()).detach()) > 1e-3
    )


def test_the_weight_follows_the_number_of_sub_networks():
    build = method.get("gradaug").build
    assert [build(n=n).parts[0].mu for n in (1, 2, 3, 4)] == [2.0, 1.75, 1.5, 1.25]
    assert build(n=2, mu=0.5).parts[0].mu == 0.5
    with pytest.raises(
        FldiagError, match=r"n = 5 sub-networks has no published mu; set method\.mu"
    ):
        build(n=5)


@pytest.mark.parametrize("name", ["gradaug", "fedalign"])
def test_the_running_statistics_are_those_of_the_full_network(name):
    data, kept = images((20, 13, 7)), []
    for method_name in ("fedavg", name):
        made = federation(config(method_name, batch_size=20, epochs=1, **RESNET), data)
        play(made)
        kept.append(made.buffers)
    assert kept[0]
    assert all(torch.equal(kept[1][key], value) for key, value in kept[0].items())


def test_methods_of_sub_networks_refuse_what_they_cannot_do_and_say_what_to_choose():
    for name in ("gradaug", "fedalign"):
        with pytest.raises(FldiagError, match=r"model 'small_cnn' .*'small_resnet'.*'resnet56'"):
            federation(config(name, model="small_cnn", model_options={}), images())
    with pytest.raises(
        FldiagError, match=r"GradAug resizes images, the data has inputs of shape \(6,\)"
    ):
        federation(config("gradaug"), classification())
    with pytest.raises(FldiagError, match="GradAug"):
        federation(quadratics().config("gradaug"), quadratics().data)
    with pytest.raises(FldiagError, match="'mlp' does not show its stages"):
        federation(config("fedalign"), classification())


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


def test_T_FA_1_no_weight_is_fedavg_with_clipping():
    data = images((20, 13, 7))
    plain, clipped, inside, some = (
        final(config(name, options, rounds=1, **RESNET, **train), data)
        for name, options, train in (
            ("fedavg", {}, {}),
            ("fedavg", {}, {"clip": 0.5}),
            ("fedalign", {"mu": 0.0, "clip": 0.5}, {}),
            ("fedalign", {"clip": 0.5}, {}),
        )
    )
    assert torch.equal(inside, clipped)
    assert not torch.allclose(inside, plain, rtol=1e-4)
    assert not torch.allclose(some, inside, rtol=1e-4)


def test_the_sum_of_loss_and_alignment_is_clipped():
    made = federation(config("fedalign", {"mu": 10.0}, rounds=1, **RESNET), images((20, 13, 7)))
    raw, spy = trace(made, raw=True), trace(made)
    play(made)
    before, after = (torch.cat([norm(g) for g in s.g]) for s in (raw, spy))
    assert float(before.min()) < 6 < 10 < float(before.max())
    torch.testing.assert_close(after, before.clamp(max=10), rtol=1e-6, atol=0)


def test_T_FA_2_the_gradient_stays_inside_the_slice_of_the_last_stage():
    module = resnet()
    step = step_of(module, X, Y, maps=True)
    _, g = step.gradient(LipschitzAlignment(1.0, 0.25, "raw").loss)
    layout = step.local.network.layout
    for name, part in layout.views(g[0]).items():
        if not name.startswith("layer3."):
            assert not part.any(), name
            continue
        inputs = 8 if name.endswith(("0.conv1.weight", "downsample.0.weight")) else 16
        inside = torch.zeros_like(part, dtype=torch.bool)
        inside[(slice(16), slice(inputs))[: part.dim()]] = True
        assert not part[~inside].any(), name
        assert part[inside].any(), name


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


def test_a_dead_stage_has_the_constant_zero_and_no_gradient():
    x = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert float(spectral_norm(x).detach().max()) <= 1e-100
    assert not torch.autograd.grad(spectral_norm(x).sum(), x)[0].any()


def test_the_transmitting_matrix_is_a_mean_over_positions():
    a, b = normal(2, 3, 4, 4), normal(2, 5, 2, 2, seed=1)
    pooled = torch.stack(
        [
            torch.stack(
                [a[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((2, 3)) for j in range(2)], -1
            )
            for i in range(2)
        ],
        -2,
    )
    torch.testing.assert_close(transmitting(a, b), torch.einsum("xahw,xbhw->xab", pooled, b) / 4)


def test_T_FA_4_the_whole_stage_is_aligned_with_itself():
    step = step_of(resnet(), X, Y, maps=True)
    for scale in ("raw", "ce"):
        part = LipschitzAlignment(1.0, 1.0, scale)
        assert part.gaps(step.forward()).abs().max().item() <= 1e-12
        assert float(part.loss(step, step.forward()).detach()) <= 1e-9
        assert step.gradient(part.loss)[1].isfinite().all()


def test_T_FA_5_the_scaled_term_has_the_value_of_mu_times_the_loss():
    for seed in (1, 2):
        step = step_of(resnet(seed), X, Y, maps=True)
        out = step.forward()
        ce = float(F.cross_entropy(out.logits[0], Y[0]).detach())
        assert float(
            LipschitzAlignment(0.45, 0.25, "ce").loss(step, out).detach()
        ) == pytest.approx(0.45 * ce, rel=1e-12)
        raw = float(LipschitzAlignment(0.45, 0.25, "raw").loss(step, out).detach())
        assert math.isfinite(raw)
        assert raw != pytest.approx(0.45 * ce, rel=1e-2)


def test_the_only_further_forward_is_the_slim_last_stage(monkeypatch):
    """89.1 million multiply-adds an image with resnet56 against 87.2 of FedAvg (Mendieta et al., Table 5)."""
    module = models.build("resnet56", (3, 32, 32), 100)
    step = step_of(module, normal(1, 2, 3, 32, 32), Y[:, :2], maps=True)
    calls, call = [], Network.call
    monkeypatch.setattr(
        Network,
        "call",
        lambda self, what, *a, **k: (calls.append((what, k)), call(self, what, *a, **k))[1],
    )
    with FlopCounterMode(display=False) as counter:
        LipschitzAlignment(0.45, 0.25, "ce").loss(step, step.forward())
    assert calls == [("stages", {}), ("pooled", {}), ("head", {}), ("last_stage", {"width": 0.25})]
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    layers = (
        sum(n for op, n in counts.items() if "bmm" not in op) / 2
    )  # two operations a multiply-add
    assert layers / 2 == 87_237_632 + 1_867_776
    assert (
        counts["aten.bmm"] / counter.get_total_flops() < 0.05
    )  # transmitting matrices and power iterations
