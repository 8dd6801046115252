"""Every check of the doctor: a fault that is planted is found where it is, and the clean twin is not accused of it."""

import math
import shutil
from types import SimpleNamespace

import federations
import numpy as np
import pytest
import torch
from federations import blobs, mean, network, record
from scipy.stats import binom
from torch import nn

import fldiag
from fldiag import registry
from fldiag.data import Dataset
from fldiag.diagnosis.about import describe
from fldiag.diagnosis.question import parse_question
from fldiag.diagnosis.subjects import open_subjects
from fldiag.diagnostics.doctor import fails
from fldiag.diagnostics.doctor.buffers import Statistics
from fldiag.diagnostics.doctor.checks import CHECKS
from fldiag.diagnostics.doctor.data import Parts
from fldiag.diagnostics.doctor.examine import examine
from fldiag.diagnostics.doctor.findings import Finding, Skip, beyond_chance
from fldiag.errors import FldiagError
from fldiag.runs.run import Run

BAD = ("fault", "warning")


def examined(*runs, check=None, data=None, model=None):
    """What all checks say, or one of them."""
    for run in runs:
        run.data, run.model = data or blobs()[0], model or network()
    return examine(
        runs,
        {"device": "cpu"},
        CHECKS if check is None else [c for c in CHECKS if c.name == check],
    )


def found(table, check=None, severities=BAD):
    rows = table[table["severity"].isin(severities)]
    return rows if check is None else rows[rows["metric"] == check]


# -- faults of a loop: (check, options of record, what the finding says, columns)


def ended(t, received, states, sizes):
    """Buffers of the model as it was received, weights averaged."""
    made = mean(states, sizes)
    return {n: received[n] if "running" in n else v for n, v in made.items()}


def weights(factor):
    """A server that averages updates and scales them: factor (K, sizes) -> number."""

    def server(t, received, states, sizes):
        made, s = mean(states, sizes), factor(len(states), sizes)
        return {
            n: received[n] + s * (v - received[n]) if v.is_floating_point() else v
            for n, v in made.items()
        }

    return server


def one_layer(t, received, states, sizes):
    return {**mean(states, sizes), **{n: states[-1][n] for n in states[0] if n.startswith("3.")}}


def total(t, received, states, sizes):
    """Shares of all clients' examples, so that they sum to less than 1."""
    n = sum(federations.SIZES)
    return {
        k: sum(m / n * s[k] for m, s in zip(sizes, states, strict=True))
        if v.is_floating_point()
        else v
        for k, v in states[0].items()
    }


def noisy(t, received, states, sizes):
    g, made = torch.Generator().manual_seed(t), mean(states, sizes)
    return {
        n: v + 0.1 * torch.randn(v.shape, generator=g)
        if v.is_floating_point() and "running" not in n
        else v
        for n, v in made.items()
    }


def broken(change):
    """A client (2) whose reply is changed: change (received, state) -> state."""
    return lambda t, k, received, state: change(received, state) if k == 2 else state


def moved(s):
    """The update times s."""
    return lambda received, state: {
        n: received[n] + s * (v - received[n])
        if v.is_floating_point() and "running" not in n
        else v
        for n, v in state.items()
    }


def mislabelled(labels):
    """What a client returns that trains on wrong labels: labels (true ones [n]) -> [n]."""

    def client(received, state):
        net, (data, parts) = network(), blobs()
        net.load_state_dict(received)
        return federations.trained(
            net, data.train_x[parts[2]], labels(data.train_y[parts[2]])
        ).state_dict()

    return client


flipped = mislabelled(lambda y: (y + 1) % 4)
shuffled = mislabelled(
    lambda y: y[torch.randperm(len(y), generator=torch.Generator().manual_seed(2))]
)


def variance(received, state):
    return {n: torch.zeros_like(v) if n.endswith("running_var") else v for n, v in state.items()}


def nan(received, state):
    return {n: v * math.nan if n == "0.weight" else v for n, v in state.items()}


def copied():
    last = {}

    def client(t, k, received, state):
        if k == 2 and last.get("t") == t:
            return last["state"]
        last.update(t=t, state=state)
        return state

    return client


def shared():
    """Every client returns what the round's first made."""
    made = {}
    return lambda t, k, received, state: made.setdefault(t, state)


def replayed():
    first = {}
    return lambda t, k, received, state: first.setdefault(k, state) if k == 2 else state


