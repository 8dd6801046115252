"""What one's own loop says of its clients: names, what each received, and their own tests."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fldiag
from fldiag.integrations.recorder_inputs import Clients
from fldiag.runs.run import Run


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body, self.norm, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


def examples(seed, n=12):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=rng)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def state(seed, head=None, body=None):
    """Weights with the head, and the body, of other seeds."""
    values = dict(Net(seed).state_dict())
    for name, other in (("head", head), ("body", body)):
        if other is not None:
            values |= {k: v for k, v in Net(other).state_dict().items() if k.startswith(name)}
    return values


SITES = {"zurich": examples(1), "aachen": examples(2), "bonn": examples(3)}


def recorder(path, **options):
    return fldiag.Recorder(path, Net(), **{"clients": SITES, **options})


def test_sites_have_names(tmp_path):
    rec = recorder(tmp_path / "run")
    rec.client("bonn", state(5), metrics={"lr": 0.1})
    rec.round(clients={"aachen": state(6)}, aggregated=state(7), metrics={"steps": {"bonn": 3}})
    rec.close()
    again = recorder(tmp_path / "run", resume=True)
    again.round(clients={"zurich": state(8)}, aggregated=state(9))
    run = again.close()
    assert run.origin["names"] == {0: "aachen", 1: "bonn", 2: "zurich"}
    assert [run.checkpoint(r).client_ids for r in (1, 2)] == [[0, 1], [2]]
    assert any("0 = aachen, 1 = bonn, 2 = zurich" in text for text in run.origin["notes"])
    steps = run.metrics.query("metric == 'steps'")
    assert steps["client"].tolist() == [1]


@pytest.mark.parametrize("ids", [("a", "b"), (10**12, 7 * 10**15)])
def test_names_and_large_numbers_without_a_partition(tmp_path, ids):
    rec = fldiag.Recorder(tmp_path / "run", Net())
    for t in range(2):
        rec.round(clients={k: state(t + i) for i, k in enumerate(ids)}, aggregated=state(t))
    run = rec.close()
    assert run.origin["names"] == {i: str(k) for i, k in enumerate(ids)}
    assert run.about["config"]["clients"]["total"] == 2


def test_each_client_starts_from_weights_of_its_own(tmp_path):
    """Personal heads: a head that was not touched has not moved, though it is another than the global one."""
    rec = fldiag.Recorder(tmp_path / "run", Net(), clients=SITES, evaluate=False)
    rec.round(number=0, aggregated=state(0))
    starts = {k: state(0, head=10 + i) for i, k in enumerate(SITES)}
    trained = {k: state(0, head=10 + i, body=20 + i) for i, k in enumerate(SITES)}
    rec.round(received=starts, clients=trained, aggregated=state(1))
    run = rec.close()
    c = run.checkpoint(1)
    assert c.starts.shape == c.clients.shape and set(c.start_buffers) == set(c.buffers)
    run = fldiag.load(run.path, model=Net())
    table = fldiag.diagnose(run, "drift", representation=False)
    moved = table.query(
        "metric == 'global_local_divergence' and layer == 'head' and scope == 'client'"
    )
    assert moved["value"].tolist() == [0.0] * 3
    table = fldiag.diagnose(run, "forgetting")
    received = table.query("metric == 'accuracy' and moment == 'received' and scope == 'client'")
    assert set(received["client"]) == {0, 1, 2}
    for j, k in enumerate(c.client_ids):
        net = Net()
        net.load_state_dict(starts[run.origin["names"][k]])
        x, y = (torch.cat(parts) for parts in zip(*SITES.values(), strict=True))
        right = float((net.eval()(x).argmax(1) == y).double().mean())
        value = received.query(f"client == {k} and slice == 'train'")["value"]
        assert value.iloc[0] == pytest.approx(right), j


def test_the_same_weights_for_all_are_one_received_model(tmp_path):
    rec = fldiag.Recorder(tmp_path / "run", Net())
    rec.round(
        received={0: state(1), 1: state(1)}, clients={0: state(2), 1: state(3)}, aggregated=state(4)
    )
    c = rec.close().checkpoint(1)
    assert c.starts is None and c.received is not None


def test_what_one_client_received_and_another_not_is_refused(tmp_path):
    rec = fldiag.Recorder(tmp_path / "run", Net())
    with pytest.raises(fldiag.FldiagError, match="client 1 received is missing"):
        rec.round(received={0: state(1)}, clients={0: state(2), 1: state(3)}, aggregated=state(4))
    rec.round(received=state(1), clients={0: state(2)}, aggregated=state(4))
    assert rec.close().rounds == [0, 1]


def test_partial_weights_are_refused(tmp_path):
    rec = recorder(tmp_path / "run")
    body = {k: v for k, v in state(1).items() if not k.startswith("head")}
    with pytest.raises(fldiag.FldiagError, match=r"lacks head\.bias"):
        rec.round(clients={"bonn": body}, aggregated=state(1))


def test_clients_have_tests_of_their_own(tmp_path):
    tests = {k: examples(50 + i, 6 + i) for i, k in enumerate(SITES)}
    rec = recorder(tmp_path / "run", test=tests)
    rec.round(clients={k: state(i) for i, k in enumerate(SITES)}, aggregated=state(4))
    run = fldiag.load(rec.close().path, model=Net())
    table = fldiag.diagnose(run, "fairness", min_count=1)
    counts = table.query("metric == 'accuracy' and scope == 'client'")
    sizes = {0: 7, 1: 8, 2: 6}  # aachen, bonn, zurich
    assert dict(zip(counts["client"], counts["n_examples"], strict=False)) == sizes
    net = Net()
    net.load_state_dict(state(4))
    x, y = tests["bonn"]
    right = float((net.eval()(x).argmax(1) == y).double().mean())
    assert counts.query("client == 1")["value"].iloc[0] == pytest.approx(right)
    loss = fldiag.diagnose(run, "spectrum", slice="client:1/test", k=1).query("metric == 'loss'")
    assert loss["n_examples"].item() == 8


def test_a_recorder_in_a_notebook_finishes_also_on_an_exception(tmp_path):
    with pytest.raises(KeyError), recorder(tmp_path / "run") as rec:
        rec.round(clients={"bonn": state(1)}, aggregated=state(2))
        raise KeyError("of the user")
    assert Run.open(tmp_path / "run").rounds == [1] and "1 round" in repr(rec)
    with recorder(tmp_path / "run", resume=True) as rec:
        rec.round(clients={"bonn": copy.deepcopy(Net())}, aggregated=state(3))
    assert Run.open(tmp_path / "run").status == "finished" and "closed" in repr(rec)
    assert np.isfinite(rec.run.checkpoint(2).clients.numpy()).all()


def test_a_small_number_beside_names_gets_a_number_of_its_own():
    clients = Clients()
    assert [clients.number_of(name) for name in ("server-a", 0, 7_000_000, 0, "server-a")] == [
        0,
        1,
        2,
        1,
        0,
    ]
