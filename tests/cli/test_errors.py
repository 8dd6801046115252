"""Bad input: one message with what, where, value and remedy; the right exit code; nothing lost, nothing executed."""

import json
import os
import pickle
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import invoke
from torch import nn

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "checkpoints" / "example" / "fedsol-digits.pt"


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLDIAG_DATA", raising=False)


def complaint(*arguments, code):
    result = invoke(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    lines = result.stderr.strip().splitlines()
    assert lines[0].startswith("error: ") and lines[1].lstrip().startswith("→ "), result.stderr
    assert not lines[0].startswith("error: unexpected "), result.stderr
    assert "Traceback" not in result.output
    return result.stderr


DEEP = f"{'[' * 900}1{']' * 900}"
FEDSOL = "train digits --set method.name=fedsol --set"
#: What is typed -> exit code, words of the message. CKPT: the example checkpoint; the files are those of ``folder``.
CALLS = [
    (f"{FEDSOL} method.rhoo=1", 2, "did you mean 'rho'?"),
    (f"{FEDSOL} trian.lr=1", 2, "did you mean 'train'?"),
    (f"{FEDSOL} lr=1", 2, "did you mean 'train.lr'?"),
    (f"{FEDSOL} method.name=fedsoll", 2, "did you mean 'fedsol'?"),
    (f"{FEDSOL} model.name=mlpp", 2, "did you mean 'mlp'?"),
    (f"{FEDSOL} data.name=mnsit", 2, "did you mean 'mnist'?"),
    (f"{FEDSOL} train.lr=-1", 2, "greater than 0"),
    (f"{FEDSOL} train.lr=nan", 2, "finite"),
    (f"{FEDSOL} method.rho=-1", 2, "greater than or equal to 0"),
    (f"{FEDSOL} clients.per_round=50", 2, "total = 20"),
    (f"{FEDSOL} partition.kind=lad", 2, "'lda'"),
    (f"{FEDSOL} partition.shards=2", 2, "no meaning for kind = 'lda'"),
    (f"{FEDSOL} partition.alpha=0", 2, "greater than 0"),
    (f"{FEDSOL} checkpoint.clients=[99]", 2, "outside 0..19"),
    (f"{FEDSOL} train.precision=fp16", 2, "'bf16'"),
    (f"{FEDSOL} name=../up", 2, "name"),
    (f"{FEDSOL} nonsense", 2, "key=value"),
    ("train digits --set method=fedprox", 2, "method is a section|did you mean method.name?"),
    ("train digits --set partition=iid", 2, "did you mean partition.kind?"),
    ("train digits --set train=3", 2, "such as train.epochs"),
    (f"{FEDSOL} clients.total=2000", 2, "1500"),
    (f"{FEDSOL} partition.min_size=200", 2, "min_size"),
    (f"{FEDSOL} model.hidden={DEEP}", 2, "model.hidden: nested too deeply"),
    (f"{FEDSOL} model.hidden={DEEP[700:-700]}", 2, "nested more than 100 levels deep"),
    ("train digits --seed 12345678901234567890", 2, "less than 9223372036854775808"),
    ("train digits --set train.drop_last=true --set train.batch_size=1000", 2, "largest client"),
    ("train digits --set data.name=mnist", 2, "FLDIAG_DATA"),
    ("train digits --set data.name=cifar10 --set data.root=.", 1, "cifar10.npz|--download"),
    ("train digits --out file/inside", 1, "--out"),
    ("train digits --sweep seed=0,1 --overwrite", 2, "another --out"),
    ("train digits --shard 1/2", 2, "--sweep key=a,b,c"),
    ("train digits --overwrite --resume", 2, "give one of them"),
    ("train digit", 2, "did you mean 'digits'?"),
    ("train gone.toml", 2, "gone.toml"),
    ("train bad.toml", 2, "not valid TOML"),
    ("train deep.toml", 2, "deep.toml: nested too deeply"),
    ("sweep digits --over seed", 2, "key=value,value"),
    ("sweep digits --over seed=1 --over seed=2", 2, "seed is given twice"),
    ("sweep digits --over seed=1 --set seed=2", 2, "seed is given in two ways"),
    ("sweep digits --over seed=0,0", 2, "the same run"),
    ("sweep digits --over seed=0,1 --shard 3/2", 2, "--shard 3/2"),
    ("sweep digits --over metod.name=fedavg", 2, "metod"),
    ("runs file", 2, "file is not a folder"),
    ("runs empty", 2, "there is no run under empty"),
    ("prune empty", 2, "has no run.json"),
    ("convert / out", 2, "all files of this machine|folder that holds the clients' files"),
    ("drift checkpoints/nothing", 2, "checkpoints/nothing is not there"),
    ("drift empty", 2, "has no run.json"),
    ("drift deep_run", 1, "deep_run is not a run"),
    ("check", 2, "no run is given"),
    ("check a b c", 2, "3 paths are given for two sides|quote a pattern"),
    ("check a --a b", 2, "a side is given twice"),
    ("check a b --baseline b", 2, "a side is given twice"),
    ("check CKPT nowhere", 2, "is not there"),
    ("check CKPT --fail-if 'accuracy < basline'", 2, "position 12"),
    ("check CKPT CKPT --fail-if 'accuracy < 1e400'", 2, "1e400"),
    ("check CKPT CKPT --level nan", 2, "between 0 and 1"),
    ("check CKPT CKPT --level 0", 2, "between 0 and 1"),
    ("diff CKPT CKPT --level 2", 2, "between 0 and 1"),
    ("diff CKPT", 2, "one side is given"),
    ("diff CKPT CKPT --width wide", 2, "single, double"),
    ("report empty", 2, "has no run.json"),
    ("report nowhere", 2, "is not there"),
    ("list method", 2, "did you mean 'methods'?"),
    ("explain fedsoll", 2, "did you mean 'fedsol'?"),
    ("partition digits --format gif", 2, "pdf, png, svg"),
    ("spectrum data.npz", 2, "--data npz:data.npz"),
    ("spectrum CKPT --k 100000", 2, "46,594 weights"),
    ("spectrum CKPT --memory 5", 2, "5 bytes"),
    ("spectrum CKPT --out file/inside", 1, "--out"),
    ("spectrum CKPT --slice client:99", 2, "client"),
    ("spectrum CKPT --slice tset", 2, "test"),
    ("spectrum CKPT --client 3", 2, "client"),
    ("spectrum CKPT --samples 0", 2, "samples"),
    ("spectrum CKPT --device tpu", 2, "unknown device 'tpu'"),
    ("spectrum CKPT --precision fp8", 2, "fp32"),
    ("spectrum CKPT --which odd", 2, "largest"),
    ("landscape CKPT --points 0", 2, "points"),
    ("landscape CKPT --points 10", 2, "odd"),
    ("landscape nowhere.pt", 2, "is not there"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that are not what they are given for."""
    path = tmp_path_factory.mktemp("wrong")
    (path / "bad.toml").write_text("rounds = = 3")
    (path / "deep.toml").write_text(f"rounds = {DEEP}")
    (path / "file").write_text("")
    (path / "empty").mkdir()
    np.savez(path / "data.npz", train_images=np.zeros((2, 8, 8)))
    (path / "deep_run").mkdir()
    (path / "deep_run" / "run.json").write_text(f'{{"config": {DEEP}}}')
    (path / "deep_run" / "rounds.jsonl").write_text("")
    return path


@pytest.mark.parametrize(("call", "code", "words"), CALLS)
def test_a_wrong_call_is_one_message_and_writes_nothing(call, code, words, folder, monkeypatch):
    monkeypatch.chdir(folder)
    files = {file for file in folder.rglob("*") if file.is_file()}
    text = complaint(*shlex.split(call.replace("CKPT", str(EXAMPLE))), code=code)
    assert all(word in text for word in words.split("|")), text
    assert {file for file in folder.rglob("*") if file.is_file()} == files


def test_few_names_are_listed():
    text = complaint("train", "digits", "--set", "method.name=FEDAVG", code=2)
    assert "did you mean 'fedavg'?" in text and "scaffold" not in text
    assert "fedalign" not in complaint("train", "digit", code=2)


@pytest.mark.parametrize(
    ("option", "key"), [("--rounds", "rounds"), ("--lr", "train.lr"), ("--method", "method.name")]
)
def test_a_key_of_the_config_typed_as_an_option_says_how_to_set_it(option, key):
    result = invoke("train", "digits", option, "5")
    assert (
        result.exit_code == 2
        and f"--set {key}=..." in result.stderr
        and "--out" not in result.stderr
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


def test_existing_run_is_not_overwritten(tmp_path):
    quick = ["--set", "rounds=1", "--set", "model.name=mlp", "--out", "r"]
    assert invoke("train", "digits", *quick).exit_code == 0
    before = (tmp_path / "r" / "run.json").read_bytes()
    assert "--resume" in complaint("train", "digits", *quick, code=2)
    assert "train.lr" in complaint(
        "train", "digits", *quick, "--set", "train.lr=0.5", "--resume", code=2
    )
    assert (tmp_path / "r" / "run.json").read_bytes() == before


def test_diverged_training_is_an_outcome():
    """Also where all weights are finite: the table says so too."""
    result = invoke("train", "digits", "--set", "train.lr=5000", "--set", "rounds=3", "--out", "r")
    assert result.exit_code == 3 and "diverged" in result.stdout and "finished" not in result.output
    assert "diverged: the test loss is" in result.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_the_state_and_says_how_to_go_on():
    code = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background\n"
        "from fldiag.training import train\n"
        "old = rounds.store\n"
        "def store(run, federation, *rest):\n    old(run, federation, *rest)\n"
        "    if federation.t == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "rounds.store = store\nfrom fldiag.cli import app\n"
        "app(['train', 'digits', '--set', 'model.name=mlp', '--set', 'rounds=4', '--out', 'r'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "--resume" in done.stderr and "Traceback" not in done.stderr
    result = invoke(
        "train", "digits", "--set", "model.name=mlp", "--set", "rounds=4", "--out", "r", "--resume"
    )
    assert result.exit_code == 0 and "0004.pt" in result.stdout


def test_debug_shows_the_traceback_and_ends_with_the_versions():
    result = invoke("spectrum", "nowhere.pt", "--debug")
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
    result = invoke(
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
    )
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if "shards do not divide" in line]
    assert len(said) == 1 and said[0].startswith("warning: 51 shards"), result.stderr
    assert ".py" not in result.stderr and "warnings.warn" not in result.stderr