def dead(received, state):
    return {
        n: torch.full_like(v, -100.0)
        if n == "1.bias"
        else torch.zeros_like(v)
        if n == "1.weight"
        else v
        for n, v in state.items()
    }


def dying(t, received, states, sizes):
    return mean([dead(received, s) for s in states], sizes)


def accuracy(state, x, y):
    net = network()
    net.load_state_dict(state)
    return float((net.eval()(x).argmax(1) == y).float().mean())


def best_so_far():
    seen = []

    def metrics(t, state, data):
        seen.append(accuracy(state, data.test_x, data.test_y))
        return {"accuracy": max(seen)}

    return metrics


def on_training_data(t, state, data):
    return {"test_acc": accuracy(state, data.train_x, data.train_y)}


def plain_mean(t, state, data):
    each = {k: 0.5 + 0.05 * k for k in range(8)}
    return {"accuracy": each, "mean_accuracy": float(np.mean(list(each.values())))}


def mean_f1(t, state, data):
    each, n = {k: 0.5 + 0.05 * k for k in range(8)}, np.array(federations.SIZES)
    return {"f1": each, "global_f1": float(np.array(list(each.values())) @ n / n.sum())}


def worse_and_worse(t, received, states, sizes):
    """Training helps at first and harms later, so that the best round is not the last."""
    return weights(lambda k, n: 1.0 if t < 3 else -0.5)(t, received, states, sizes)


def same_examples():
    data, parts = blobs()
    return data, [*parts[:5], parts[4], *parts[6:]]


def without_a_class():
    data, parts = blobs()
    return Dataset(
        "three", data.train_x, data.train_y.clamp(max=2), data.test_x, data.test_y, 4
    ), parts


def in_half(t, received, states, sizes):
    return {
        n: sum(m / sum(sizes) * s[n].half() for m, s in zip(sizes, states, strict=True)).float()
        if v.is_floating_point()
        else v
        for n, v in states[0].items()
    }


def a_round_late():
    """The server takes the replies that it kept of the round before."""
    kept = {}

    def server(t, received, states, sizes):
        kept[t] = mean(states, sizes)
        return kept.get(t - 1, kept[t])

    return server


