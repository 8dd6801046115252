"""Recorders when something is wrong: rounds that are refused, full disks, other data at resuming, models that cannot be tested."""

import errno
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from test_recorder import mean, step, world
from torch import nn

import fldiag
from fldiag import FldiagError
from fldiag.params import flatten
from fldiag.report import performance
from fldiag.report.collect import collect
from fldiag.report.glance import glance
from fldiag.results import files as result_files
from fldiag.results.standing import standing
from fldiag.runs.run import Run


def recorder(path, **options):
    data, parts, net = world(norm=False)
    return net, fldiag.Recorder(
        path, net, **{"data": data, "clients": parts, "evaluate": False, **options}
    )


# -- rounds that are refused

ZEROS = torch.zeros(53)


@pytest.mark.parametrize(
    "wrong",
    [
        {"aggregated": torch.zeros(3)},
        {"aggregated": ZEROS, "received": torch.zeros(4)},
        {"aggregated": ZEROS, "clients": {0: ZEROS, 2: 7}},
        {"aggregated": ZEROS, "clients": {"a": ZEROS}},
        {"aggregated": ZEROS, "metrics": {"loss": {"a": 1.0}}},
        {"aggregated": ZEROS, "number": -1},
        {"aggregated": ZEROS, "clients": {3: ZEROS, 1: ZEROS}},
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_a_refused_round_leaves_nothing(tmp_path, wrong, later):
    """Neither weights, numbers of examples, metrics, files nor counts: those of the next round are its own."""
    net, rec = recorder(tmp_path / "run")
    expected = recorder(tmp_path / "sound")[1]
    for r in (rec, expected) if later else ():
        r.round(received=net, clients={0: net}, aggregated=net)
    rec.received(ZEROS + 1)
    rec.client(1, ZEROS, metrics={"steps": 3}, examples=7)
    with pytest.raises(FldiagError):
        rec.round(**wrong)
    for r in (rec, expected):
        r.round(clients={2: net}, aggregated=net)
        r.close()
    run, sound = (Run.open(tmp_path / name) for name in ("run", "sound"))
    assert (
        run.rounds == sound.rounds
        and run.checkpoint().client_ids == [2]
        and run.origin == sound.origin
    )
    assert run.metrics.drop(columns="run").equals(sound.metrics.drop(columns="run"))
    assert (
        (run.checkpoint().received is None) == (sound.checkpoint().received is None) == (not later)
    )
    assert run.about["config"]["clients"] == sound.about["config"]["clients"]
    assert {f.relative_to(run.path) for f in run.path.rglob("*")} == {
        f.relative_to(sound.path) for f in sound.path.rglob("*")
    }


@pytest.mark.parametrize(
    "number", [-1, 10**9, 2.0, float("nan"), True, np.True_, "2", [1], 1, 2, 0]
)
def test_numbers_of_rounds_that_cannot_be_are_refused(tmp_path, number):
    net, rec = recorder(tmp_path / "run")
    rec.round(aggregated=net, clients={0: net}, number=np.int64(2))
    with pytest.raises(FldiagError, match="round") as caught:
        rec.round(aggregated=net, clients={0: net}, number=number)
    assert "leave it out" in caught.value.remedy
    rec.round(aggregated=net, clients={0: net})
    assert rec.close().rounds == [2, 3]


def test_every_tenth_round_may_be_recorded(tmp_path):
    net, rec = recorder(tmp_path / "run")
    for t in (10, 20, 40):
        rec.round(aggregated=net, clients={0: net}, number=t)
    assert rec.close().rounds == [10, 20, 40]


@pytest.mark.parametrize(
    ("numbers", "known"),
    [
        ((10, 20, 30), ()),
        ((0, 10, 20), ()),
        ((1, 2, 10, 11), (2, 11)),
        ((None, None, 9, None), (2, 10)),
    ],
)
@pytest.mark.parametrize("received", [True, False])
def test_over_a_gap_of_rounds_the_clients_did_not_start_from_the_last_recorded_model(
    tmp_path, numbers, known, received
):
    """It is some older model: drift from there would be that of several rounds. What the loop says itself always counts."""
    net, rec = recorder(tmp_path / "run")
    for number in numbers:
        rec.round(
            aggregated=net, clients={0: net}, number=number, received=net if received else None
        )
    run = rec.close()
    rounds = [t for t in run.rounds if run.checkpoint(t).client_ids]
    assert len(rounds) == len(numbers)
    assert [t for t in rounds if run.checkpoint(t).received is not None] == (
        rounds if received else list(known)
    )


def test_a_client_that_is_recorded_again_replaces_its_numbers(tmp_path):
    """As when a cell of a notebook runs twice."""
    net, rec = recorder(tmp_path / "run")
    for loss in (1.0, 2.0):
        for k in (0, 1):
            rec.client(k, net, metrics={"loss": loss + k})
    rec.round(aggregated=net, metrics={"loss": {0: 2.0}})
    rows = rec.close().metrics.query("metric == 'loss' and scope == 'client'")
    assert sorted(zip(rows["client"], rows["value"], strict=True)) == [(0, 2.0), (0, 2.0), (1, 3.0)]


@pytest.mark.parametrize("received", [True, False])
def test_a_loop_that_counts_from_0(tmp_path, received):
    """Round t there is round t + 1 here, also after the run was resumed."""
    net, rec = recorder(tmp_path / "run")
    for t in range(2):
        rec.round(received=net if received else None, clients={0: net}, aggregated=net, number=t)
    _, again = recorder(tmp_path / "run", resume=True)
    with pytest.raises(FldiagError, match="round 1 is not after round 1"):
        again.round(clients={0: net}, aggregated=net, number=1)
    again.round(clients={0: net}, aggregated=net, number=2)
    run = again.close()
    assert run.rounds == [*([0] if received else []), 1, 2, 3] and any(
        "counts its rounds from 0" in n for n in run.origin["notes"]
    )


def test_round_0_without_clients_is_the_model_before_training(tmp_path):
    net, rec = recorder(tmp_path / "run", evaluate=True)
    for t in range(3):
        rec.round(clients={0: net} if t else None, aggregated=net, number=t)
    run = rec.close()
    assert run.rounds == [0, 1, 2] and run.done == 2 and not run.origin["notes"]
    assert sorted(set(run.metrics.query("metric == 'accuracy'")["round"])) == [0, 1, 2]


# -- disks


class Disk:
    """A disk that is full from the n-th operation on: writes, flushes, renames."""

    def __init__(self, monkeypatch):
        self.done, self.room = 0, None
        for name, real in (
            ("fsync", lambda handle: None),
            ("replace", os.replace),
            ("write", os.write),
        ):
            monkeypatch.setattr(os, name, self.counted(real))
        open_file = open
        monkeypatch.setattr(
            result_files, "open", lambda *args: File(self, open_file(*args)), raising=False
        )

    def counted(self, real):
        def call(*args):
            self.done += 1
            if self.room is not None and self.done > self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        return call


class File:
    def __init__(self, disk, real):
        self.real, self.write = real, disk.counted(real.write)

    def __enter__(self):
        return self

    def __exit__(self, *about):
        self.real.close()

    def __getattr__(self, name):
        return getattr(self.real, name)


def rounds(path, disk, room, resume=False):
    """A loop that goes on whatever is raised; what it holds at the end, and how many rounds were on the disk before it was full."""
    disk.done, disk.room, stored = 0, room, 0
    try:
        net, rec = recorder(
            path,
            resume=resume,
            data=(torch.eye(6), torch.arange(6) % 3),
            clients=[[0, 1], [2, 3], [4, 5]],
        )
    except FldiagError as error:
        assert "No space left" in str(error)
        return None, 0
    for _ in range(1 if resume else 2):
        try:
            rec.round(received=net, clients={0: net}, aggregated=net)
            stored += 1
        except FldiagError as error:
            assert "No space left" in str(error)
    return rec, stored


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_full_disk_the_recorder_closes_and_the_run_goes_on(tmp_path, monkeypatch, every):
    """Wherever it was full, in one process; no round that was written is lost."""
    disk = Disk(monkeypatch)
    rounds(tmp_path / "dry", disk, None)[0].close()
    steps = disk.done
    assert steps > 20
    for room in range(0, steps, every):
        path = tmp_path / str(room)
        rec, stored = rounds(path, disk, room)
        if rec is not None:
            try:
                rec.close()
            except FldiagError:
                disk.room = None
                rec.close()
            assert Run.open(path).done >= stored
        disk.room = None
        done = Run.open(path).done if (path / "run.json").exists() else 0
        again, more = rounds(path, disk, None, resume=True)
        run = again.close()
        assert (
            more == 1
            and run.done == done + 1
            and Run.open(path).status == "finished"
            and "data.npz" in run.files
        )
        assert all(run.checkpoint(r).round == r for r in run.rounds) and set(
            run.metrics["round"]
        ) == set(range(1, run.done + 1))
        assert not [f for f in path.rglob("*") if f.suffix == ".tmp"]


@pytest.mark.parametrize("back", [True, False])
def test_a_folder_that_was_removed_is_one_error_whose_remedy_works(tmp_path, back):
    net, rec = recorder(tmp_path / "run")
    rec.round(received=net, clients={0: net}, aggregated=net)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(FldiagError, match="was removed or moved") as caught:
        rec.round(clients={0: net}, aggregated=net)
    assert (
        "put the folder back and resume, or write to a new folder" in caught.value.remedy
        and not (tmp_path / "run").exists()
    )
    if back:
        (tmp_path / "elsewhere").rename(tmp_path / "run")
    else:
        shutil.rmtree(tmp_path / "elsewhere")
    _, again = recorder(tmp_path / "run", resume=back)
    again.round(clients={1: net}, aggregated=net)
    assert again.close().rounds == ([0, 1, 2] if back else [1])
    with pytest.raises(FldiagError, match="is closed"):
        rec.round(aggregated=net)


# -- going on with a run


def other(**changed):
    data, parts, net = world(norm=False)
    return {
        "model": net,
        "data": data,
        "clients": parts,
        "resume": True,
        "evaluate": False,
        **changed,
    }


class Shifted(nn.Module):
    """The tensors of ``world``'s network, with another activation between."""

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(6, 5))
        self.add_module("2", nn.Linear(5, 3))

    def forward(self, x):
        return getattr(self, "2")(getattr(self, "0")(x).tanh())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model": nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))},
            "the model is not the one",
        ),
        (
            {"model": nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))},
            "the model is not the one",
        ),
        ({"model": Shifted()}, "the model is not the one"),
        ({"data": (torch.ones(40, 6), torch.arange(40) % 3)}, "the data are not those"),
        ({"data": None, "clients": None}, "none are given"),
        ({"clients": [range(10), range(10, 30), range(30, 40)]}, "the partition is not the one"),
        ({"clients": None}, "the partition is not the one"),
        ({"method": "fedprox"}, "method: 'own' there, 'fedprox' now"),
        ({"seed": 3}, "seed: 0 there, 3 now"),
    ],
)
def test_a_run_goes_on_with_its_own_model_data_and_partition_alone(tmp_path, changed, message):
    """The recorder that has the folder is not disturbed by a refusal."""
    net, rec = recorder(tmp_path / "run")
    rec.round(received=net, clients={0: net}, aggregated=net)
    with pytest.raises(FldiagError, match=message) as caught:
        fldiag.Recorder(tmp_path / "run", **other(**changed))
    assert "record into another folder" in caught.value.remedy
    rec.round(clients={0: net}, aggregated=net)
    rec.close()
    fldiag.Recorder(tmp_path / "else", **other(**changed)).close()
    with fldiag.Recorder(tmp_path / "run", **other()) as again:
        again.round(clients={0: net}, aggregated=net)
    assert Run.open(tmp_path / "run").rounds == [0, 1, 2, 3]


