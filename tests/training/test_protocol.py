"""The round protocols of the papers as config keys: sampling, short minibatches, weights, momentum, clipping."""

import numpy as np
import pytest
import torch
from helpers import (
    PLAIN,
    classification,
    config,
    federation,
    final,
    play,
    quadratics,
    seeded,
    setup,
)


def test_independent_clients_join_with_the_given_probability():
    schedule = seeded(3, 50, 5, 1, 8, sampling="independent")
    joined = [schedule.sampled(t) for t in range(2000)]
    sizes = np.array([len(ids) for ids in joined])
    assert all(len(set(ids)) == len(ids) > 0 and ids == sorted(ids) for ids in joined)
    # Binomial(50, 0.1) without its 0: mean 5 / (1 - 0.9^50) = 5.026, deviation 2.1 -> standard error 0.05
    assert sizes.mean() == pytest.approx(5.026, abs=0.2)
    assert sizes.std() == pytest.approx(2.1, abs=0.2)
    counts = np.bincount(np.concatenate(joined), minlength=50) / 2000
    assert counts.min() > 0.07
    assert counts.max() < 0.13
    assert joined == [schedule.sampled(t) for t in range(2000)]


def test_clients_by_round_are_those_of_fedsol_s_code():
    """What ``np.random.seed(t)`` and ``np.random.choice(100, 10, replace=False)`` draw for the first and the 300th round."""
    schedule = seeded(0, 100, 10, 5, 50, sampling="by_round")
    assert schedule.sampled(0) == [2, 16, 26, 54, 55, 73, 75, 86, 93, 95]
    assert schedule.sampled(299) == [3, 9, 11, 13, 22, 35, 45, 54, 64, 67]
    assert all(
        seeded(7, 100, 10, 5, 50, sampling="by_round").sampled(t) == schedule.sampled(t)
        for t in range(20)
    )
    made = setup(
        config(seed=3).replace(clients__sampling="by_round", clients__per_round=2), classification()
    )
    assert [len(made.schedule.sampled(t)) for t in range(3)] == [2, 2, 2]
    assert made.schedule.sampled(1) == seeded(9, 3, 2, 5, 50, sampling="by_round").sampled(1)


@pytest.mark.parametrize("stack", ["off", "on"])
def test_weights_by_full_minibatches(stack):
    """20, 13 and 7 examples in batches of 8: 2, 1 and no full minibatch; the third client then has no say."""
    made = federation(config(drop_last=True, aggregate="batches", stack=stack), classification())
    [(seen, _)] = play(made)
    assert seen.steps.tolist() == [4, 2, 0]
    assert seen.p.tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    torch.testing.assert_close(made.w, (2 * seen.rows[0] + seen.rows[1]) / 3)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_clipping_before_the_quadratic_penalty(clip):
    """With it, min(1, clip / ||g - lam w_g||) acts on the gradient and the linear part; lam w joins afterwards."""
    q, lam, lr = quadratics((12,)), 0.3, 0.05
    settings = {**PLAIN, "epochs": 5, "lr": lr, "clip": clip}
    made = federation(
        q.config("fedprox", {"mu": lam}, clip_before_quadratic=True, **settings), q.data
    )
    w_g = made.w.clone()
    [(seen, _)] = play(made)
    w, clipped = w_g.clone(), 0
    for _ in range(5):
        g = q.gradient(0, w) - lam * w_g
        scale = 1.0 if clip is None else min(1.0, clip / (float(g.norm()) + 1e-6))
        clipped += scale < 1
        w = w - lr * (scale * g + lam * w)
    torch.testing.assert_close(seen.rows[0], w, rtol=1e-12, atol=1e-13)
    plain = final(q.config("fedprox", {"mu": lam}, rounds=1, **settings), q.data)
    if clip is None:
        torch.testing.assert_close(plain, made.w, rtol=1e-12, atol=1e-13)
    else:
        assert clipped
        assert not torch.allclose(plain, made.w, rtol=1e-4)
