"""Bad input: one message with what, where, value and remedy; the right exit code; nothing lost, nothing executed."""

import json
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fldiag.cli import app

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "checkpoints" / "example" / "fedsol-digits.pt"
runner = CliRunner()


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLDIAG_DATA", raising=False)


def complaint(*arguments, code):
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    lines = result.stderr.strip().splitlines()
    assert lines[0].startswith("error: ") and lines[1].lstrip().startswith("→ "), result.stderr
    assert "Traceback" not in result.output
    return result.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("method.rhoo=1", "did you mean 'rho'?"),
        ("trian.lr=1", "did you mean 'train'?"),
        ("lr=1", "did you mean 'train.lr'?"),
        ("method.name=fedsoll", "did you mean 'fedsol'?"),
        ("model.name=mlpp", "did you mean 'mlp'?"),
        ("data.name=mnsit", "did you mean 'mnist'?"),
        ("train.lr=-1", "greater than 0"),
        ("train.lr=nan", "finite"),
        ("method.rho=-1", "greater than or equal to 0"),
        ("clients.per_round=50", "total = 20"),
        ("partition.kind=lad", "'lda'"),
        ("partition.shards=2", "no meaning for kind = 'lda'"),
        ("partition.alpha=0", "greater than 0"),
        ("checkpoint.clients=[99]", "outside 0..19"),
        ("train.precision=fp16", "'bf16'"),
        ("name=../up", "name"),
        ("nonsense", "key=value"),
        ("clients.total=2000", "1500"),
        ("partition.min_size=200", "min_size"),
    ],
)
def test_wrong_config(override, expected):
    assert expected in complaint(
        "train", "digits", "--set", "method.name=fedsol", "--set", override, code=2
    )


def test_unknown_preset_and_missing_file():
    assert "did you mean 'digits'?" in complaint("train", "digit", code=2)
    assert "gone.toml" in complaint("train", "gone.toml", code=2)
    Path("bad.toml").write_text("rounds = = 3")
    assert "not valid TOML" in complaint("train", "bad.toml", code=2)


def test_names_are_found_in_any_case_and_few_are_listed():
    text = complaint("train", "digits", "--set", "method.name=FEDAVG", code=2)
    assert "did you mean 'fedavg'?" in text and "scaffold" not in text
    assert "fedalign" not in complaint("train", "digit", code=2)


@pytest.mark.parametrize(
    ("option", "key"), [("--rounds", "rounds"), ("--lr", "train.lr"), ("--method", "method.name")]
)
def test_a_key_of_the_config_typed_as_an_option_says_how_to_set_it(option, key):
    result = runner.invoke(app, ["train", "digits", option, "5"])
    assert (
        result.exit_code == 2
        and f"--set {key}=..." in result.stderr
        and "--out" not in result.stderr
    )


def test_a_path_of_the_wrong_kind_says_what_it_is():
    assert "checkpoints/nothing is not there" in complaint("drift", "checkpoints/nothing", code=2)
    Path("empty").mkdir()
    assert "has no run.json" in complaint("drift", "empty", code=2)
    np.savez("data.npz", train_images=np.zeros((2, 8, 8)))
    assert "--data npz:data.npz" in complaint("spectrum", "data.npz", code=2)


def test_what_can_never_be_computed_is_refused():
    assert "46,594 weights" in complaint("spectrum", EXAMPLE, "--k", 100_000, code=2)
    assert "5 bytes" in complaint("spectrum", EXAMPLE, "--memory", 5, code=2)
    assert "points" in complaint("landscape", EXAMPLE, "--points", 0, code=2)
    batches = ("--set", "train.drop_last=true", "--set", "train.batch_size=1000")
    assert "largest client" in complaint("train", "digits", *batches, code=2)


def test_missing_data_says_where_it_looked_and_how_to_get_it(tmp_path):
    assert "FLDIAG_DATA" in complaint("train", "digits", "--set", "data.name=mnist", code=2)
    text = complaint(
        "train", "digits", "--set", "data.name=cifar10", "--set", f"data.root={tmp_path}", code=1
    )
    assert "cifar10.npz" in text and "--download" in text


