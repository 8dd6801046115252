"""fldiag convert: a foreign folder of a known run gives that run's numbers; what is missing or broken is named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import invoke

import fldiag
from fldiag import models
from fldiag.config import load
from fldiag.data import partition
from fldiag.params import Layout
from fldiag.runs.history import History
from fldiag.runs.run import Run

PATTERN = ["--pattern", "round_{round}/client_{client}.pt"]
GLOBAL = ["--global-pattern", "round_{round}/global.pt"]
WORLD = ["--model", "mlp", "--data", "digits"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run of fldiag, and its weights as another program might have left them."""
    base = tmp_path_factory.mktemp("own")
    config = load(
        "digits",
        [
            "rounds=3",
            "model.name=mlp",
            "clients.total=4",
            "clients.per_round=4",
            "partition.alpha=1.0",
            "train.epochs=1",
            "checkpoint.clients=sampled",
            "train.lr=0.1",
        ],
    )
    run, files = fldiag.train(config, out=base / "run"), base / "files"
    layout = Layout.of(models.build("mlp", (1, 8, 8), 10, config.model.options))
    for r in run.rounds:
        c, folder = run.checkpoint(r), files / f"round_{r}"
        folder.mkdir(parents=True)
        torch.save(c.state, folder / "global.pt")
        for k, w in zip(c.client_ids, c.clients, strict=True):
            torch.save(
                {n: v.clone() for n, v in layout.views(w).items()}, folder / f"client_{k}.pt"
            )
        if r == 1:
            torch.save(
                {n: v.clone() for n, v in layout.views(c.received).items()}, files / "start.pt"
            )
    parts = partition.load_parts(run.path / "partition.npz")
    (files / "parts.json").write_text(
        json.dumps({f"client_{k}": p.tolist() for k, p in enumerate(parts)})
    )
    return run, files