def test_the_same_process_goes_on_with_a_run_whose_recorder_was_forgotten(tmp_path):
    """As after an interrupted cell of a notebook; the forgotten recorder writes nothing any more."""
    net, rec = recorder(tmp_path / "run")
    rec.round(received=net, clients={0: net}, aggregated=net)
    _, again = recorder(tmp_path / "run", resume=True)
    with pytest.raises(FldiagError, match=r"is closed.*resume=True"):
        rec.round(clients={0: net}, aggregated=net)
    assert rec.close().rounds == [0, 1]
    again.round(clients={1: net}, aggregated=net)
    assert again.close().rounds == [0, 1, 2] and Run.open(tmp_path / "run").status == "finished"


@pytest.mark.slow
def test_another_process_does_not_go_on_with_a_run_that_is_recorded(tmp_path):
    net, rec = recorder(tmp_path / "run")
    rec.round(received=net, clients={0: net}, aggregated=net)
    script = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\nimport test_recorder_faults as t\n"
        f"t.recorder({str(tmp_path / 'run')!r}, resume=True)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert found.returncode and "is being written by another process" in found.stderr
    rec.close()


# -- models that fldiag may not know how to test

torch.manual_seed(0)
X = torch.randn(60, 5)
Y = (X.sum(1) > 0.3).long()
ONE = nn.Linear(5, 1)