PLANTED = [
    ("aggregate", {"server": lambda t, w, s, n: mean(s, [1] * len(s))}, "plain mean", "warning"),
    ("aggregate", {"server": lambda t, w, s, n: s[-1]}, "model of one client", "fault"),
    ("aggregate", {"server": lambda t, w, s, n: w}, "did not change", "fault"),
    ("aggregate", {"server": lambda t, w, s, n: mean(s[1:], n[1:])}, "left out", "fault"),
    ("aggregate", {"server": lambda t, w, s, n: mean(s, n[::-1])}, "each other's sizes", "fault"),
    ("aggregate", {"server": total}, "do not sum to 1", "fault"),
    (
        "aggregate",
        {"server": lambda t, w, s, n: weights(lambda k, n: k)(t, w, s, [1] * len(s)), "rounds": 3},
        "adds",
        "fault",
    ),
    (
        "aggregate",
        {"server": weights(lambda k, n: sum(n) / sum(federations.SIZES))},
        "divided by all clients",
        "fault",
    ),
    (
        "aggregate",
        {"server": weights(lambda k, n: -1.0), "rounds": 3},
        "against its clients",
        "fault",
    ),
    ("aggregate", {"server": one_layer}, "some layers", "warning"),
    ("aggregate", {"server": in_half}, "rounded to half precision", "warning"),
    ("aggregate", {"server": a_round_late()}, "clients of the round before", "fault"),
    ("aggregate", {"server": noisy}, "neither a mean of the clients", "warning"),
    (
        "aggregate",
        {"server": lambda t, w, s, n: mean(s, [1, 2, 3, 10])},
        "neither equal nor by examples",
        "warning",
    ),
    (
        "aggregate",
        {"server": weights(lambda k, n: 0.7), "method": "fedavg"},
        "further or less far",
        "warning",
    ),
    (
        "continuity",
        {"start": lambda t, past: past[max(t - 2, 0)]},
        "earlier rounds, 1 behind",
        "warning",
    ),
    (
        "continuity",
        {"start": lambda t, past: past[0], "rounds": 9},
        "the aggregate of round 0, not",
        "warning",
    ),
    (
        "continuity",
        {"start": lambda t, past: past[min(t - 1, 2)], "rounds": 12},
        "the aggregate of round 2, not",
        "warning",
    ),
    ("buffers", {"server": ended}, "not aggregated", "fault"),
    (
        "buffers",
        {
            "server": lambda t, w, s, n: {
                **mean(s, n),
                **{k: v for k, v in s[-1].items() if "running" in k},
            }
        },
        "those of",
        "fault",
    ),
    (
        "buffers",
        {"server": lambda t, w, s, n: {**mean(s, n), "1.running_var": s[0]["1.running_var"]}},
        "1.running_var is not aggregated",
        "fault",
    ),
    (
        "buffers",
        {"server": lambda t, w, s, n: {**mean(s, n), "1.running_mean": w["1.running_mean"]}},
        "1.running_mean is not aggregated",
        "fault",
    ),
    ("buffer_values", {"client": broken(variance)}, "variance 0", "fault"),
    (
        "finite",
        {
            "client": broken(nan),
            "rounds": 3,
            "sampled": lambda t, rng: [0, 1, 2, 3] if t == 3 else [4, 5, 6, 7],
        },
        "not finite",
        "fault",
    ),
    (
        "sampling",
        {"sampled": lambda t, rng: rng.choice(7, 4, replace=False).tolist(), "rounds": 16},
        "client 7 was sampled never",
        "warning",
    ),
    ("sampling", {"sampled": lambda t, rng: [0, 2, 3, 5]}, "the same 4 of 8 clients", "warning"),
    ("zero_updates", {"client": broken(lambda w, s: w)}, "exactly zero", "warning"),
    (
        "copies",
        {"client": copied(), "sampled": lambda t, rng: [1, 2, 4, 5]},
        "is that of client 1",
        "fault",
    ),
    ("copies", {"client": shared(), "rounds": 4}, "return each other's updates", "fault"),
    ("copies", {"client": replayed()}, "had returned before", "fault"),
    ("norms", {"client": broken(moved(20.0))}, "unusually long", "warning"),
    ("own_data", {"client": broken(moved(-1.0))}, "raises the loss of client 2", "warning"),
    ("own_data", {"client": broken(flipped)}, "raises the loss of client 2", "warning"),
    ("dead_units", {"server": dying}, "units of 0.weight are dead", "warning"),
    ("reported", {"metrics": best_so_far(), "server": worse_and_worse}, "best so far", "warning"),
    ("reported", {"metrics": on_training_data}, "training data", "warning"),
    ("means", {"metrics": plain_mean}, "plain mean", "warning"),
    ("means", {"metrics": mean_f1}, "not the one of all", "warning"),
    ("partition", {"world": same_examples()}, "the same examples", "warning"),
]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return record(
        tmp_path_factory.mktemp("clean") / "run",
        metrics=lambda t, s, d: {"accuracy": accuracy(s, d.test_x, d.test_y)},
    )


@pytest.fixture(scope="module")
def healthy(clean):
    return examined(clean)


@pytest.mark.parametrize(
    ("check", "plant", "what", "severity"),
    PLANTED,
    ids=[f"{c}-{w}".replace(" ", "-") for c, _, w, _ in PLANTED],
)
@pytest.mark.slow
def test_a_planted_fault_is_found(tmp_path, healthy, check, plant, what, severity):
    run = record(tmp_path / "run", **plant)
    rows = found(examined(run, check=check, data=plant.get("world", blobs())[0]), check)
    assert len(rows) and rows["what"].str.contains(what).any(), rows[["what", "evidence"]].to_dict(
        "records"
    )
    assert severity in set(rows["severity"])
    assert check not in ("continuity", "copies") or len(rows) == 1  # one cause, one finding
    assert all(len(rows[c].dropna()) == len(rows) for c in ("evidence", "consequence", "remedy"))
    if plant.get("client") and check in ("zero_updates", "norms", "own_data", "finite"):
        assert set(rows["client"].dropna()) == {2}
    assert found(healthy, check).empty


def test_a_class_that_no_client_holds_is_information(tmp_path):
    world = without_a_class()
    table = examined(record(tmp_path / "run", world=world), check="partition", data=world[0])
    (row,) = table[table["what"].notna()].to_dict("records")
    assert (row["what"], row["severity"]) == ("no client holds class 3", "information")


