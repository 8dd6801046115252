"""What the doctor must not hold against a sound run, and what it says of what it does not check."""

import copy
import json

import numpy as np
import pytest
import torch
from commands import invoke
from torch import nn
from torch.nn import functional

import fldiag

PARTS = [np.arange(k * 20, (k + 1) * 20) for k in range(4)]
X = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(
    80, 1, generator=torch.Generator().manual_seed(1)
)


def rows(run, check, **options):
    table = fldiag.diagnose(run, "doctor", device="cpu", **options)
    return table[table["metric"] == check]


def state(w):
    return {"weight": w.reshape(1, 3).float()}


def optimum(k):
    """The least squares of client k, whatever it starts from."""
    return torch.linalg.lstsq(X[PARTS[k]].double(), Y[PARTS[k]].double()).solution.float()


def exact_run(path, reply, data=True):
    """Clients that solve their least squares, or what ``reply`` (t, k, start) makes of it."""
    net = nn.Linear(3, 1, bias=False)
    given = {"data": (X, Y)} if data else {}
    w = torch.zeros(3)
    recorder = fldiag.Recorder(path, net, clients=PARTS if data else None, method="own", **given)
    for t in range(1, 6):
        replies = {k: state(reply(t, k, w)) for k in range(4)}
        mean = sum(r["weight"] for r in replies.values()) / 4
        mean = 0.5 * w.reshape(1, 3) + 0.5 * mean
        recorder.round(received=state(w), clients=replies, aggregated={"weight": mean})
        w = mean.reshape(3)
    recorder.close()
    given = {"data": (X, Y)} if data else {}
    return fldiag.load(path, model=nn.Linear(3, 1, bias=False), **given)


def stale(t, k, w):
    """Client 1 sends the same half-trained weights in every round; the others take a step."""
    return 0.4 * optimum(k) if k == 1 else w + 0.3 * (optimum(k).flatten() - w)


@pytest.mark.parametrize(
    ("reply", "data", "severity"),
    [
        (lambda t, k, w: optimum(k), True, {"information"}),
        (lambda t, k, w: optimum(k), False, {"information"}),
        (stale, True, {"fault"}),
        (stale, False, {"warning"}),
        (lambda t, k, w: w + 0.3 * (optimum(k).flatten() - w), True, {"healthy"}),
    ],
    ids=["optimum", "optimum without data", "stale", "stale without data", "steps"],
)
def test_weights_that_come_again_are_no_repeat_where_training_converged(
    tmp_path, reply, data, severity
):
    said = rows(exact_run(tmp_path / "run", reply, data), "copies")
    assert set(said["severity"]) == severity


def test_the_same_start_may_give_the_same_weights(tmp_path):
    """A server that keeps its model gets the same replies from deterministic clients."""
    net = nn.Linear(3, 1)
    start = copy.deepcopy(net.state_dict())
    recorder = fldiag.Recorder(tmp_path / "run", net)
    for _ in range(3):
        replies = {k: {n: v + k + 1.0 for n, v in start.items()} for k in range(3)}
        recorder.round(received=start, clients=replies, aggregated=start)
    recorder.close()
    said = rows(fldiag.load(tmp_path / "run", model=net), "copies")
    assert not said["what"].astype(str).str.contains("returned before").any()


# -- what each client received


def personal_run(path, aggregate, rounds=5):
    """Clients that start from weights of their own, far from the common ones, and take short steps."""
    generator = torch.Generator().manual_seed(5)
    net = nn.Linear(30, 10)
    shapes = {n: t.shape for n, t in net.state_dict().items()}

    def random(scale):
        return {n: scale * torch.randn(s, generator=generator) for n, s in shapes.items()}

    w = random(1.0)
    starts = {
        k: {n: v + random(1.0)[n] * (3 if k == 2 else 1) for n, v in w.items()} for k in range(5)
    }
    recorder = fldiag.Recorder(path, net, method="own")
    recorder.round(aggregated=w)
    for _ in range(rounds):
        direction = random(0.1)
        replies = {
            k: {n: v + direction[n] + random(0.03)[n] for n, v in starts[k].items()}
            for k in range(5)
        }
        new = aggregate(w, starts, replies)
        recorder.round(received=starts, clients=replies, aggregated=new)
        w, starts = new, replies
    recorder.close()
    return fldiag.load(path, model=net)


def mean_of_weights(w, starts, replies):
    return {n: sum(r[n].double() for r in replies.values()).div(5).float() for n in w}


def mean_of_updates(w, starts, replies):
    steps = {n: sum((replies[k][n] - starts[k][n]).double() for k in replies).div(5) for n in w}
    return {n: (w[n].double() + steps[n]).float() for n in w}