class Squeezed(nn.Module):
    def __init__(self, probability=False):
        super().__init__()
        self.layer, self.probability = ONE, probability

    def forward(self, x):
        out = self.layer(x).squeeze(1)
        return torch.sigmoid(out).view(-1) if self.probability else out


def scores(path, net, y, **options):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fldiag.Recorder(
            path, net, data=(X, y), clients=[range(30), range(30, 60)], **options
        ) as rec:
            for _ in range(2):
                rec.round(received=net, clients={0: net, 1: net}, aggregated=net)
    run = Run.open(path)
    assert run.rounds == [0, 1, 2]
    last = run.metrics.query(
        "round == 2 and moment == 'aggregated' and scope == 'global'"
    ).set_index("metric")["value"]
    return (
        last,
        " ".join(run.origin["notes"]),
        [str(w.message) for w in said if "fldiag" in str(w.message)],
    )


@pytest.mark.parametrize(
    "y", [Y, Y.float(), Y.float()[:, None]], ids=["labels", "floats", "column"]
)
@pytest.mark.parametrize(
    ("net", "kind"),
    [
        (ONE, "a logit"),
        (Squeezed(), "a logit"),
        (nn.Sequential(ONE, nn.Sigmoid()), "a probability"),
        (Squeezed(True), "a probability"),
        (nn.Sequential(nn.Flatten(), ONE, nn.Sigmoid(), nn.Flatten(0)), "a probability"),
    ],
)
def test_one_output_for_two_labels_is_a_binary_classifier(tmp_path, net, kind, y):
    last, notes, said = scores(tmp_path / "run", net, y)
    z = ONE(X).detach()[:, 0]
    assert last["accuracy"] == pytest.approx(float(((z > 0) == (Y > 0)).float().mean()))
    # float32, and the logarithm of a probability: a few eps of a loss of order 1
    assert last["loss"] == pytest.approx(
        float(nn.functional.binary_cross_entropy_with_logits(z, Y.float())), rel=1e-5
    )
    assert f"evaluated as {kind}" in notes and not said
    table = fldiag.diagnose(fldiag.load(tmp_path / "run", model=net), "forgetting", min_count=1)
    again = table.query(
        "metric == 'accuracy' and moment == 'aggregated' and round == 2 and slice == 'train'"
    )["value"]
    assert again.tolist() == pytest.approx([last["accuracy"]])