def test_shuffled_labels_are_told_once_the_model_knows_more_than_the_shares_of_classes(tmp_path):
    """In round 1 they lower the loss: they have the right shares."""
    (row,) = examined(
        record(tmp_path / "run", client=broken(shuffled), rounds=10), check="own_data"
    ).itertuples()
    assert row.severity == "warning" and row.client == 2
    assert "raises the loss of client 2" in row.what and "permutation test" in row.evidence
    assert not str(row.rounds).startswith("1,")


def test_the_clean_twin_is_healthy(healthy):
    assert found(healthy).empty, found(healthy)[["metric", "what", "evidence"]].to_dict("records")
    assert set(healthy["metric"]) == {check.name for check in CHECKS}
    unchecked = healthy[healthy["severity"] == "not checked"]
    assert (
        set(unchecked["metric"]) == {"adapters", "means", "seeds"}
        and unchecked["evidence"].str.startswith("because").all()
    )


# -- what is meant is no fault


def adam(beta=0.9):
    m, v = {}, {}

    def server(t, received, states, sizes):
        made = {}
        for n, w in mean(states, sizes).items():
            if "running" in n or not w.is_floating_point():
                made[n] = w
                continue
            d = (w - received[n]).double()
            m[n] = beta * m.get(n, 0 * d) + (1 - beta) * d
            v[n] = 0.99 * v.get(n, 0 * d) + 0.01 * d**2
            made[n] = (received[n] + 0.05 * m[n] / (v[n].sqrt() + 1e-3)).float()
        return made

    return server


def heavy_ball():
    m = {}

    def server(t, received, states, sizes):
        made = mean(states, sizes)
        for n in [n for n, v in made.items() if v.is_floating_point() and "running" not in n]:
            m[n] = 0.9 * m.get(n, 0) + (made[n] - received[n]).double()
            made[n] = (received[n] + m[n]).float()
        return made

    return server


@pytest.mark.parametrize(
    "server",
    [adam(), adam(0.0), heavy_ball(), weights(lambda k, n: 0.7)],
    ids=["adam", "adagrad-like", "momentum", "rate"],
)
def test_server_steps_of_a_loop_are_information(tmp_path, server):
    table = examined(record(tmp_path / "run", server=server), check="aggregate")
    assert found(table).empty, found(table)["what"].tolist()
    assert len(found(table, "aggregate", ["information"]))


def test_layers_that_nobody_trains_are_information(tmp_path):
    net = network()
    net[0].requires_grad_(False)
    row = examined(record(tmp_path / "run", net=net), check="zero_updates").iloc[0]
    assert row["severity"] == "information" and row["layer"] == "0.bias, 0.weight"


def test_equal_sizes_make_the_plain_mean_the_right_one(tmp_path):
    world = blobs(sizes=(30,) * 8)
    run = record(tmp_path / "run", world=world, server=lambda t, w, s, n: mean(s, [1] * len(s)))
    assert examined(run, data=world[0], check="aggregate")["severity"].tolist() == ["healthy"]


# -- data, adapters, seeds


def test_test_examples_that_are_trained_on(tmp_path):
    data, parts = blobs()
    for name, x, y, severity in (
        ("part", data.train_x[:60], data.train_y[:60], "fault"),
        ("all", data.train_x, data.train_y, "fault"),
        ("none", data.test_x, data.test_y, "healthy"),
    ):
        world = Dataset(name, data.train_x, data.train_y, x, y, 4), parts
        table = examined(
            record(tmp_path / name, world=world, rounds=2), data=world[0], check="leak"
        )
        assert table["severity"].tolist() == [severity]


