"""Seeds: a function of what they are for, and of nothing else."""

import subprocess
import sys

import numpy as np
import torch
from helpers import seeded

from fldiag.seeding import numpy_rng, seed_for, torch_rng


def test_a_seed_is_fixed_by_its_purpose_and_indices():
    first = seed_for(1, "batches", 2, 3)
    others = {
        seed_for(1, "batches", 2, 4),
        seed_for(1, "batches", 3, 2),
        seed_for(1, "batches", 23),
        seed_for(2, "batches", 2, 3),
        seed_for(1, "clients", 2, 3),
        seed_for(12, "batches", 3),
        seed_for(1, "batches", 2),
    }
    assert first == seed_for(1, "batches", 2, 3)
    assert first not in others
    assert len(others) == 7
    assert 0 <= first < 2**63
    assert (
        seed_for(np.int64(1), "batches", np.int32(2), 3) == first
    )  # numpy's integers are integers


def test_a_seed_is_the_same_in_every_process():
    code = "from fldiag.seeding import seed_for; print(seed_for(1, 'batches', 2, 3))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert int(out) == seed_for(1, "batches", 2, 3)


def test_generators_leave_the_global_state_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    a, b = numpy_rng(1, "x").random(3), torch.rand(3, generator=torch_rng(1, "x"))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert np.array_equal(a, numpy_rng(1, "x").random(3))
    assert torch.equal(b, torch.rand(3, generator=torch_rng(1, "x")))


def test_a_schedule_depends_on_seed_round_and_client_only():
    one, other = seeded(3, 20, 5, 2, 4), seeded(3, 20, 5, 2, 4)
    other.batches(7, 2, 50)
    other.sampled(9)
    for t in range(3):
        assert one.sampled(t) == other.sampled(t) == sorted(set(one.sampled(t)))
        assert len(one.sampled(t)) == 5
        assert all(
            np.array_equal(a, b)
            for a, b in zip(one.batches(t, 1, 11), other.batches(t, 1, 11), strict=True)
        )
    assert len({tuple(one.sampled(t)) for t in range(10)}) > 5
    assert one.sampled(0) != seeded(4, 20, 5, 2, 4).sampled(0)