class Broken(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.layer, self.answer = nn.Linear(5, 3), answer

    def forward(self, x):
        return self.answer(self.layer(x))


def fails(out):
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("net", "y"),
    [
        (ONE, torch.arange(60) % 3),
        (nn.Linear(5, 2), torch.arange(60) % 3),
        (Broken(fails), Y),
        (Broken(lambda out: (out, out)), Y),
        (nn.Linear(4, 2), Y),
        (Broken(lambda out: out.sum()), Y),
        (nn.Linear(5, 4), torch.rand(60, 3)),
        (nn.Linear(5, 1), torch.rand(60, 2)),
        (nn.LSTM(5, 2), Y),
    ],
)
def test_a_test_that_cannot_be_made_is_a_note_and_one_warning(tmp_path, net, y):
    last, notes, said = scores(tmp_path / "run", net, y)
    assert last.empty and "the global model could not be evaluated" in notes and len(said) == 1


@pytest.mark.parametrize(
    "y", [torch.rand(60, 3), torch.randint(0, 2, (60, 3)).float(), torch.rand(60)]
)
def test_targets_that_are_numbers_have_a_loss_that_is_named(tmp_path, y):
    net = nn.Linear(5, y.shape[1] if y.ndim == 2 else 1)
    last, notes, said = scores(tmp_path / "run", net, y)
    assert float(0.5 * (net(X).detach() - y.view(60, -1)).square().sum(1).mean()) == pytest.approx(
        last["loss"], rel=1e-5
    )
    assert "accuracy" not in last and "half the squared error" in notes and not said