@pytest.fixture
def files(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(own[1], tmp_path / "files")
    return tmp_path / "files"


def call(*arguments, code=0):
    result = invoke(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    if code:
        lines = result.stderr.strip().splitlines()
        last = [i for i, line in enumerate(lines) if line.startswith("error: ")]
        assert last and lines[last[0] + 1].lstrip().startswith("→ "), result.stderr
    return result


def convert(files, *more, code=0):
    return call("convert", files, "theirs", *PATTERN, *WORLD, *more, code=code).stderr


def tables_equal(a, b, name, **options):
    """The diagnostic's numbers, whoever wrote the run."""
    found = []
    for run in (a, b):
        frame = fldiag.diagnose(History.of(run), name, **options)
        found.append(
            frame[frame["metric"] != "missing"]
            .drop(columns=["run", "method"])
            .reset_index(drop=True)
        )
    assert len(found[0]) > 20 and found[0].equals(found[1])


@pytest.mark.slow
def test_the_same_numbers_as_the_run_the_files_are_of(own, files):
    shown = convert(
        files, *GLOBAL, "--initial", files / "start.pt", "--partition", files / "parts.json"
    )
    assert shown == ""
    theirs = Run.open("theirs")
    assert theirs.rounds == [0, 1, 2, 3] and theirs.status == "finished"
    for r in (1, 2, 3):
        a, b = own[0].checkpoint(r), theirs.checkpoint(r)
        assert (
            torch.equal(a.clients, b.clients)
            and torch.equal(a.received, b.received)
            and a.client_ids == b.client_ids
        )
    tables_equal(own[0], theirs, "forgetting")
    tables_equal(own[0], theirs, "drift", representation=False)
    accuracy = [
        f.query("metric == 'accuracy' and slice == 'test'")["value"].tolist()
        for f in (own[0].metrics, theirs.metrics)
    ]
    assert accuracy[0] == accuracy[1] and len(accuracy[0]) == 3


@pytest.mark.slow
def test_verbs_take_it(files):
    convert(files, *GLOBAL, "--partition", files / "parts.json")
    for verb in (
        ["forgetting", "theirs"],
        ["drift", "theirs"],
        ["spectrum", "theirs", "-k", "1", "--samples", "50"],
    ):
        assert json.loads(call(*verb, "--out", "out", "--json").stdout)["rows"]
    assert "partition.png" in call("partition", "theirs").stdout
    assert (
        "trained with another config"
        in call("train", "digits", "--out", "theirs", "--resume", code=2).stderr
    )


def test_global_files_from_before_the_round(files, own):
    """Saved as received, they are the aggregates of the round before; the last aggregate is then the mean."""
    for r in (3, 2, 1):
        source = files / f"round_{r - 1}" / "global.pt" if r > 1 else files / "start.pt"
        shutil.copy(source, files / f"round_{r}" / "global.pt")
    assert "round 3: its global model is not there" in convert(
        files, *GLOBAL, "--global-is", "received", "--partition", files / "parts.json"
    )
    for r in (1, 2, 3):
        a, b = own[0].checkpoint(r), Run.open("theirs").checkpoint(r)
        assert torch.equal(a.received, b.received)
        assert all(torch.allclose(a.state[n], b.state[n], atol=1e-6) for n in a.state)


@pytest.mark.slow
def test_without_globals_and_partition(files):
    shown = convert(files)
    assert "each counted alike as no partition" in shown and "round 1" in shown
    run = Run.open("theirs")
    c = run.checkpoint(1)
    mean = torch.cat(
        [c.state[n].reshape(-1) for n in Layout.of(models.build("mlp", (1, 8, 8), 10)).names]
    )
    assert torch.allclose(mean, c.clients.mean(0), atol=1e-6) and c.received is None
    assert (
        torch.equal(run.checkpoint(2).received, mean) and not (run.path / "partition.npz").exists()
    )
    assert "which examples belong" in call("matching", "theirs", "--out", "o", code=1).stderr
    shown = call("forgetting", "theirs", "--out", "o", "--json")
    assert "which examples belong" in shown.stderr
    rows = {row["round"]: row for row in json.loads(shown.stdout)["rows"]}
    assert (
        rows[1]["received"] is None
        and rows[2]["received"] == rows[1]["aggregated"]
        and rows[2]["trained"] is not None
    )


@pytest.mark.slow
def test_what_is_missing_or_damaged_is_named_and_the_rest_works(files):
    (files / "round_2" / "client_1.pt").write_bytes(
        (files / "round_2" / "client_1.pt").read_bytes()[:900]
    )
    (files / "round_3" / "client_2.pt").unlink()
    (files / "round_2" / "global.pt").write_bytes(b"")
    shown = convert(files, *GLOBAL, "--partition", files / "parts.json")
    assert "round 2, client 1: checkpoint" in shown and "truncated" in shown
    assert "round 3 has no file of client 2" in shown
    assert (
        "round 2: its global model is not there" in shown
        and "round 3: what the clients received" in shown
    )
    run = Run.open("theirs")
    assert run.checkpoint(2).client_ids == [0, 2, 3] and run.checkpoint(3).client_ids == [0, 1, 3]
    sizes = [len(p) for p in partition.load_parts(run.path / "partition.npz")]
    c = run.checkpoint(2)
    mean = sum(sizes[k] * w.double() for k, w in zip(c.client_ids, c.clients, strict=True)) / sum(
        sizes[k] for k in c.client_ids
    )
    assert torch.allclose(
        torch.cat([t.reshape(-1) for t in c.state.values()]).double(), mean, atol=1e-6
    )
    assert (
        "truncated" in call("forgetting", "theirs", "--out", "o").stderr
    )  # the verbs say it again
    shutil.rmtree("theirs")
    shutil.rmtree(files / "round_2")
    assert "no client files of round 2" in convert(files)
    assert Run.open("theirs").rounds == [1, 3]


def test_all_files_damaged(files):
    for file in files.rglob("client_*.pt"):
        file.write_bytes(b"PK")
    assert "none of the files" in convert(files, code=1)
    assert not Path("theirs").exists()  # another attempt with other options is not refused


def test_another_architecture_is_an_error_that_names_the_tensor(files):
    state = torch.load(files / "round_2" / "client_3.pt", weights_only=True)
    state["fc1.weight"] = torch.zeros(7, 64)
    torch.save(state, files / "round_2" / "client_3.pt")
    shown = convert(files, code=1)
    assert (
        "round 2, client 3 (round_2/client_3.pt)" in shown
        and "fc1.weight is [7, 64] there and [" in shown
    )
    run = Run.open("theirs")
    assert run.rounds == [1] and run.status == "unfinished"
    torch.save(
        torch.load(files / "round_1" / "client_3.pt", weights_only=True),
        files / "round_2" / "client_3.pt",
    )
    convert(files)  # the same command goes on
    run = Run.open("theirs")
    assert run.rounds == [1, 2, 3] and run.metrics["metric"].value_counts()["accuracy"] == 3
    assert "already holds a run" in convert(files, code=2)


def test_prefixes_containers_names_and_rounds_from_zero(files):
    other = files.parent / "other"
    for r in (1, 2):
        (other / f"t{r - 1}").mkdir(parents=True)
        for k, name in enumerate(("bonn", "aachen")):
            state = torch.load(files / f"round_{r}" / f"client_{k}.pt", weights_only=True)
            torch.save(
                {"epoch": r, "state_dict": {f"module.{n}": v for n, v in state.items()}},
                other / f"t{r - 1}" / f"{name}.ckpt",
            )
    np.savez(other / "parts.npz", bonn=np.arange(5), aachen=np.arange(5, 12))
    shown = call(
        "convert",
        other,
        "run",
        "--pattern",
        "t{round}/{client}.ckpt",
        *WORLD,
        "--partition",
        other / "parts.npz",
    ).stderr
    assert (
        "without 'module.'" in shown
        and "0 = aachen, 1 = bonn" in shown
        and "rounds start at 0" in shown
    )
    run = Run.open("run")
    assert run.rounds == [1, 2] and run.origin["names"] == {0: "aachen", 1: "bonn"}
    assert [len(p) for p in partition.load_parts(run.path / "partition.npz")] == [7, 5]
    bonn = torch.load(files / "round_1" / "client_0.pt", weights_only=True)
    assert torch.equal(
        run.checkpoint(1).clients[1], torch.cat([v.reshape(-1) for v in bonn.values()])
    )


def test_safetensors_files_and_nothing_is_executed(files):
    from safetensors.torch import save_file

    (files / "round_1" / "client_1.pt").write_bytes(b"cos\nsystem\n(S'touch exploded'\ntR.")
    for r in (1, 2):
        for k in (0, 2):
            save_file(
                torch.load(files / f"round_{r}" / f"client_{k}.pt", weights_only=True),
                files / f"round_{r}" / f"client_{k}.safetensors",
            )
    call("convert", files, "st", "--pattern", "round_{round}/client_{client}.safetensors", *WORLD)
    convert(files)
    assert not Path("exploded").exists()
    a, b = Run.open("st").checkpoint(1), Run.open("theirs").checkpoint(1)
    assert torch.equal(a.clients[1], b.clients[b.client_ids.index(2)]) and 1 not in b.client_ids


@pytest.mark.slow
def test_user_code_is_only_run_when_typed(files):
    Path("convert_net.py").write_text(
        "from fldiag.models import build\ndef f():\n    open('ran', 'a').write('x')\n"
        "    return build('mlp', (1, 8, 8), 10)\n"
    )
    call("convert", files, "theirs", *PATTERN, "--model", "convert_net:f", "--no-evaluate")
    ran = Path("ran").read_text()
    shown = call("forgetting", "theirs", "--data", "digits", "--out", "o", code=1).stderr
    assert "because a file says so" in shown and "--allow-code convert_net:f" in shown
    assert Path("ran").read_text() == ran
    shown = call("forgetting", "theirs", "--model", "convert_net:f", code=2).stderr
    assert "holds weights alone" in shown and "--data" in shown
    call("forgetting", "theirs", "--model", "convert_net:f", "--data", "digits", "--out", "o")
    assert Path("ran").read_text() != ran


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["files", "x"], "--pattern 'round_{round}/client_{client}.pt'"),
        (["files/start.pt", "x", *PATTERN, *WORLD], "there is no folder"),
        (["files", "x", *PATTERN], "--model"),
        (["files", "x", *PATTERN, "--model", "mlp"], "--data"),
        (["files", "x", *PATTERN, *WORLD, "--global-is", "odd"], "received"),
        (["files", "x", "--pattern", "a{client}.pt", *WORLD], "round_1/client_0.pt"),
        (["files", "x", *PATTERN, *WORLD, "--partition", "gone.npz"], "gone.npz"),
        (["files", "x", *PATTERN, *WORLD, "--seed", "12345678901234567890"], "9223372036854775807"),
        (["gone", "x"], "gone"),
    ],
)
def test_wrong_use(files, arguments, expected):
    assert expected in call("convert", *arguments, code=2).stderr
    assert not Path("x").exists()


