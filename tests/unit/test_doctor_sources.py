"""The doctor on the four kinds of runs: fldiag's own, Flower's, a folder of files and (test_doctor.py) a plain loop."""

import json

import commands
import helpers
import numpy as np
import pytest
import torch

import fldiag
from fldiag import models
from fldiag.data import partition
from fldiag.params import Layout
from fldiag.runs.run import Run


def own(path, **options):
    config = fldiag.Config.load(
        "digits",
        rounds=4,
        model__name="mlp",
        clients__total=6,
        clients__per_round=3,
        train__epochs=1,
        checkpoint__clients="sampled",
        **options,
    )
    return fldiag.train(config, out=path)


def bad(table, check=None):
    rows = table[table["severity"].isin(["fault", "warning"])]
    return rows if check is None else rows[rows["metric"] == check]


def rewrite(run, r, change):
    """A round's checkpoint with another content: change (checkpoint) -> state."""
    c = run.checkpoint(r)
    run.put_checkpoint(
        r,
        {k: v for k, v in c.manifest.items() if k != "schema"},
        change(c),
        received=c.received,
        clients=c.clients,
        buffers=c.buffers,
    )
    run.append(run.done, [], status=run.status)


def vector(run, w):
    return Layout.of(models.build("mlp", (1, 8, 8), 10, run.config.model.options)).views(w)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedadam", "feddyn", "local_only"])
@pytest.mark.slow
def test_runs_of_fldiag_are_healthy(tmp_path, method):
    table = fldiag.diagnose(own(tmp_path / "run", method__name=method), "doctor")
    assert bad(table).empty, bad(table)[["what", "evidence"]].to_dict("records")


def test_faults_of_a_run_of_fldiag(tmp_path):
    """One client's model in place of the mean, another partition than the config names, and a prettier curve."""
    run = own(tmp_path / "run")
    rewrite(run, 2, lambda c: {n: v.clone() for n, v in vector(run, c.clients[1]).items()})
    parts = partition.load_parts(run.path / "partition.npz")
    run.put("partition.npz", lambda f: partition.save(f, [parts[1], parts[0], *parts[2:]]))
    rows = run.stored_rows()
    run.put_metrics(
        run._as_table(
            [{**row, "value": 0.99} if row["metric"] == "accuracy" else row for row in rows]
        )
    )
    run.append(run.done, [], status=run.status)
    table = fldiag.diagnose(Run.open(run.path), "doctor")
    single = bad(table, "aggregate").iloc[0]
    assert (
        single["severity"] == "fault"
        and single["client"] == run.checkpoint(2).client_ids[1]
        and single["rounds"] == "2"
    )
    assert bad(table, "continuity")["rounds"].tolist() == ["3"]
    assert bad(table, "partition")["value"].tolist() == [pytest.approx(2 / 6)]
    assert "0.99" not in bad(table, "reported")["what"].iloc[0] and bad(table, "reported")[
        "rounds"
    ].tolist() == ["1..4"]


def files_of(run, folder, change):
    """Another program's folder of a run's weights; change (round, checkpoint) -> vector of the global model."""
    for r in run.rounds:
        c, place = run.checkpoint(r), folder / f"round_{r}"
        place.mkdir(parents=True)
        torch.save(
            {n: v.clone() for n, v in vector(run, change(r, c)).items()}, place / "global.pt"
        )
        for k, w in zip(c.client_ids, c.clients, strict=True):
            torch.save({n: v.clone() for n, v in vector(run, w).items()}, place / f"client_{k}.pt")
    parts = partition.load_parts(run.path / "partition.npz")
    (folder / "parts.json").write_text(
        json.dumps({str(k): p.tolist() for k, p in enumerate(parts)})
    )


def aggregated(r, c):
    return torch.cat([v.reshape(-1) for v in c.state.values()])


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.slow
def test_a_folder_of_files_from_the_command_line(tmp_path, monkeypatch, planted):
    monkeypatch.chdir(tmp_path)
    run = own(tmp_path / "run")
    files_of(run, tmp_path / "files", (lambda r, c: c.clients.mean(0)) if planted else aggregated)
    commands.run(
        "convert",
        "files",
        "theirs",
        "--pattern",
        "round_{round}/client_{client}.pt",
        "--global-pattern",
        "round_{round}/global.pt",
        "--model",
        "mlp",
        "--data",
        "digits",
        "--partition",
        "files/parts.json",
    )
    result = commands.run("doctor", "theirs", "--strict", "--json", code=3 if planted else 0)
    told = [
        row for row in json.loads(result.stdout)["rows"] if row["severity"] in ("fault", "warning")
    ]
    whats = [row["what"] for row in told]
    assert any("plain mean" in what for what in whats) if planted else not told
    assert commands.run("doctor", "theirs").exit_code == 0  # without --strict


@pytest.mark.slow
def test_a_folder_whose_data_are_a_file_of_numbers_is_read_as_it_was_converted(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    digits = fldiag.data.load("digits")
    np.savez(
        "own.npz",
        train_images=digits.train_x[:, 0].numpy(),
        train_labels=digits.train_y.numpy(),
        test_images=digits.test_x[:, 0].numpy(),
        test_labels=digits.test_y.numpy(),
    )
    files_of(own(tmp_path / "run"), tmp_path / "files", aggregated)
    commands.run(
        "convert",
        "files",
        "theirs",
        "--pattern",
        "round_{round}/client_{client}.pt",
        "--global-pattern",
        "round_{round}/global.pt",
        "--model",
        "mlp",
        "--data",
        "npz:own.npz",
        "--partition",
        "files/parts.json",
    )
    table = fldiag.diagnose("theirs", "doctor", device="cpu").set_index("metric")
    assert table.loc["leak", "severity"] == table.loc["reported", "severity"] == "healthy", table[
        "evidence"
    ]["leak"]


@pytest.mark.slow
def test_a_report_begins_with_the_findings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = own(tmp_path / "run")
    rewrite(run, 4, lambda c: {n: v.clone() for n, v in vector(run, c.received).items()})
    commands.run("doctor", "run")
    page = commands.last(commands.run("report", "run")).read_text()
    assert page.index("the global model did not change") < page.index('id="runs"')


@pytest.mark.slow
def test_sound_runs_are_not_accused():
    """Some of the runs of analyses/doctor_false_alarms.py: LDA 0.05, two classes a client, server optimisers, loops."""
    study = helpers.analysis("doctor_false_alarms")
    rows = [study.examined(i) for i in (0, 1, 3, 4, 7, 11, 14, 15, 19, 30, 37, 45)]
    assert [row for row in rows if row["fault"] or row["warning"]] == []