class Adapted(nn.Module):
    """A linear map with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 4)
        self.lora_A, self.lora_B = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_adapters_averaged_factor_by_factor(tmp_path, frozen):
    torch.manual_seed(0)
    net = Adapted()
    net.lora_A.requires_grad_(not frozen)
    nn.init.zeros_(net.lora_B.weight)

    def client(t, k, received, state):
        return {
            n: received[n] + 5 * (v - received[n]) for n, v in state.items()
        }  # as after many local steps

    run = record(tmp_path / "run", net=net, rounds=3, client=client)
    table = examined(run, model=Adapted())
    assert bool(len(found(table, "adapters", ["information"]))) is not frozen
    if not frozen:  # the error by hand, in the last round
        c, (_, parts) = run.checkpoint(3), blobs()
        p = np.array([len(parts[k]) for k in c.client_ids], dtype=float)
        p /= p.sum()
        a, b = (
            c.clients[:, 28:40].double().reshape(-1, 2, 6),
            c.clients[:, 40:].double().reshape(-1, 4, 2),
        )
        product = sum(w * y @ x for w, x, y in zip(p, a, b, strict=True))
        off = (
            product - c.state["lora_B.weight"].double() @ c.state["lora_A.weight"].double()
        ).norm() / product.norm()
        assert float(found(table, "adapters", ["information"])["value"].iloc[0]) >= 0.999 * float(
            off
        )


def test_seeds_that_are_not_used(tmp_path):
    def seeded(name, seed, used=True):
        rng = np.random.default_rng(seed if used else 0)
        net = network(seed=seed if used else 0)
        return record(
            tmp_path / name,
            net=net,
            seed=seed,
            rounds=3,
            sampled=lambda t, _: rng.choice(8, 4, replace=False).tolist(),
        )

    def verdict(*runs):
        return set(examined(*runs, check="seeds")["severity"])

    one, two, unused, again = (
        seeded("a", 0),
        seeded("b", 1),
        seeded("c", 2, used=False),
        seeded("d", 0),
    )
    assert (
        verdict(one, two) == {"healthy"}
        and verdict(one, again) == {"healthy"}
        and verdict(one, unused) == {"fault"}
    )
    other = record(
        tmp_path / "e", net=network(), seed=0, rounds=3, sampled=lambda t, _: [t, 5, 6, 7]
    )
    assert verdict(one, other) == {"warning"}  # the same seed, other bits


# -- statistics


def test_sampling_is_tested_against_the_binomial(tmp_path):
    """16 rounds of 4 of 7 clients: client 7 of 8 is drawn never, with p = 2 * 0.5^16."""
    run = record(
        tmp_path / "run", sampled=lambda t, rng: rng.choice(7, 4, replace=False).tolist(), rounds=16
    )
    row = found(examined(run, check="sampling")).iloc[0]
    assert row["p_value"] == pytest.approx(2 * binom.cdf(0, 16, 0.5)) and row["client"] == 7


def test_holm_keeps_what_its_steps_allow():
    """0.01 / 4, / 3, / 2, / 1 for four tests."""

    def one(p):
        return Finding("warning", str(p), "", "", "", p=p)

    said = [one(0.002), one(0.0033), one(0.006), one(1e-9), Skip("x")]
    assert [s.what for s in beyond_chance(said[:3], 4) if isinstance(s, Finding)] == [
        "0.002",
        "0.0033",
    ]
    assert beyond_chance([one(0.004)], 4) == [] and len(beyond_chance(said, 5)) == 4
    assert beyond_chance([Finding("fault", "", "", "", "")], 0)


def test_holm_holds_the_family_wise_rate():
    rng = np.random.default_rng(0)
    alarms = sum(
        bool(
            beyond_chance(
                [Finding("warning", "", "", "", "", p=float(p)) for p in rng.random(30)], 30
            )
        )
        for _ in range(4000)
    )
    assert alarms <= binom.ppf(0.9999, 4000, 0.01)


# -- runs that lack something


def test_a_run_without_client_weights_says_what_is_not_checked(tmp_path):
    config = fldiag.Config.load(
        "digits",
        rounds=2,
        model__name="mlp",
        train__epochs=1,
        clients__per_round=2,
        checkpoint__clients="none",
    )
    table = fldiag.diagnose(fldiag.train(config, out=tmp_path / "run"), "doctor")
    unchecked = set(table[table["severity"] == "not checked"]["metric"])
    assert {
        "aggregate",
        "sampling",
        "norms",
        "own_data",
        "copies",
        "zero_updates",
    } <= unchecked and found(table).empty
    assert table[table["metric"] == "leak"]["severity"].tolist() == ["healthy"]


def test_a_run_that_does_not_say_how_many_clients_there_are(clean):
    run = Run(
        clean.path, {**clean.index, "config": {**clean.about["config"], "clients": {"total": 0}}}
    )
    (row,) = examined(run, check="sampling").itertuples()
    assert row.severity == "not checked" and "how many clients" in row.evidence


def test_runs_of_equal_folder_name_are_told_apart(clean, tmp_path):
    shutil.copytree(clean.path, tmp_path / "other" / "run")
    pair = [clean, Run.open(tmp_path / "other" / "run")]
    question = parse_question("doctor", {})
    (runs,) = open_subjects(pair, question)
    names = [f"{clean.path.parent.name}/run", "other/run"]
    assert [run.common["run"] for run in runs] == names
    assert list(describe(question, [runs])["checkpoints"]) == names
    assert clean.common["run"] == "run"
    with pytest.raises(FldiagError, match="given twice"):
        open_subjects([clean, clean], parse_question("doctor", {}))


def test_one_client_one_round(tmp_path):
    table = examined(record(tmp_path / "run", rounds=1, sampled=lambda t, rng: [3]))
    assert found(table).empty and "norms" in set(
        table[table["severity"] == "not checked"]["metric"]
    )


def test_a_run_whose_model_is_not_known(tmp_path):
    table = fldiag.diagnose(record(tmp_path / "run", server=lambda t, w, s, n: s[-1]), "doctor")
    assert len(found(table, "aggregate")) and {"chance", "own_data"} <= set(
        table[table["severity"] == "not checked"]["metric"]
    )


def test_damaged_files_are_findings(tmp_path):
    run = record(tmp_path / "run")
    path = run.path / "rounds/0003.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    rows = found(examined(Run.open(run.path), check="finite"))
    assert rows["round"].tolist() == [3] and "cannot be read" in rows["what"].iloc[0]


def test_strict_counts_faults_and_warnings_only(healthy):
    told = healthy.assign(severity="information")
    assert not fails(healthy) and not fails(told)
    for severity in BAD:
        assert fails(healthy.assign(severity=severity))


def test_checks_are_documented_where_people_look():
    doc = registry.diagnostic.get("doctor").doc
    assert all(f"``{check.name}``" in doc and "Rule" in (check.__doc__ or "") for check in CHECKS)
    assert len({check.name for check in CHECKS}) == len(CHECKS) >= 14


def test_examples_shared_with_many_clients_are_no_copy_of_one():
    """More than half of a client's examples belong to others too, but to no single one more than half."""
    parts = [
        np.arange(0, 10),
        np.arange(10, 20),
        np.arange(20, 30),
        np.r_[0:3, 10:13, 20:23, 30:32],
    ]
    case = SimpleNamespace(
        run=SimpleNamespace(origin={}), client=lambda a, b: f"clients {a} and {b}"
    )
    check = Parts(case)
    assert [f.what for f in check._compare_reports(parts)] == [
        "some examples belong to several clients"
    ]
    for more in (np.arange(0, 10), np.r_[0:10, 40:70]):  # a copy, and one with more besides
        assert "clients 0 and 4 hold the same examples" in [
            f.what for f in check._compare_reports([*parts, more])
        ]
    held = [
        np.arange(100),
        np.arange(100, 110),
        np.r_[0:20, 100:110, 200:300],
    ]  # shares more with 0, and has all of 1
    assert [
        (f.client, f.client_b, f.value)
        for f in check._compare_reports(held)
        if f.severity == "warning"
    ] == [(1, 2, 1.0)]
    for n, named in ((1, False), (4, False), (5, True)):
        told = [f.what for f in check._compare_reports([np.arange(n), np.arange(5000)])]
        assert (
            "clients 0 and 1 hold the same examples" in told
        ) == named and "some examples belong to several clients" in told


@pytest.mark.parametrize(("slots", "severity"), [(set(), "fault"), ({"isolated"}, "information")])
@pytest.mark.parametrize("kept", [("1.running_mean",), ("1.running_mean", "1.running_var")])
def test_buffers_that_a_method_does_not_aggregate_are_information(slots, severity, kept):
    """One of them, or all: where clients stay alone the global model's statistics serve nobody."""
    old = {"1.running_mean": torch.zeros(3), "1.running_var": torch.ones(3)}
    rows = {n: torch.stack([b + 1, b + 2]) for n, b in old.items()}
    check = Statistics(SimpleNamespace(slots=slots))
    check.see(
        SimpleNamespace(
            client_states=rows,
            states={n: old[n] if n in kept else rows[n].mean(0) for n in old},
            ids=[0, 1],
            before=SimpleNamespace(states=old),
            round=1,
        )
    )
    said = list(check.end())
    assert [(f.severity, "not aggregated" in f.what) for f in said if isinstance(f, Finding)] == [
        (severity, True)
    ]
