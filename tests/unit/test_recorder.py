"""One's own loop, recorded: what is stored, in every form of weights, and what can be asked of it at any moment."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import commands
import helpers
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fldiag
from fldiag import FldiagError
from fldiag.params import flatten
from fldiag.runs.in_memory import dataset_of
from fldiag.runs.run import Run

SIZES = (20, 13, 7)


def world(norm=True):
    data, parts = helpers.classification(SIZES)
    torch.manual_seed(0)
    return (
        data,
        parts,
        nn.Sequential(
            nn.Linear(6, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.ReLU(), nn.Linear(5, 3)
        ),
    )


def step(module, x, y):
    net = copy.deepcopy(module).train()
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net


def mean(nets):
    made = copy.deepcopy(nets[0])
    made.load_state_dict(
        {
            k: torch.stack([n.state_dict()[k].float() for n in nets]).mean(0).to(v.dtype)
            for k, v in nets[0].state_dict().items()
        }
    )
    return made


def loop(rec, net, data, parts, rounds=2, form=lambda net: net.state_dict()):
    """A user's loop; returns (received, clients, aggregated) of every round as modules."""
    told = []
    for _ in range(rounds):
        trained = {k: step(net, data.train_x[parts[k]], data.train_y[parts[k]]) for k in (0, 2)}
        new = mean(list(trained.values()))
        told.append((net, trained, new))
        rec.round(
            received=form(net),
            clients={k: form(n) for k, n in trained.items()},
            aggregated=form(new),
            metrics={"lr": 0.1, "loss": {0: 0.5, 2: 0.25}},
        )
        net = new
    return told


