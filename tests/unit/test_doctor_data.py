"""What clients train on, as the doctor sees it: planted faults are named, and odd but sound training is not accused."""

import math

import helpers
import numpy as np
import pytest
import torch
from federations import blobs, mean, network, record, trained

from fldiag.data import Dataset
from fldiag.diagnostics.doctor.checks import CHECKS
from fldiag.diagnostics.doctor.examine import examine
from fldiag.diagnostics.doctor.models import RoundFit
from fldiag.diagnostics.doctor.own_data import find_assignment
from fldiag.diagnostics.doctor.statistics import excess, tie

DATA_CHECKS = ("own_data", "test_data", "inputs", "duplicates")


def world():
    """Clouds that overlap, so that examples are remembered: (data, parts) of eight clients, which differ in their classes."""
    rng = np.random.default_rng(3)
    sizes = (36, 30, 28, 34, 32, 38, 30, 32)
    centres = rng.normal(size=(4, 6))
    labels = [
        rng.choice(4, size=n, p=np.roll([0.6, 0.3, 0.05, 0.05], k)) for k, n in enumerate(sizes)
    ]
    y = np.concatenate([*labels, rng.integers(4, size=200)])
    x = torch.from_numpy(centres[y] + rng.normal(size=(len(y), 6))).float()
    ends, n = np.cumsum(sizes), sum(sizes)
    parts = [np.arange(e - m, e) for m, e in zip(sizes, ends, strict=True)]
    y = torch.from_numpy(y)
    return Dataset("clouds", x[:n], y[:n], x[n:], y[n:], 4), parts


def recorded(path, examples=None, rounds=6, given=None, **options):
    """A run in which client k of round t trains on ``examples`` (t, k, data, parts) -> x, y."""
    data, parts = given or world()

    def client(t, k, received, state):
        if examples is None:
            return state
        net = network(norm=False)
        net.load_state_dict(received)
        x, y = examples(t, k, data, parts)
        return trained(net, x, y, lr=0.5, steps=80).state_dict()

    net = network(norm=False)
    run = record(
        path,
        world=(data, parts),
        net=net,
        rounds=rounds,
        per_round=8,
        client=client,
        server=lambda t, w, s, n: mean(s, n),
        **options,
    )
    run.data, run.model = data, network(norm=False)
    return run


def found(run, severities=("fault", "warning")):
    checks = [check for check in CHECKS if check.name in DATA_CHECKS]
    table = examine([run], {"device": "cpu"}, checks)
    return table[table["severity"].isin(severities)]


def own(k, data, parts):
    return data.train_x[parts[k]], data.train_y[parts[k]]


def neighbours(t, k, data, parts):
    return own((k + 1) % 8, data, parts)


def swapped(t, k, data, parts):
    return own({1: 3, 3: 1}.get(k, k), data, parts)


def shifted_labels(t, k, data, parts):
    x, y = own(k, data, parts)
    return x, (y + 1) % 4


def shuffled(t, k, data, parts):
    x, y = own(k, data, parts)
    return x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(t))] if k == 2 else y


def anew(t, k, data, parts):
    if t == 1:
        return own(k, data, parts)
    order = np.random.default_rng(t).permutation(len(data.train_y))
    rows = np.array_split(order, 8)[k]
    return data.train_x[rows], data.train_y[rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("examples", "check", "what", "client"),
    [
        (neighbours, "own_data", "client k fits the data of client k + 1", None),
        (swapped, "own_data", "client 1 that of client 3, client 3 that of client 1", None),
        (shifted_labels, "own_data", "are not the recorded ones", None),
        (shuffled, "own_data", "client 2", 2),
        (anew, "own_data", "another partition in every round", None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_clients_train_on_instead_is_named(tmp_path, examples, check, what, client):
    rows = found(recorded(tmp_path / "run", examples, rounds=8))
    row = rows[rows["metric"] == check].iloc[0]
    assert what in row["what"], rows[["metric", "what", "evidence"]].to_dict("records")
    assert client is None or row["client"] == client


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 20, 200])
@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_sound_training_of_any_length_is_not_accused(tmp_path, steps, rate):
    data, parts = world()

    def client(t, k, received, state):
        net = network(norm=False)
        net.load_state_dict(received)
        return trained(net, *own(k, data, parts), lr=rate, steps=steps).state_dict()

    run = record(
        tmp_path / "run",
        world=(data, parts),
        net=network(norm=False),
        per_round=8,
        client=client,
        server=lambda t, w, s, n: mean(s, n),
    )
    run.data, run.model = data, network(norm=False)
    assert found(run).empty, found(run)[["what", "evidence"]].to_dict("records")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_on_test", "one_on_test", "small_at_one", "nan_of_server"])
def test_kinds_of_the_study_are_found(tmp_path, kind):
    study = helpers.analysis("doctor_kinds")
    table = study.doctor(study.BROKEN[kind], kind, 2, tmp_path)
    assert study.outcome(study.BROKEN[kind], table) == "found", table["what"].dropna().tolist()


def test_examples_that_are_held_twice(tmp_path):
    data, parts = blobs()
    copies = Dataset(
        "copies",
        torch.cat([data.train_x, data.train_x[parts[1]]]),
        torch.cat([data.train_y, data.train_y[parts[1]]]),
        data.test_x,
        data.test_y,
        4,
    )
    n = len(data.train_y)
    held = [*parts[:6], np.arange(n, n + len(parts[1])), np.r_[parts[7], parts[7][:15]]]
    rows = found(recorded(tmp_path / "run", rounds=1, given=(copies, held)))
    assert set(rows["what"]) == {
        "client 7 holds examples twice",
        "clients 1 and 6 hold equal examples",
    }


def test_a_table_with_few_distinct_rows_is_no_copy(tmp_path):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 2, (240, 6), generator=g).float()
    x[:, 3:] = 0
    y = torch.randint(0, 4, (240,), generator=g)
    given = Dataset("few", x[:200], y[:200], x[200:], y[200:], 4), np.split(np.arange(200), 8)
    assert found(recorded(tmp_path / "run", rounds=1, given=given)).empty


def test_the_tie_of_labels_to_inputs_has_the_moments_of_all_permutations():
    rng = np.random.default_rng(0)
    change, labels = rng.normal(size=(40, 3)), rng.integers(3, size=40)
    sums = [change[np.arange(40), rng.permutation(labels)].sum() for _ in range(20_000)]
    z = (change[np.arange(40), labels].sum() - np.mean(sums)) / np.std(sums)
    assert tie(change, labels) == pytest.approx(z, abs=0.05)
    assert math.isnan(tie(change, np.zeros(40, dtype=int)))


def test_an_assignment_is_found_and_beats_random_ones():
    rng = np.random.default_rng(0)
    fits = []
    for _ in range(4):
        gain = rng.normal(size=(6, 6)) * 0.1
        gain[np.arange(6), (np.arange(6) + 2) % 6] += 1
        fits.append(RoundFit(tuple(range(6)), gain))
    assert find_assignment(fits) == {k: (k + 2) % 6 for k in range(6)}
    assert excess(fits[0].advantage, [(k + 2) % 6 for k in range(6)]) > 3
    assert abs(excess(fits[0].advantage, list(range(6)))) < 2
