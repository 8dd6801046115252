"""FedNTD: the distillation loss against its definition, written out example by example."""

import types

import numpy as np
import pytest
import torch
from helpers import classification, close, config, federation, final, play, terms, trace

from fldiag.parts.proximal import NotTrueDistillation, not_true

UNEQUAL = (20, 13, 7)


def term(part, student, teacher, y, weight=None):
    """The part's loss [k] for given logits [k, B, C]."""
    step = types.SimpleNamespace(
        y=y,
        local=types.SimpleNamespace(w_g=None),
        received_logits=lambda: teacher,
        mean=lambda v: v.mean(1) if weight is None else (v * weight).sum(1),
    )
    return part.loss(step, types.SimpleNamespace(logits=student))


def logits(seed, shape=(2, 6, 4)):
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    )


Y = torch.tensor([[0, 1, 2, 3, 1, 0], [3, 3, 2, 0, 1, 2]])


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 1.0), (0.5, 3.0)])
def test_the_loss_is_its_definition(mu, tau):
    student, teacher = logits(0), logits(1)
    ours = term(NotTrueDistillation(mu, tau), student, teacher, Y)
    for k in range(2):
        total = 0.0
        for i in range(6):
            others = [c for c in range(4) if c != int(Y[k, i])]
            q, p = (np.exp(z[k, i, others].numpy() / tau) for z in (student, teacher))
            q, p = q / q.sum(), p / p.sum()
            total += (p * np.log(p / q)).sum() / 6
        assert abs(float(ours[k]) - mu * tau**2 * total) <= 1e-12
        assert total > 0.1


def test_T_NTD_2_the_first_local_step_is_fedavgs():
    data, spies = classification(UNEQUAL), []
    for method in ("fedavg", "fedntd"):
        made = federation(config(method, per_round=1), data)
        spies.append(trace(made))
        play(made)
    plain, distilled = spies
    close(plain.g[0], distilled.g[0], terms=terms(made.setup.module, examples=8))
    assert float((plain.g[1] - distilled.g[1]).abs().max()) > 1e-5


def test_T_NTD_3_the_logit_of_the_true_class_is_of_no_consequence():
    part, student, teacher = NotTrueDistillation(1.0, 2.0), logits(0), logits(1)
    before = term(part, student, teacher, Y)
    for z in (student, teacher):
        moved = [
            s.scatter_add(-1, Y[..., None], torch.full((2, 6, 1), 5.0, dtype=torch.float64))
            if s is z
            else s
            for s in (student, teacher)
        ]
        close(term(part, *moved, Y), before, terms=student.shape[-1])
    other = student.clone()
    other[0, 0, 1] += 5.0  # not the true class of this example
    assert not torch.allclose(term(part, other, teacher, Y), before, rtol=1e-3)


def test_T_NTD_4_two_classes_leave_nothing_to_distil():
    part = NotTrueDistillation(1.0, 1.0)
    assert not term(part, logits(0, (2, 6, 2)), logits(1, (2, 6, 2)), Y % 2).any()
    data = classification(UNEQUAL, classes=2)
    assert float((final(config("fedntd"), data) - final(config(), data)).abs().max()) <= 1e-12


def test_indices_of_the_other_classes():
    assert not_true(4, torch.tensor([[0, 2, 3]])).tolist() == [[[1, 2, 3], [0, 1, 3], [0, 1, 2]]]