def test_several_labels_an_example_are_weights_alone(tmp_path):
    last, notes, said = scores(tmp_path / "run", nn.Linear(5, 3), torch.randint(0, 2, (60, 3)))
    assert last.empty and "not every example has one label" in notes and not said


# -- frozen weights


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, and running statistics, which are stored."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.base, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(3, 2))

    def forward(self, x):
        return self.norm(self.base(x) + x @ self.down.T @ self.up.T)


def moved(name, by=0.01):
    net = Adapted()
    net.state_dict()[name].add_(by)
    return net


def merged():
    """The adapter's product is in the base, and the adapter begins anew."""
    net = Adapted()
    net.base.weight += torch.full((3, 2), 0.1) @ net.down.detach()
    return net


@pytest.mark.parametrize(
    "form",
    [
        lambda net: net,
        lambda net: net.state_dict(),
        lambda net: {f"module.{n}": v for n, v in net.state_dict().items()},
    ],
)
@pytest.mark.parametrize(
    ("net", "name"),
    [
        (moved("base.weight"), "base.weight"),
        (moved("base.bias"), "base.bias"),
        (merged(), "base.weight"),
    ],
)
@pytest.mark.parametrize("place", ["received", "client 2", "aggregated"])
def test_frozen_weights_that_move_are_refused_and_the_remedy_works(
    tmp_path, net, name, place, form
):
    data, parts, _ = world(norm=False)
    sound, given = form(Adapted()), form(net)
    told = {
        "received": given if place == "received" else sound,
        "clients": {0: sound, 2: given if place == "client 2" else sound},
        "aggregated": given if place == "aggregated" else sound,
    }
    with fldiag.Recorder(
        tmp_path / "run", Adapted(), data=data, clients=parts, trainable=True
    ) as rec:
        with pytest.raises(FldiagError, match=f"frozen weights of .*{place}.*{name}") as caught:
            rec.round(**told)
        rec.round(received=sound, clients={0: sound}, aggregated=form(moved("norm.running_mean")))
    assert "another folder with trainable=False" in caught.value.remedy
    run = Run.open(tmp_path / "run")
    assert torch.equal(
        run.checkpoint(1).state["norm.running_mean"], torch.full((3,), 0.01)
    )  # a buffer is not frozen
    with fldiag.Recorder(
        tmp_path / "all", Adapted(), data=data, clients=parts, trainable=False
    ) as rec:
        rec.round(**told)
    stored = Run.open(tmp_path / "all").checkpoint(1)
    assert torch.equal(
        stored.state[name], (net if place == "aggregated" else Adapted()).state_dict()[name]
    )
    assert torch.equal(stored.clients[1], flatten(net if place == "client 2" else Adapted()))


@pytest.mark.parametrize(
    "form",
    [
        lambda net: mean([net] * 7),
        lambda net: {n: v.double() for n, v in net.state_dict().items()},
        lambda net: {n: v.bfloat16() for n, v in net.state_dict().items()},
        lambda net: {n: v for n, v in net.state_dict().items() if "base" not in n},
        lambda net: {n: sum(s * v for s in [0.1] * 10) for n, v in net.state_dict().items()},
    ],
)
def test_averages_and_copies_of_frozen_weights_are_the_same(tmp_path, form):
    data, parts, _ = world(norm=False)
    with fldiag.Recorder(
        tmp_path / "run", Adapted(), data=data, clients=parts, trainable=True
    ) as rec:
        rec.round(
            received=form(Adapted()), clients={0: form(Adapted())}, aggregated=form(Adapted())
        )
    assert Run.open(tmp_path / "run").rounds == [0, 1]


# -- partitions