def test_a_partition_of_other_data(files):
    (files / "parts.json").write_text(json.dumps({str(k): [k, 5000] for k in range(4)}))
    assert "has example 5000, and data set 'digits' has 1500" in convert(
        files, "--partition", files / "parts.json", code=2
    )


@pytest.mark.parametrize("shift", [1, -1])
def test_a_partition_that_is_numbered_by_one_off_is_refused_and_its_remedy_works(files, shift):
    """The weights are recorded without it, so that nothing is measured on another client's examples."""
    parts = {
        int(name.split("_")[1]): v
        for name, v in json.loads((files / "parts.json").read_text()).items()
    }
    (files / "parts.json").write_text(json.dumps({k + max(-shift, 0): v for k, v in parts.items()}))
    for file in sorted(files.glob("round_*/client_*.pt"), reverse=True):
        k = int(file.stem.split("_")[1])
        file.rename(file.with_stem(f"client_{k + max(shift, 0)}"))
    shown = convert(files, *GLOBAL, "--partition", files / "parts.json", code=2)
    assert "made without the partition" in shown and "with the clients' own numbers" in shown
    assert (
        "partition.npz" not in Run.open("theirs").files
        and "the partition is left out" in call("forgetting", "theirs", "--format", "png").stderr
    )
    (files / "mended.json").write_text(json.dumps({k + max(shift, 0): v for k, v in parts.items()}))
    assert (
        "partition"
        not in call(
            "convert",
            files,
            "mended",
            *PATTERN,
            *WORLD,
            *GLOBAL,
            "--partition",
            files / "mended.json",
        ).stderr
    )


@pytest.mark.parametrize("name", ["3", "1"])
def test_a_client_that_the_partition_lacks_is_named(files, name):
    parts = {k.split("_")[1]: v for k, v in json.loads((files / "parts.json").read_text()).items()}
    (files / "parts.json").write_text(json.dumps({k: v for k, v in parts.items() if k != name}))
    assert f"does not say which examples client {name} has" in convert(
        files, *GLOBAL, "--partition", files / "parts.json"
    )
    shown = call("forgetting", "theirs", "--format", "png").stderr
    assert (
        f"which examples client {name} has" in shown
        and f"client {name} is not in the partition" in shown
    )
    table = fldiag.diagnose(fldiag.load("theirs"), "forgetting")
    assert set(table.query("moment == 'trained' and scope == 'client'")["client"]) == {
        0,
        1,
        2,
        3,
    } - {int(name)}
