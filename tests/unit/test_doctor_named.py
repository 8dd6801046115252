"""A run that names the rule of its server is checked as that rule."""

import pytest
import torch
from federations import SIZES, blobs, mean, network, record
from test_doctor import weights

from fldiag.diagnostics.doctor.checks import CHECKS
from fldiag.diagnostics.doctor.examine import examine
from fldiag.diagnostics.doctor.named_rules import find_rule, is_known


def flat(state):
    return torch.cat([v.reshape(-1).double() for n, v in state.items() if "num" not in n])


def krum(keep, near, farthest=False):
    def server(t, received, states, sizes):
        rows = torch.stack([flat(s) for s in states])
        scores = (torch.cdist(rows, rows) ** 2).sort(1).values[:, 1 : near + 1].sum(1)
        best = scores.argsort(descending=farthest)[:keep].tolist()
        return mean([states[i] for i in best], [1] * keep)

    return server


def coordinates(function):
    def server(t, received, states, sizes):
        return {
            n: function(torch.stack([s[n] for s in states]).sort(0).values)
            if v.is_floating_point()
            else v
            for n, v in received.items()
        }

    return server


def trimmed(cut):
    return coordinates(lambda v: v[cut : len(v) - cut].mean(0))


def geometric(t, received, states, sizes):
    new = mean(states, sizes)
    for _ in range(4):
        far = [float((flat(s) - flat(new)).norm()) for s in states]
        new = mean(states, [n / d for n, d in zip(sizes, far, strict=True)])
    return new


def nova(effective=True):
    def server(t, received, states, sizes):
        steps = [1 + n // 10 for n in sizes]
        shares = [n / sum(sizes) for n in sizes]
        whole = sum(p * s for p, s in zip(shares, steps, strict=True)) if effective else 1.0
        return {
            n: v
            + whole * sum(p / s * (x[n] - v) for p, s, x in zip(shares, steps, states, strict=True))
            if v.is_floating_point()
            else v
            for n, v in received.items()
        }

    return server


def plain(t, received, states, sizes):
    return mean(states, [1] * len(states))


def aggregate(path, method, server, **options):
    run = record(
        path,
        net=network(norm=False),
        per_round=options.pop("per_round", 8),
        server=server,
        method=method,
        **options,
    )
    run.data, run.model = blobs()[0], network(norm=False)
    table = examine([run], {"device": "cpu"}, [c for c in CHECKS if c.name == "aggregate"])
    return table


@pytest.mark.parametrize(
    ("method", "right", "wrong"),
    [
        ("krum", krum(1, 5), plain),
        ("Multi-Krum", krum(5, 5), krum(5, 5, farthest=True)),
        ("FedTrimmedAvg", trimmed(2), plain),
        ("fedmedian", coordinates(lambda v: (v[3] + v[4]) / 2), trimmed(1)),
        ("geometric_median", geometric, plain),
        ("fednova", nova(), nova(effective=False)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_named_rule_is_sound_where_it_is_followed_and_a_fault_where_not(
    tmp_path, method, right, wrong
):
    table = aggregate(tmp_path / "right", method, right, rounds=4)
    assert table["severity"].tolist() == ["healthy"], table["what"].tolist()
    (row,) = aggregate(tmp_path / "wrong", method, wrong, rounds=4).itertuples()
    assert row.severity == "fault" and "names" in row.what


@pytest.mark.parametrize(
    ("method", "origin", "server", "severity", "what"),
    [
        ("our_rule", {}, lambda t, w, s, n: s[-1], "information", "our_rule is not known"),
        ("fedadam", {}, mean_of := lambda t, w, s, n: mean(s, n), "fault", "names fedadam"),
        ("fedavgm", {}, mean_of, "warning", "names fedavgm"),
        ("fedavg", {"server_lr": 0.5}, weights(lambda k, n: 0.25), "fault", "acts twice"),
        ("fedavg", {"server_lr": 0.5}, mean_of, "fault", "not the one that the run states"),
        ("fedavg", {"server_lr": 0.5}, weights(lambda k, n: 0.5), "healthy", ""),
        ("fedavg", {"weights": "by examples"}, plain, "fault", "plain mean"),
        ("fedavg", {"weights": "uniform"}, plain, "healthy", ""),
    ],
)
def test_what_a_run_says_of_its_server_is_checked(tmp_path, method, origin, server, severity, what):
    (row,) = aggregate(tmp_path / "run", method, server, origin=origin, rounds=4).itertuples()
    assert row.severity == severity and (not what or what in row.what)


def test_krum_without_its_name_is_information(tmp_path):
    table = aggregate(tmp_path / "run", "own", krum(1, 5), rounds=6)
    assert table["severity"].tolist() == ["information"] and "Krum" in table["what"].iloc[0]


def test_a_client_without_examples_has_no_weight(tmp_path):
    data, parts = blobs()
    world = data, [*parts[:-1], parts[-1][:0]]
    run = record(
        tmp_path / "run",
        world=world,
        net=network(norm=False),
        per_round=8,
        client=lambda t, k, received, state: received if k == 7 else state,
    )
    run.data, run.model = data, network(norm=False)
    table = examine([run], {"device": "cpu"}, [c for c in CHECKS if c.name == "aggregate"])
    assert table["severity"].tolist() == ["healthy"] and len(SIZES) == 8


def test_a_mixture_that_no_rule_fits_says_which_is_nearest(tmp_path):
    def noisy(t, received, states, sizes):
        g, new = torch.Generator().manual_seed(t), mean(states, sizes)
        return {n: v + 0.3 * torch.randn(v.shape, generator=g) for n, v in new.items()}

    (row,) = aggregate(tmp_path / "run", "fedavg", noisy, rounds=3).itertuples()
    assert "the nearest rule (" in row.evidence and "misses" in row.evidence


def test_names_are_read_whatever_stands_between_their_letters():
    assert find_rule("Fed-Trimmed_Avg").title == "the trimmed mean"
    assert find_rule("multi krum").title == "Multi-Krum" and find_rule("krum-attack") is not None
    assert find_rule("fedavg") is None and is_known("fedavg_unweighted") and not is_known("zeno")
