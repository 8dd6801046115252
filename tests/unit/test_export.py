"""Runs as series of numbers, and each tracker's own reader gets the numbers back."""

import json
import os
import socket
import struct
import sys

import helpers
import numpy as np
import pandas as pd
import pytest

import fldiag
from fldiag import FldiagError
from fldiag.integrations import trackers
from fldiag.results.files import write_table
from fldiag.results.table import table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fldiag.train(helpers.config(rounds=3), out=tmp_path_factory.mktemp("export") / "my run")


@pytest.fixture
def collected(run):
    return trackers.collect(run)


def of(rows, **options):
    made = trackers.series(table(rows), "t", **options)
    return {(r.tag, r.step): r.value for r in made.itertuples()}


def test_tags_say_what_tells_rows_apart():
    rows = [
        {
            "metric": "accuracy",
            "round": 2,
            "moment": m,
            "slice": "test",
            "scope": "global",
            "value": v,
        }
        for m, v in (("received", 0.5), ("aggregated", 0.75))
    ]
    rows += [
        {"metric": "norm", "round": 1, "layer": "conv1", "value": 2.0},
        {"metric": "eigenvalue", "index": 1, "value": 9.0},
    ]
    assert of(rows) == {
        ("t/accuracy/received/test", 2): 0.5,
        ("t/accuracy/aggregated/test", 2): 0.75,
        ("t/norm/conv1", 1): 2.0,
        ("t/eigenvalue/index 1", 0): 9.0,
    }


def test_further_columns_are_spelled_only_where_they_are_needed():
    rows = [
        {"metric": "cos", "round": r, "rho": rho, "n_clients": 7 + r, "value": rho + r}
        for r in (1, 2)
        for rho in (0.5, 2.0)
    ]
    rows += [{"metric": "other", "round": 1, "rho": 0.5, "value": 7.0}]
    assert of(rows) == {
        ("t/cos/rho 0.5", 1): 1.5,
        ("t/cos/rho 2", 1): 3.0,
        ("t/cos/rho 0.5", 2): 2.5,
        ("t/cos/rho 2", 2): 4.0,
        ("t/other", 1): 7.0,
    }
    rows = [
        {"metric": "m", "round": 1, "rho": 0.5, "value": 1.0},
        {"metric": "m", "round": 1, "rho": 1.0, "value": 2.0},
        {"metric": "m", "round": 2, "rho": 0.5, "value": 3.0},
    ]  # one series keeps one name, also where it is alone
    assert of(rows) == {("t/m/rho 0.5", 1): 1.0, ("t/m/rho 1", 1): 2.0, ("t/m/rho 0.5", 2): 3.0}


def test_what_cannot_be_told_apart_is_numbered_and_no_value_is_lost():
    assert of([{"metric": "m", "round": 1, "value": v} for v in (1.0, 2.0)]) == {
        ("t/m", 1): 1.0,
        ("t/m (2)", 1): 2.0,
    }


def test_clients_only_on_request():
    rows = [
        {"metric": "loss", "round": 1, "client": 3, "value": 1.0},
        {"metric": "uplink", "round": 1, "scope": "client", "value": 8.0},
        {"metric": "harm", "round": 1, "client": 3, "client_b": 4, "value": 2.0},
        {"metric": "acc", "round": 1, "slice": "client:3/train", "value": 3.0},
        {"metric": "H_N", "round": 1, "slice": "client:*/train", "value": 4.0},
    ]
    assert of(rows) == {("t/uplink", 1): 8.0, ("t/H_N/client:all/train", 1): 4.0}
    assert of(rows, per_client=True).keys() >= {
        ("t/loss/client 3", 1),
        ("t/harm/client 3/client_b 4", 1),
        ("t/acc/client:3/train", 1),
    }


def test_surfaces_masked_and_infinite_values_are_left_out():
    rows = [
        {"metric": "loss", "x": 0.0, "y": 1.0, "value": 3.0},
        {"metric": "eigenvalue", "index": 1, "value": 2.0},
        {"metric": "a", "value": None},
        {"metric": "b", "value": float("inf")},
        {"metric": "missing", "value": 1.0},
    ]
    assert of(rows) == {("t/eigenvalue/index 1", 0): 2.0}


def test_collect_takes_the_metrics_and_every_table_of_the_diagnostics(run, tmp_path):
    folder = run.path / "diagnostics"
    folder.mkdir(exist_ok=True)
    try:
        for name, value in (
            ("drift-0123abcd", 1.0),
            ("drift-4567abcd", 2.0),
            ("forgetting-0123abcd", 3.0),
        ):
            table([{"metric": "m", "round": 2, "value": value}]).to_csv(
                folder / f"{name}.csv", index=False
            )
        pd.DataFrame({"client": [0], "class": [1]}).to_csv(folder / "partition.csv", index=False)
        table([{"metric": "m", "round": 1, "value": 4.0}]).to_parquet(tmp_path / "mine.parquet")
        made = trackers.collect(run, [tmp_path / "mine.parquet"]).series
    finally:
        for file in folder.glob("*.csv"):
            file.unlink()
    found = {r.tag: r.value for r in made.itertuples() if r.tag.endswith("/m")}
    assert found == {
        "drift-0123abcd/m": 1.0,
        "drift-4567abcd/m": 2.0,
        "forgetting/m": 3.0,
        "mine/m": 4.0,
    }
    accuracy = made[made["tag"] == "run/accuracy/aggregated/test"]
    assert accuracy["step"].tolist() == [1, 2, 3]
    assert accuracy["value"].tolist() == run.metrics.query("metric == 'accuracy'")["value"].tolist()
    assert made["step"].is_monotonic_increasing


