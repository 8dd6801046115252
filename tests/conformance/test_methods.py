"""What holds for every registered method, the day its file exists. No method is named here."""

import pytest
import torch
from helpers import (
    Recorded,
    config,
    federation,
    final,
    images,
    label,
    needs,
    play,
    stacks,
    variants,
    world,
)

from fldiag import registry
from fldiag.execution import open_pool
from fldiag.runs.run import Run
from fldiag.training import train
from fldiag.training.server import Federation
from fldiag.training.setup import Seeded, Setup

VARIANTS = variants()
NAMES = registry.method.names()
#: ``world`` has clients of 20, 13 and 7 examples: batches of 8 leave last batches of 4, 5 and 7, and 6, 4 and 2 steps.
CNN = {"model": "small_cnn", "model_options": {}}
every_method = pytest.mark.parametrize("name", NAMES)
#: Methods on batch-norm nets train one client at a time.
STACKED = [case for case in VARIANTS if stacks(case[0])]
every_stacked_variant = pytest.mark.parametrize(
    ("name", "options"), STACKED, ids=map(label, STACKED)
)


def in_both_forms(names):
    return pytest.mark.parametrize(
        ("name", "stack"), [(n, s) for n in names for s in ("off", "on") if s == "off" or stacks(n)]
    )


NEUTRAL = [n for n in NAMES if registry.method.get(n).meta["equals"]]


@in_both_forms(NEUTRAL)
def test_the_neutral_setting_is_the_simpler_method(name, stack):
    """T-PROX-1, T-SAM-1, T-SOL-1, T-NTD-1, T-CM-1, T-MOON-1, T-AVGM-1, T-ACG-2, T-RCL-1, T-SD-1, T-GA-1, T-BABU-2 and their like."""
    meta, data, kind = registry.method.get(name).meta, world(name), needs(name)
    # the simpler method's own options keep their values where the two share them
    shared = set(registry.method.get(meta["equals"]).options.model_fields) & set(meta["neutral"])
    simple = final(
        config(meta["equals"], {k: meta["neutral"][k] for k in shared}, stack=stack, **kind), data
    )
    neutral = final(config(name, meta["neutral"], stack=stack, **kind), data)
    if stack == "off":
        assert torch.equal(neutral, simple)
    else:
        torch.testing.assert_close(neutral, simple, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", NEUTRAL)
def test_away_from_the_neutral_setting_the_method_does_something(name):
    """Otherwise the neutral test would pass for a method that does nothing at all."""
    meta, data, kind = registry.method.get(name).meta, world(name), needs(name)
    assert not torch.allclose(
        final(config(name, **kind), data), final(config(meta["equals"], **kind), data), rtol=1e-6
    )


@every_stacked_variant
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5)])
@pytest.mark.slow
def test_a_stack_trains_as_its_clients_one_by_one(name, options, precision, tolerance):
    data, kind = world(name), needs(name)
    looped, stacked = (
        federation(config(name, options, precision=precision, stack=s, **kind), data)
        for s in ("off", "on")
    )
    one, other = play(looped, 2), play(stacked, 2)
    for (a, _), (b, _) in zip(one, other, strict=True):
        assert a.steps.tolist() == b.steps.tolist() == [6, 4, 2]
        assert relative(b.rows, a.rows) <= tolerance
    for i, state in looped.clients.items():
        for key in state:
            assert relative(stacked.clients[i][key], state[key]) <= 10 * tolerance
    for key in looped.state:
        assert relative(stacked.state[key], looped.state[key]) <= 10 * tolerance


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
    seeded = Seeded(0, 4, 3, 2, 8)
    ids = [seeded.sampled(t) for t in range(2)]
    positions = [
        {i: [b.tolist() for b in seeded.batches(t, i, len(parts[i]))] for i in range(4)}
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


@pytest.mark.slow
@in_both_forms(NAMES)
def test_interrupted_and_resumed_is_bitwise_a_run_that_was_not(name, stack, tmp_path):
    chosen = config(name, rounds=4, total=5, per_round=2, epochs=1, stack=stack, **needs(name))
    whole = train.train(chosen, out=tmp_path / "whole")

    def stop(event):
        if event["event"] == "round" and event["round"] in (1, 3):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train.train(chosen, out=tmp_path / "cut", on_event=stop, resume=True)
        assert Run.open(tmp_path / "cut").status == "unfinished"
    cut = train.train(chosen, out=tmp_path / "cut", resume=True)
    assert cut.status == whole.status == "finished"
    assert cut.rounds == whole.rounds == [1, 2, 3, 4]
    for r in whole.rounds:
        mine, other = cut.checkpoint(r).state, whole.checkpoint(r).state
        assert all(torch.equal(mine[key], other[key]) for key in other)
    measured = [run.metrics.drop(columns="run") for run in (cut, whole)]
    assert measured[0].equals(measured[1])


@every_method
@pytest.mark.slow
def test_the_state_survives_the_checkpoint(name, tmp_path):
    chosen = config(name, rounds=2, total=5, per_round=2, epochs=1, **needs(name))
    run = train.train(chosen, out=tmp_path)
    memory, restored = Federation(Setup(chosen)), Federation(Setup(chosen))
    play(memory, 2)
    restored.restore(run)
    assert restored.t == memory.t
    assert torch.equal(restored.w, memory.w)
    assert same(restored.state, memory.state)
    assert restored.clients.keys() == memory.clients.keys()
    assert all(same(restored.clients[i], memory.clients[i]) for i in memory.clients)
    stored = run.checkpoint().state
    assert torch.equal(
        torch.cat([stored[n].flatten() for n in memory.setup.network.layout.names]), memory.w
    )
    assert same(restored.buffers, memory.buffers)


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
    with open_pool(request.param, cohort, None, threads=1) as made:
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


@every_method
def test_documented_with_source_equations_and_cost(name):
    entry = registry.method.get(name)
    assert entry.headline.endswith(".")
    assert len(entry.meta["source"]) > 10
    assert "Cost:" in entry.doc
    assert "Server:" in entry.doc
    for option in entry.options.model_fields:
        assert option in entry.doc, f"{name}: {option} is not explained"
    if entry.meta["equals"]:
        assert entry.meta["equals"] in NAMES
        assert set(entry.meta["neutral"]) <= set(entry.options.model_fields)
