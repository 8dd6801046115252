"""What holds for every registered method, the day its file exists. No method is named here."""

import pytest
import torch
from helpers import (
    Recorded,
    config,
    federation,
    final,
    images,
    needs,
    play,
    seeded,
    stacks,
    world,
)

from fldiag import registry
from fldiag.device import threads
from fldiag.execution import open_pool
from fldiag.training import train
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

NAMES = registry.method.names()
#: ``world`` has clients of 20, 13 and 7 examples: batches of 8 leave last batches of 4, 5 and 7, and 6, 4 and 2 steps.
CNN = {"model": "small_cnn", "model_options": {}}
every_method = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("name", [n for n in NAMES if stacks(n)])
@pytest.mark.slow
def test_a_stack_of_convolutional_nets_trains_as_its_clients_one_by_one(name):
    data = images()
    looped, stacked = (
        final(config(name, stack=s, epochs=1, **{**needs(name), **CNN}), data)
        for s in ("off", "on")
    )
    assert relative(stacked, looped) <= 1e-10


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


@pytest.mark.slow
@every_method
def test_the_order_of_the_sampled_clients_does_not_show(name):
    data, parts = world(name, (11, 10, 8, 7))
    chosen = config(name, total=4, per_round=3, rounds=2, **needs(name))
    schedule = seeded(0, 4, 3, 2, 8)
    ids = [schedule.sampled(t) for t in range(2)]
    positions = [
        {i: [b.tolist() for b in schedule.batches(t, i, len(parts[i]))] for i in range(4)}
        for t in range(2)
    ]
    ends = [
        final(chosen, (data, parts), schedule=Recorded(order, positions))
        for order in (ids, [i[::-1] for i in ids])
    ]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(
        ends[0], final(chosen, (data, parts))
    )  # and the seeded schedule is what was recorded


@every_method
def test_the_global_random_state_is_untouched_and_without_influence(name):
    data, kind = world(name), needs(name)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = final(config(name, epochs=1, **kind), data)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, final(config(name, epochs=1, **kind), data))


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in b
    )


@every_method
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.slow
def test_the_uplink_is_counted_in_vectors(name, precision, tmp_path):
    chosen = config(name, rounds=1, epochs=1, batch_size=64, precision=precision, **needs(name))
    frame = train.train(chosen, out=tmp_path).metrics.set_index("metric")
    made = Setup(chosen)
    method, size = made.method, made.network.size
    buffers = sum(b.nbytes for b in made.network.buffers.values())
    item = {"fp32": 4, "fp64": 8}[precision]
    uploaded = [name for part in method for name in part.uploaded]
    scalars = [
        name for name in uploaded if name == "a_k"
    ]  # one number a client, everything else is a vector
    up = 1 + len(uploaded) - len(scalars)
    down = 1 + len(set(method.sent) & set(method.server_init(made.initial())))  # in round 0
    talks = not method.isolated
    assert frame.loc["uplink", "value"] == talks * ((up * size + len(scalars)) * item + buffers)
    assert frame.loc["downlink", "value"] == talks * (down * size * item + buffers)


def cohort(shared, item):
    """Builds the federation that a unit of work belongs to, in a worker process."""
    chosen, unit = item
    return Setup(chosen).train(unit)


@pytest.fixture(scope="module", params=["processes:2", "dask"])
def pool(request):
    with threads(1), open_pool(request.param, cohort, None) as made:
        yield made


@pytest.mark.slow
@every_method
def test_worker_processes_give_the_bits_of_this_process(name, pool):
    chosen = config(name, rounds=2, total=4, epochs=1, **needs(name))
    here, there = Federation(Setup(chosen)), Federation(Setup(chosen))
    for _ in range(2):
        play(here)
        there.round(lambda units: pool.map([(chosen, unit) for unit in units]))
    assert torch.equal(here.w, there.w)
    assert same(here.state, there.state)
    assert all(same(here.clients[i], there.clients[i]) for i in here.clients)


@every_method
def test_a_client_without_a_step_changes_nothing_of_itself(name):
    """E = 0: every client returns what it received, and the average of equal vectors is that vector."""
    made = federation(config(name, epochs=0, **needs(name)), world(name))
    before = made.w.clone()
    [(seen, _)] = play(made)
    assert torch.equal(seen.rows, before.expand(3, -1))
    torch.testing.assert_close(
        made.w, before, rtol=0, atol=1e-12
    )  # Adam on rounding noise moves by about 1e-13