def test_a_forecast_needs_no_data():
    """A registered set's shape is known: blank pictures stand for it, and that is said."""
    small = ["--set", "model.name=mlp", "--set", "train.batch_size=10", "--dry-run"]
    result = runner.invoke(app, ["train", "fedsol-mnist-lda0.1", *small])
    assert result.exit_code == 0, result.output
    assert (
        "forecast:" in result.stdout
        and "60,000 blank pictures" in result.stdout
        and "needs a data folder" in result.stdout
    )
    distilled = [*small, "--set", "data.public=cifar100", "--set", "data.public_size=100"]
    result = runner.invoke(app, ["train", "fedproj-cifar10-lda0.3", *distilled, "--json"])
    assert result.exit_code == 0, result.output
    assert [text.split("'")[1] for text in json.loads(result.stdout)["remarks"]] == [
        "cifar10",
        "cifar100",
    ]
    assert "unknown data set" in complaint(
        "train", "digits", "--set", "data.name=own", "--dry-run", code=2
    )
    assert "known: fedsol" in complaint(
        "train", "fedsol-mnist-lda0.1", "--set", "data.variant=x", "--dry-run", code=2
    )


def test_damaged_checkpoints(tmp_path):
    whole = EXAMPLE.read_bytes()
    for name, content in (
        ("empty.pt", b""),
        ("cut.pt", whole[: len(whole) // 2]),
        ("text.pt", b"not a checkpoint"),
    ):
        Path(name).write_bytes(content)
        assert name in complaint("spectrum", name, code=1)
    Path("renamed.safetensors").write_bytes(whole)
    assert "safetensors" in complaint("spectrum", "renamed.safetensors", code=1)
    assert "is not there" in complaint("landscape", "nowhere.pt", code=2)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize("save", ["torch", "pickle"])
def test_pickled_objects_are_refused_and_not_executed(save):
    if save == "torch":
        torch.save({"w": torch.zeros(2), "x": Bomb()}, "bomb.pt")
    else:
        Path("bomb.pt").write_bytes(pickle.dumps(Bomb()))
    text = complaint("spectrum", "bomb.pt", "--model", "mlp", "--data", "digits", code=1)
    assert "refused" in text and not Path("exploded").exists()


def test_a_checkpoint_cannot_name_code_to_run(tmp_path):
    """A manifest that names user code is refused with the option by which the user can allow it."""
    Path("evil.py").write_text("open('exploded', 'w')\ndef f(*a, **k): ...\n")
    content = torch.load(EXAMPLE, weights_only=True)
    for section in ("model", "data"):
        manifest = json.loads(content["manifest"])
        manifest["config"][section]["name"] = "evil:f"
        torch.save({**content, "manifest": json.dumps(manifest)}, "evil.pt")
        assert "--allow-code evil:f" in complaint("spectrum", "evil.pt", code=1)
        assert not Path("exploded").exists()


def test_hand_edited_manifest():
    content = torch.load(EXAMPLE, weights_only=True)
    torch.save({**content, "manifest": "{"}, "a.pt")
    assert "manifest" in complaint("spectrum", "a.pt", code=1)
    torch.save({**content, "manifest": '{"schema": 1}'}, "b.pt")
    assert "manifest" in complaint("spectrum", "b.pt", code=1)
    torch.save({**content, "manifest": '{"schema": 99}'}, "c.pt")
    assert "update fldiag" in complaint("spectrum", "c.pt", code=1)


def test_state_dict_that_does_not_fit_names_the_tensors():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    torch.save(net.state_dict(), "w.pt")
    text = complaint("spectrum", "w.pt", "--model", "mlp", "--data", "digits", code=2)
    assert "missing fc1.weight" in text and "unexpected 1.weight" in text


def test_state_dict_without_model_or_data_asks_for_them():
    torch.save({"w": torch.zeros(2)}, "w.pt")
    assert "--data" in complaint("spectrum", "w.pt", code=2)
    assert "--model" in complaint("spectrum", "w.pt", "--data", "digits", code=2)


def test_out_folder_that_cannot_be_written():
    Path("file").write_text("")
    assert "--out" in complaint("spectrum", EXAMPLE, "--out", "file/inside", code=1)
    assert "--out" in complaint("train", "digits", "--out", "file/inside", code=1)


def test_existing_run_is_not_overwritten(tmp_path):
    quick = ["--set", "rounds=1", "--set", "model.name=mlp", "--out", "r"]
    assert runner.invoke(app, ["train", "digits", *quick]).exit_code == 0
    before = (tmp_path / "r" / "run.json").read_bytes()
    assert "--resume" in complaint("train", "digits", *quick, code=2)
    assert "train.lr" in complaint(
        "train", "digits", *quick, "--set", "train.lr=0.5", "--resume", code=2
    )
    assert (tmp_path / "r" / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    "question",
    [
        ("--slice", "client:99"),
        ("--slice", "tset"),
        ("--client", "3"),
        ("--samples", "0"),
        ("--device", "tpu"),
        ("--precision", "fp8"),
        ("--which", "odd"),
    ],
)
def test_wrong_questions(question):
    complaint("spectrum", EXAMPLE, *question, code=2)


def test_even_grid_is_refused():
    assert "odd" in complaint("landscape", EXAMPLE, "--points", 10, code=2)


def test_diverged_training_is_an_outcome():
    """Also where all weights are finite: the table says so too."""
    result = runner.invoke(
        app, ["train", "digits", "--set", "train.lr=5000", "--set", "rounds=3", "--out", "r"]
    )
    assert result.exit_code == 3 and "diverged" in result.stdout and "finished" not in result.output
    assert "diverged: the test loss is" in result.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_the_state_and_says_how_to_go_on():
    code = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background\n"
        "from fldiag.training import rounds\n"
        "old = rounds.store\n"
        "def store(run, federation, *rest):\n    old(run, federation, *rest)\n"
        "    if federation.t == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "rounds.store = store\nfrom fldiag.cli import app\n"
        "app(['train', 'digits', '--set', 'model.name=mlp', '--set', 'rounds=4', '--out', 'r'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "--resume" in done.stderr and "Traceback" not in done.stderr
    result = runner.invoke(
        app,
        [
            "train",
            "digits",
            "--set",
            "model.name=mlp",
            "--set",
            "rounds=4",
            "--out",
            "r",
            "--resume",
        ],
    )
    assert result.exit_code == 0 and "0004.pt" in result.stdout


def test_debug_shows_the_traceback_and_ends_with_the_versions():
    result = runner.invoke(app, ["spectrum", "nowhere.pt", "--debug"])
    assert result.exit_code == 1 and result.exception is not None
    shown = "".join(traceback.format_exception(result.exception)).rstrip().splitlines()[-1]
    assert shown.startswith("Versions: fldiag ") and torch.__version__.partition("+")[0] in shown


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["list"], ["list", "methods", "--json"]])
def test_who_reads_only_the_beginning_gets_no_message(verb):
    """fldiag list | head -c 1"""
    process = subprocess.Popen(
        [sys.executable, "-m", "fldiag.cli", *verb], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 1


def test_a_warning_is_one_line_without_the_place_in_the_code():
    result = runner.invoke(
        app,
        [
            "partition",
            "digits",
            "--set",
            "partition.kind=sharding",
            "--set",
            "partition.shards=3",
            "--set",
            "clients.total=17",
            "--out",
            "split.png",
        ],
    )
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if "shards do not divide" in line]
    assert len(said) == 1 and said[0].startswith("warning: 51 shards"), result.stderr
    assert ".py" not in result.stderr and "warnings.warn" not in result.stderr