FORMS = {
    "state_dict": lambda net: net.state_dict(),
    "module": lambda net: net,
    "arrays": lambda net: [v.numpy() for v in net.state_dict().values()],
    "compiled": lambda net: {"_orig_mod." + k: v for k, v in net.state_dict().items()},
    "vector": flatten,
    "array": lambda net: flatten(net).numpy(),
    "parameters": lambda net: [p for p in net.parameters()],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights_is_stored_to_the_bit(tmp_path, form):
    data, parts, net = world(norm=form not in ("vector", "array", "parameters"))
    with fldiag.Recorder(
        tmp_path / "run", net, data=data, clients=parts, method="mine", seed=3
    ) as rec:
        told = loop(rec, net, data, parts, form=FORMS[form])
    run = Run.open(tmp_path / "run")
    assert (run.status, run.rounds, repr(rec)) == (
        "finished",
        [0, 1, 2],
        f"Recorder({str(run.path)!r}, 2 rounds, {flatten(net).numel()} parameters, closed)",
    )
    for t, (received, trained, aggregated) in enumerate(told, start=1):
        stored = run.checkpoint(t)
        assert torch.equal(stored.received, flatten(received)) and stored.client_ids == [0, 2]
        assert torch.equal(stored.clients, torch.stack([flatten(n) for n in trained.values()]))
        assert all(torch.equal(stored.state[n], v) for n, v in aggregated.state_dict().items())
    rows = run.metrics
    assert rows[(rows["metric"] == "loss") & (rows["client"] == 2)]["value"].tolist() == [
        0.25,
        0.25,
    ]
    assert (
        set(rows[rows["metric"] == "accuracy"]["slice"]) == {"test"}
        and (rows["method"] == "mine").all()
    )


@pytest.mark.slow
def test_a_loop_that_stops_is_diagnosable_at_once(tmp_path):
    """Examples in memory; the process is gone without a word after two of its rounds."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os; sys.path[:0] = [{!r}, {!r}]\nimport torch, fldiag, test_recorder as t\n"
        "data, parts, net = t.world(norm=False)\n"
        "rec = fldiag.Recorder('run', net, data=(data.train_x, data.train_y), clients=parts, test=(data.test_x, data.test_y))\n"
        "t.loop(rec, net, data, parts)\nos._exit(9)\n".format(
            str(tmp_path), str(__import__("pathlib").Path(__file__).parent)
        )
    )
    code = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    ).returncode
    assert code == 9
    _, _, net = world(norm=False)
    run = fldiag.load(tmp_path / "run", model=net)  # its examples lie in the folder
    assert run.status == "unfinished" and run.rounds == [0, 1, 2]
    for name, options in (
        ("forgetting", {}),
        ("drift", {}),
        ("matching", {"k": 1}),
        ("spectrum", {"k": 1}),
    ):
        table = fldiag.diagnose(run, name, **options)
        assert len(table) and not (table["metric"] == "missing").any(), name
    with fldiag.Recorder(
        tmp_path / "run", net, data=world()[0], clients=world()[1], resume=True
    ) as rec:
        rec.round(clients={1: net}, aggregated=net)
    again = Run.open(tmp_path / "run")
    assert again.rounds == [0, 1, 2, 3] and torch.equal(
        again.checkpoint(3).received, flatten(mean_of(again, 2, net))
    )


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "os._exit(0)"])
@pytest.mark.slow
def test_a_loop_that_does_not_close_leaves_whole_rounds(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys, os; sys.path[:0] = [{str(Path(__file__).parent)!r}]\nimport fldiag, test_recorder as t\n"
        "data, parts, net = t.world(norm=False)\nrec = fldiag.Recorder('run', net, data=data, clients=parts)\n"
        f"t.loop(rec, net, data, parts)\n{end}\n"
    )
    subprocess.run(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    run = Run.open(tmp_path / "run")
    assert run.rounds == [0, 1, 2]
    for t in run.rounds:
        run.checkpoint(t)


def test_what_is_recorded_is_the_state_at_the_call(tmp_path):
    """The loop changes its weights in place afterwards, also those that the next round is said to have received."""
    data, parts, net = world()
    with fldiag.Recorder(tmp_path / "run", net, data=data, clients=parts) as rec:
        before = copy.deepcopy(net)
        rec.round(received=net, clients={0: net}, aggregated=net)
        for value in net.state_dict().values():
            value.zero_()
        rec.round(clients={0: net}, aggregated=net)
    stored = Run.open(tmp_path / "run").checkpoint(2)
    assert torch.equal(stored.received, flatten(before)) and not stored.clients.any()


def test_a_round_that_the_disk_refuses_is_told_and_taken_back(tmp_path, monkeypatch):
    """The next round has its number."""
    from fldiag.runs.recording import Recording

    data, parts, net = world(norm=False)
    real = Recording.add

    def full(self, t, *args, **options):
        if t == 2:
            raise FldiagError("no space left", "")
        real(self, t, *args, **options)

    monkeypatch.setattr(Recording, "add", full)
    with fldiag.Recorder(tmp_path / "run", net, data=data, clients=parts) as rec:
        rec.round(received=net, clients={0: net}, aggregated=net)
        with pytest.raises(FldiagError, match="no space left"):
            rec.round(clients={0: net}, aggregated=net)
        monkeypatch.setattr(Recording, "add", real)
        rec.round(clients={1: net}, aggregated=net)
    run = Run.open(tmp_path / "run")
    assert run.rounds == [0, 1, 2] and run.checkpoint(2).client_ids == [1]


def test_a_run_that_moved_brings_its_examples(tmp_path):
    data, parts, net = world(norm=False)
    with fldiag.Recorder(
        tmp_path / "run", net, data=(data.train_x, data.train_y), clients=parts
    ) as rec:
        loop(rec, net, data, parts, rounds=1)
    before = fldiag.diagnose(fldiag.load(tmp_path / "run", model=net), "forgetting")
    run = (tmp_path / "run").rename(tmp_path / "elsewhere")
    for target in (run, run / "rounds" / "0001.safetensors"):
        assert len(fldiag.diagnose(fldiag.load(target, model=net), "spectrum", k=1))
    assert fldiag.diagnose(fldiag.load(run, model=net), "forgetting")["value"].equals(
        before["value"]
    )
    alone = tmp_path / "mailed.pt"
    alone.write_bytes((run / "rounds" / "0001.safetensors").read_bytes())
    with pytest.raises(FldiagError, match=r"data\.npz of its run") as caught:
        fldiag.diagnose(fldiag.load(alone, model=net), "spectrum", k=1)
    assert "--data npz:RUN/data.npz" in caught.value.remedy
    np.savez(run / "data.npz", train_images=np.zeros((1, 6)))
    with pytest.raises(FldiagError, match="is not the file this run wrote"):
        fldiag.diagnose(fldiag.load(run, model=net), "forgetting")


def mean_of(run, t, net):
    made = copy.deepcopy(net)
    made.load_state_dict(run.checkpoint(t).state)
    return made


def test_clients_bring_their_own_examples(tmp_path):
    data, parts, net = world(norm=False)
    pairs = [(data.train_x[p], data.train_y[p]) for p in parts]
    given = {0: pairs[0], 1: TensorDataset(*pairs[1]), 2: DataLoader(TensorDataset(*pairs[2]), 4)}
    with fldiag.Recorder(tmp_path / "run", net, clients=given) as rec:
        rec.round(received=net, clients={0: step(net, *pairs[0])}, aggregated=net)
    assert [len(p) for p in rec.parts.values()] == list(SIZES)
    table = fldiag.diagnose(fldiag.load(tmp_path / "run", model=net), "forgetting")
    assert "no test examples were given" in " ".join(table[table["metric"] == "missing"]["note"])


def test_clients_one_by_one_and_models_only(tmp_path):
    """No data: weights are recorded, and the data given with the question."""
    data, _, net = world(norm=False)
    with fldiag.Recorder(tmp_path / "run", net) as rec:
        rec.received(net)
        rec.client(1, step(net, data.train_x, data.train_y), metrics={"steps": 3}, examples=40)
        rec.round(aggregated=net)
        rec.round(aggregated=net)
    run = Run.open(tmp_path / "run")
    assert (
        run.checkpoint(1).client_ids == [1]
        and run.checkpoint(2).client_ids == []
        and {int(k): n for k, n in run.origin["examples"].items()} == {1: 40}
    )
    found = fldiag.diagnose(
        fldiag.load(tmp_path / "run", model=net, data=(data.test_x, data.test_y)), "spectrum", k=1
    )
    assert found["n_examples"].tolist() == [len(data.test_y)] * len(found)


@pytest.mark.slow
def test_landscape_and_report_of_a_recorded_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    data, parts, net = world(norm=False)
    with fldiag.Recorder(
        "run",
        net,
        data=(data.train_x, data.train_y),
        clients=parts,
        test=(data.test_x, data.test_y),
        method="mine",
    ) as rec:
        loop(rec, net, data, parts)
    drawn = commands.table(
        commands.last(
            commands.run(
                "landscape",
                "run",
                "--model",
                "test_recorder:factory",
                "--points",
                "5",
                "--directions",
                "random",
            )
        )
    )
    loss = drawn[drawn["metric"] == "loss"]["value"]
    assert len(loss) >= 25 and np.isfinite(loss).all() and set(drawn["method"]) == {"mine"}
    commands.run("forgetting", "run", "--model", "test_recorder:factory")
    page = commands.last(commands.run("report", "run")).read_text()
    assert all(
        text in page
        for text in ('<section id="landscape"', '<section id="forgetting"', "npz:data.npz")
    )


def factory():
    return world(norm=False)[2]


def test_tokens_are_recorded_as_integers(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    x, y = torch.randint(0, 9, (12, 5)), torch.arange(12) % 3
    with fldiag.Recorder(
        tmp_path / "run", net, data=(x, y), clients=[range(6), range(6, 12)]
    ) as rec:
        rec.round(received=net, clients={k: net for k in (0, 1)}, aggregated=net)
    table = fldiag.diagnose(
        fldiag.load(tmp_path / "run", model=net, data=rec.dataset), "forgetting"
    )
    assert rec.dataset.train_x.dtype == torch.int64 and table["value"].notna().any()


def test_inputs_of_three_axes_are_said_to_be_what_the_model_gets():
    """They are stored as the whole numbers of their bits."""
    x, y = torch.rand(6, 8, 8), torch.arange(6) % 2
    dataset = dataset_of((x, y))
    assert dataset.train_x.dtype == torch.int64 and dataset.scaling == "as they are (float32)"


def test_no_second_run_in_a_folder(tmp_path):
    data, parts, net = world(norm=False)
    rec = fldiag.Recorder(tmp_path / "run", net, data=data, clients=parts)
    with pytest.raises(FldiagError, match="already holds a run"):
        fldiag.Recorder(tmp_path / "run", net)
    rec.round(clients={0: net}, received=net, aggregated=net)
    rec.close()
    assert Run.open(tmp_path / "run").done == 1


def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    import own_loop

    own_loop.main(str(tmp_path / "run"))
    run = Run.open(tmp_path / "run")
    assert run.rounds == [0, 1, 2, 3] and run.checkpoint().client_ids == list(range(10))
    assert len(fldiag.diagnose(fldiag.load(run.path, model=own_loop.net()), "forgetting"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"aggregated": torch.zeros(3)}, "vector of 3 numbers, and the model has 53"),
        ({"aggregated": [np.zeros(3)]}, "1 arrays, and the model's"),
        ({"aggregated": nn.Linear(6, 5)}, "lacks|no weight"),
        ({"aggregated": 3}, "int holds no weights"),
        (
            {"aggregated": torch.zeros(53), "clients": {"a": torch.zeros(53)}},
            "client 'a' is not a number",
        ),
    ],
)
def test_weights_that_do_not_fit_cost_nothing_but_an_error(tmp_path, wrong, message):
    data, parts, net = world(norm=False)
    with fldiag.Recorder(tmp_path / "run", net, data=data, clients=parts) as rec:
        with pytest.raises(FldiagError, match=message):
            rec.round(**wrong)
        rec.round(received=net, clients={0: net}, aggregated=net)
    assert Run.open(tmp_path / "run").rounds == [0, 1]
    with pytest.raises(FldiagError, match="client"):
        fldiag.Recorder(tmp_path / "other", net, data=data, clients=[range(10_000)])
    assert not (tmp_path / "other").exists()