def test_a_table_that_was_changed_is_refused(run):
    csv = write_table(
        table([{"metric": "m", "round": 2, "value": 1.5}]),
        run.path / "diagnostics" / "forgetting-01234567",
        {},
    )[1]
    try:
        assert 1.5 in trackers.collect(run).series["value"].tolist()
        csv.write_text(csv.read_text().replace("1.5", "7.5"))
        with pytest.raises(FldiagError, match="is not the table that was written"):
            trackers.collect(run)
    finally:
        csv.unlink()


def test_tables_that_are_none(run, tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FldiagError, match="no metric and value"):
        trackers.collect(run, [tmp_path / "a.csv"])
    with pytest.raises(FldiagError, match=r"gone\.csv cannot be read"):
        trackers.collect(run, [tmp_path / "gone.csv"])


@pytest.fixture
def offline(monkeypatch):
    """Any look at the network fails the test (local sockets are wandb's own)."""
    seen, connect = [], socket.socket.connect

    def watched(self, address):
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(
            ("127.", "::1", "localhost")
        ):
            seen.append(address)
            raise OSError("no network in tests")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *a, **k: seen.append(a) or (_ for _ in ()).throw(OSError("no network")),
    )
    yield
    assert not seen


def expected(collected):
    return {(r.tag, int(r.step)): r.value for r in collected.series.itertuples()}


def test_tensorboard_reads_it_back(collected, tmp_path, offline):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers.write_tensorboard(collected, tmp_path)
    folder = trackers.write_tensorboard(collected, tmp_path)  # again: no doubled points
    assert len(list(folder.iterdir())) == 1 and folder == tmp_path / "my run"
    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    reader.Reload()
    found = {
        (tag, e.step): e.tensor_proto.double_val[0]
        if e.tensor_proto.double_val
        else np.frombuffer(e.tensor_proto.tensor_content, "f8")[0]
        for tag in reader.Tags()["tensors"]
        if tag != "config/text_summary"
        for e in reader.Tensors(tag)
    }
    assert found == expected(collected)
    (text,) = reader.Tensors("config/text_summary")
    assert '"method.name": "fedavg"' in text.tensor_proto.string_val[0].decode()


@pytest.mark.slow
def test_mlflow_reads_it_back(collected, tmp_path, offline):
    file = trackers.write_mlflow(collected, tmp_path)
    trackers.write_mlflow(collected, tmp_path)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{file}")
    runs = client.search_runs([client.get_experiment_by_name("fldiag").experiment_id])
    assert (
        len(runs) == 2 and runs[0].info.run_name == "my run" and runs[0].info.status == "FINISHED"
    )
    assert runs[0].data.params["train.lr"] == "0.1"
    found = {
        (tag, m.step): m.value
        for tag in runs[0].data.metrics
        for m in client.get_metric_history(runs[0].info.run_id, tag)
    }
    assert found == pytest.approx(expected(collected))
    assert "MLFLOW_DISABLE_TELEMETRY" not in os.environ


def wandb_records(file):
    """Records of an offline run: a log of 32 KiB blocks, each entry crc, length, kind (first, middle, last or whole)."""
    from wandb.proto import wandb_internal_pb2

    content, at, entry = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        entry += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(entry)
            yield record
            entry = b""


@pytest.mark.slow
def test_wandb_writes_it_offline(collected, tmp_path, offline):
    folder = trackers.write_wandb(collected, tmp_path)
    assert folder.is_relative_to(tmp_path) and folder.name.startswith("offline-run-")
    (file,) = folder.glob("*.wandb")
    found, settings = {}, {}
    for record in wandb_records(file):
        if record.HasField("history"):
            items = {
                i.key or "/".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            found |= {(k, items["_step"]): v for k, v in items.items() if not k.startswith("_")}
        if record.HasField("run"):
            settings = {
                u.key or ".".join(u.nested_key): u.value_json for u in record.run.config.update
            }
    assert found == pytest.approx(expected(collected))
    assert settings["method.name"] == '"fedavg"' and "WANDB_ERROR_REPORTING" not in os.environ


@pytest.mark.slow
def test_wandb_runs_of_the_caller_go_on(collected, tmp_path, offline):
    import wandb as theirs

    with theirs.init(mode="offline", reinit="create_new", dir=str(tmp_path)) as own:
        assert trackers.write_wandb(collected, tmp_path / "export").is_dir()
        own.log({"mine": 1})
    theirs.teardown()


@pytest.mark.parametrize(
    ("tracker", "module"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("mlflow", "sqlalchemy"),
    ],
)
def test_a_missing_extra_says_how_to_install_it(collected, tmp_path, monkeypatch, tracker, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FldiagError, match=rf"pip install 'fldiag\[{tracker}\]'"):
        trackers.WRITERS[tracker](collected, tmp_path)


@pytest.mark.slow
def test_trackers_are_told_not_to_call_home(collected, tmp_path, monkeypatch):
    """Their own processes look up their makers' hosts otherwise, out of sight of Python."""
    import mlflow.tracking as mlflow_tracking
    import wandb as wandb_module

    seen = []

    def stop(*args, **options):
        seen.append(
            (
                os.environ.get("WANDB_ERROR_REPORTING"),
                os.environ.get("MLFLOW_DISABLE_TELEMETRY"),
                getattr(options.get("settings"), "mode", None),
            )
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(wandb_module, "init", stop)
    monkeypatch.setattr(mlflow_tracking, "MlflowClient", stop)
    for writer in (trackers.write_wandb, trackers.write_mlflow):
        with pytest.raises(KeyboardInterrupt):
            writer(collected, tmp_path)
    assert seen == [("false", None, "offline"), (None, "true", None)]
    assert (
        "WANDB_ERROR_REPORTING" not in os.environ and "MLFLOW_DISABLE_TELEMETRY" not in os.environ
    )