@pytest.mark.parametrize(
    ("numbers", "parts", "sound"),
    [
        ((1, 2, 3), {0: 0, 1: 1, 2: 2}, (0, 1, 2)),
        ((1, 3), {0: 0, 1: 1, 2: 2}, (0, 2)),
        ((0, 1, 2), {1: 0, 2: 1, 3: 2}, (1, 2, 3)),
    ],
)
def test_clients_that_are_numbered_by_one_off_the_partition_are_refused(
    tmp_path, numbers, parts, sound
):
    data, indices, net = world(norm=False)
    given = {k: indices[i] for k, i in parts.items()}
    rec = fldiag.Recorder(tmp_path / "run", net, data=data, clients=given)
    with pytest.raises(FldiagError, match="is not in the partition") as caught:
        rec.round(received=net, clients=dict.fromkeys(numbers, net), aggregated=net)
    assert "1 higher" in str(caught.value) or "1 lower" in str(caught.value)
    shift = numbers[0] - sound[0]
    with fldiag.Recorder(
        tmp_path / "mended", net, data=data, clients={k + shift: v for k, v in given.items()}
    ) as rec:
        rec.round(received=net, clients=dict.fromkeys(numbers, net), aggregated=net)
    assert not Run.open(tmp_path / "mended").origin["notes"]


@pytest.mark.parametrize("name", ["forgetting", "drift", "matching"])
def test_a_client_that_the_partition_lacks_is_left_out_with_a_note(tmp_path, name):
    data, parts, net = world(norm=False)
    given = data.train_x, data.train_y, data.test_x, data.test_y
    trained = {
        k: step(net, data.train_x[parts[k % 3]], data.train_y[parts[k % 3]]) for k in (0, 2, 3)
    }
    tables = []
    for ids in ((0, 2, 3), (0, 2)):
        path = tmp_path / str(len(ids))
        with fldiag.Recorder(path, net, data=given, clients=parts) as rec:
            rec.round(
                received=net,
                clients={k: trained[k] for k in ids},
                aggregated=mean(list(trained.values())),
            )
        tables.append(fldiag.diagnose(fldiag.load(path, model=net), name))
    found, expected = (
        t[t["metric"] != "missing"][["metric", "moment", "client", "slice", "value"]].reset_index(
            drop=True
        )
        for t in tables
    )
    assert found.equals(expected) and "client 3 is not in the partition" in " ".join(
        tables[0]["note"].dropna()
    )
    assert "which examples client 3 has" in " ".join(Run.open(tmp_path / "3").origin["notes"])


def test_rounds_of_clients_that_the_partition_lacks_alone_name_the_cause(tmp_path):
    data, parts, net = world(norm=False)
    with fldiag.Recorder(
        tmp_path / "run", net, data=(data.train_x, data.train_y), clients=parts
    ) as rec:
        rec.round(received=net, clients={5: net, 7: net}, aggregated=net)
    with pytest.raises(FldiagError, match=r"client 5, 7 is not in the partition") as caught:
        fldiag.diagnose(fldiag.load(tmp_path / "run", model=net), "forgetting")
    assert "the partition of these clients" in caught.value.remedy


# -- without test examples


def blobs(path, test=True, form=lambda x: x):
    """A federation of two clients and two rounds; its test examples are other ones than its training examples."""
    data, parts, net = world(norm=False)
    given = {"test": (form(data.test_x), data.test_y)} if test else {}
    with fldiag.Recorder(
        path, net, data=(form(data.train_x), data.train_y), clients=parts, **given
    ) as rec:
        for _ in range(2):
            trained = {k: step(net, data.train_x[parts[k]], data.train_y[parts[k]]) for k in (0, 2)}
            rec.round(received=net, clients=trained, aggregated=mean(list(trained.values())))
            net = mean(list(trained.values()))
    return fldiag.load(path, model=net), data


def test_training_examples_are_never_called_test(tmp_path):
    """In metrics, tables, pictures, and the file of the data, which holds no test split."""
    run, data = blobs(tmp_path / "run", test=False)
    metrics = run.metrics
    right = float((run.model(data.train_x).argmax(1) == data.train_y).float().mean())
    assert not (metrics["slice"] == "test").any()
    assert metrics.query("metric == 'accuracy' and slice == 'train'")["value"].iloc[
        -1
    ] == pytest.approx(right)
    with np.load(run.path / "data.npz") as held:
        assert len(held["test_images"]) == len(held["test_labels"]) == 0 and len(
            held["train_labels"]
        ) == len(data.train_y)
    for name, options in (
        ("forgetting", {"min_count": 1}),
        ("drift", {}),
        ("fairness", {"min_count": 1}),
        ("flatness", {"rounds": [2]}),
        ("doctor", {}),
    ):
        table = fldiag.diagnose(run, name, **options)
        assert not table.get("slice", table["metric"]).astype(str).str.startswith("test").any(), (
            name
        )
        assert name not in ("forgetting", "drift") or {row["slice"] for row in standing(table)} == {
            "train"
        }, name
    table = fldiag.diagnose(run, "forgetting", min_count=1)
    aggregated = table.query(
        "metric == 'accuracy' and moment == 'aggregated' and round == 2 and slice == 'train'"
    )
    assert aggregated["value"].tolist() == pytest.approx([right])
    labels = [ax.get_ylabel() for ax in fldiag.draw(table).axes]
    assert "training accuracy" in labels and not any("test" in label for label in labels)