@pytest.mark.parametrize("aggregate", [mean_of_weights, mean_of_updates])
def test_updates_are_measured_from_what_each_client_received(tmp_path, aggregate):
    run = personal_run(tmp_path / "run", aggregate)
    table = fldiag.diagnose(run, "doctor", device="cpu")
    of = table.set_index("metric")
    assert of.loc["aggregate", "severity"] == "healthy", of.loc["aggregate", "evidence"]
    assert of.loc["norms", "severity"] == "healthy", of.loc["norms", "what"]
    assert of.loc["directions", "severity"] == "healthy"
    assert "what each client received" in of.loc["starts", "evidence"]


def test_a_wrong_sum_of_such_updates_is_found(tmp_path):
    def twice(w, starts, replies):
        mean = mean_of_updates(w, starts, replies)
        return {n: w[n] + 5 * (mean[n] - w[n]) for n in w}

    said = rows(personal_run(tmp_path / "run", twice), "aggregate")
    assert "adds the clients' updates" in said["what"].iloc[0]


# -- what is said


def small_run(path, names=range(4), rounds=3, **options):
    """A run on labels, whose model need not be known; the third client does not move."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    y = (Y[:, 0] > 0).long()
    recorder = fldiag.Recorder(
        path,
        net,
        data=(X, y),
        test=(X[:10], y[:10]),
        clients=dict(zip(names, PARTS, strict=True)),
        method="fedavg",
        **options,
    )
    w = copy.deepcopy(net.state_dict())
    for _ in range(rounds):
        replies = {}
        for i, (name, part) in enumerate(zip(names, PARTS, strict=True)):
            net.load_state_dict(w)
            for _ in range(3):
                loss = functional.cross_entropy(net(X[part]), y[part])
                steps = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for p, g in zip(net.parameters(), steps, strict=True):
                        p -= (0.0 if i == 2 else 0.05) * g
            replies[name] = copy.deepcopy(net.state_dict())
        w = {n: sum(r[n].double() for r in replies.values()).div(4).float() for n in w}
        recorder.round(received=None, clients=replies, aggregated=w)
    recorder.close()
    return path


def test_data_are_checked_without_a_model(tmp_path):
    table = fldiag.diagnose(fldiag.load(small_run(tmp_path / "run")), "doctor", device="cpu")
    of = table.set_index("metric")["severity"]
    assert of["leak"] == "fault"
    assert of["partition"] == "healthy" and of["duplicates"] == "healthy"
    assert of["own_data"] == of["reported"] == "not checked"


def test_a_machine_reads_how_many_checks_ran_and_why_others_did_not(tmp_path):
    path = small_run(tmp_path / "run")
    result = invoke("doctor", path, "--json", "--out", tmp_path / "out")
    answer = json.loads(result.stdout)
    counts = answer["counts"][0]
    assert counts["fault"] >= 1 and counts["checks"] > 20
    assert counts["checked"] == counts["checks"] - counts["not checked"]
    assert counts["findings"] == len(answer["rows"])
    skipped = answer["unchecked"]
    assert sum(len(group["checks"]) for group in skipped) == counts["not checked"]
    model = next(group for group in skipped if "own_data" in group["checks"])
    assert "which model" in model["why"] and "--model" in model["remedy"]


def test_uploads_are_looked_at(tmp_path):
    torch.manual_seed(0)
    net = nn.Linear(30, 40)
    recorder = fldiag.Recorder(tmp_path / "run", net)
    w = copy.deepcopy(net.state_dict())
    for _ in range(2):
        replies = {
            k: {n: (v + 0.1 * torch.randn_like(v)).half().float() for n, v in w.items()}
            for k in range(3)
        }
        w2 = {n: sum(r[n] for r in replies.values()) / 3 for n in w}
        recorder.round(received=w, clients=replies, aggregated=w2)
        w = w2
    recorder.close()
    said = rows(fldiag.load(tmp_path / "run", model=net), "uploads")
    assert "fp16" in said["what"].iloc[0]


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_layer_that_nobody_trains_is_told_unless_the_model_says_so(tmp_path, is_declared):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net[0].weight.requires_grad_(not is_declared)
    y = (Y[:, 0] > 0).long()
    recorder = fldiag.Recorder(tmp_path / "run", net, data=(X, y), clients=PARTS)
    w = copy.deepcopy(net.state_dict())
    for _ in range(2):
        replies = {
            k: {n: v if n == "0.weight" else v + 0.1 * torch.randn_like(v) for n, v in w.items()}
            for k in range(4)
        }
        new = {n: sum(r[n].double() for r in replies.values()).div(4).float() for n in w}
        recorder.round(received=w, clients=replies, aggregated=new)
        w = new
    recorder.close()
    said = rows(fldiag.load(tmp_path / "run", model=net), "zero_updates").iloc[0]
    if is_declared:
        assert said["severity"] == "healthy"
    else:
        assert said["severity"] == "information" and said["layer"] == "0.weight"
        assert "the loss has a gradient there" in said["evidence"]
