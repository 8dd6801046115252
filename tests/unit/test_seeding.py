"""Seeds: a function of what they are for, and of nothing else."""

import subprocess
import sys

import numpy as np
import torch

from fldiag.seeding import numpy_rng, seed_for, torch_rng
from fldiag.training.setup import Seeded


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
    one, other = Seeded(3, 20, 5, 2, 4), Seeded(3, 20, 5, 2, 4)
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
    assert one.sampled(0) != Seeded(4, 20, 5, 2, 4).sampled(0)


def test_an_epoch_is_a_permutation_with_a_short_last_batch():
    batches = Seeded(0, 2, 1, 3, 4).batches(0, 0, 11)
    assert [len(b) for b in batches] == [4, 4, 3] * 3
    epochs = [np.concatenate(batches[i : i + 3]) for i in (0, 3, 6)]
    assert all(np.array_equal(np.sort(e), np.arange(11)) for e in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_clients_and_rounds_have_orders_of_their_own():
    schedule = Seeded(0, 3, 3, 1, 12)
    orders = {tuple(schedule.batches(t, client, 12)[0]) for t in range(3) for client in range(3)}
    assert len(orders) == 9


def test_every_client_is_sampled_equally_often():
    counts = np.bincount(
        np.concatenate([Seeded(0, 10, 3, 1, 1).sampled(t) for t in range(2000)]), minlength=10
    )
    assert abs(counts - 600).max() < 5 * np.sqrt(2000 * 0.3 * 0.7)