@pytest.mark.parametrize(
    ("ask", "remedy"),
    [
        (lambda run: fldiag.diagnose(run, "spectrum", slice="test", k=1), "slice train"),
        (lambda run: fldiag.diagnose(run, "account", slice="test"), "slice train"),
    ],
)
def test_questions_about_test_examples_are_refused_where_there_are_none(tmp_path, ask, remedy):
    run, _ = blobs(tmp_path / "run", test=False)
    with pytest.raises(FldiagError, match="has no test examples") as caught:
        ask(run)
    assert remedy in caught.value.remedy
    assert len(ask(blobs(tmp_path / "tested")[0]))


def test_the_file_of_the_data_is_data_like_any_other(tmp_path):
    """The remedy for a checkpoint that left its run; a file that somebody else wrote without test examples is refused as before."""
    run, data = blobs(tmp_path / "run", test=False)
    loaded = fldiag.data.load(f"npz:{run.path / 'data.npz'}")
    assert (
        not loaded.tested
        and torch.equal(loaded.train_x, data.train_x)
        and loaded.evaluation[0] == "train"
    )
    with pytest.raises(FldiagError, match="no test examples"):
        fldiag.train(
            fldiag.Config.load(
                "digits", rounds=1, model__name="mlp", data__name=f"npz:{run.path / 'data.npz'}"
            ),
            out=tmp_path / "t",
        )


@pytest.mark.slow
@pytest.mark.parametrize("test", [True, False])
def test_a_report_says_at_a_glance_whether_there_are_test_examples(tmp_path, test):
    run, _ = blobs(tmp_path / "run", test=test)
    found = collect([run.path])
    section, curves = glance(found), performance.curves(found)
    told = [note for note in section.notes if "there are no test examples" in note]
    words = {chart.caption.split()[0] for group in curves.groups for chart in group.charts} | {
        column.split()[0] for t in curves.tables for column in t.head if "accuracy (" in column
    }
    assert len(told) == (not test) and words == ({"Test"} if test else {"Training"})


# -- lines that are lost


def test_rounds_whose_lines_are_lost_are_not_deleted(tmp_path):
    """A run of one's own loop cannot be trained again from its seed."""
    net, rec = recorder(tmp_path / "run")
    for i in range(5):
        rec.round(received=net, clients={i % 3: net}, aggregated=ZEROS + i, metrics={"step": i})
    rec.close()
    lines = (tmp_path / "run" / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    for content in (b"".join(lines[:-3]), b"", None):
        if content is None:
            (tmp_path / "run" / "rounds.jsonl").unlink()
        else:
            (tmp_path / "run" / "rounds.jsonl").write_bytes(content)
        with pytest.raises(FldiagError, match=r"rounds\.jsonl"):
            recorder(tmp_path / "run", resume=True)
        assert len(list((tmp_path / "run" / "rounds").iterdir())) == 6


def test_a_round_that_was_being_written_is_replaced(tmp_path):
    """One file without its line is what a killed process leaves; nothing was lost that a reader saw."""
    net, rec = recorder(tmp_path / "run")
    for i in range(3):
        rec.round(received=net, clients={0: net}, aggregated=ZEROS + i)
    run = shutil.copytree(tmp_path / "run", tmp_path / "killed")
    rec.close()
    shutil.copy(run / "rounds" / "0003.safetensors", run / "rounds" / "0004.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder(run, resume=True)[1].close()
    assert sorted(f.name for f in (run / "rounds").iterdir()) == [
        f"000{r}.safetensors" for r in range(4)
    ]
