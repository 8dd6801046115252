"""What is typed -> exit code and one word of the cause; never a traceback, and nothing is written by a call that was refused."""

import json
import shlex
import shutil
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest
import torch
from reference import typed

import fldiag

DEEP = f"{'[' * 900}1{']' * 900}"
QUICK = "train digits --set model.name=mlp --set rounds=1 --set train.epochs=1"
SIDES = "check RUN OTHER --fail-if"
#: Call, exit code, a word of the cause. RUN, OTHER: trained runs; CKPT: a checkpoint; other names: files of ``folder``.
CALLS = [
    ("list methods", 0, ""),
    ("explain fedsol", 0, ""),
    ("runs RUNS", 0, ""),
    (f"{QUICK} --out ok", 0, ""),
    ("check RUN RUN", 0, ""),
    (f"{SIDES} 'loss > 1e9'", 0, ""),
    # failed
    ("train digits --set data.name=cifar10 --set data.root=.", 1, "--download"),
    (f"{QUICK} --out file/inside", 1, "file/inside"),
    ("spectrum CKPT --out file/inside", 1, "file/inside"),
    ("spectrum empty.pt", 1, "empty.pt"),
    ("spectrum cut.pt", 1, "cut.pt"),
    ("spectrum text.pt --model mlp --data digits", 1, "text.pt"),
    ("drift deep_run", 1, "deep_run"),
    # wrong use
    ("train digits --set method.name=fedsol --set method.rhoo=1", 2, "'rho'"),
    ("train digits --set trian.lr=1", 2, "'train'"),
    ("train digits --set lr=1", 2, "train.lr"),
    ("train digits --set method.name=fedsoll", 2, "'fedsol'"),
    ("train digits --set model.name=mlpp", 2, "'mlp'"),
    ("train digits --set data.name=mnsit", 2, "'mnist'"),
    ("train digits --set train.lr=-1", 2, "greater than 0"),
    ("train digits --set train.lr=nan", 2, "finite"),
    ("train digits --set method.name=fedsol --set method.rho=-1", 2, "greater"),
    ("train digits --set clients.per_round=50", 2, "20"),
    ("train digits --set partition.kind=lad", 2, "'lda'"),
    ("train digits --set partition.shards=2", 2, "shards"),
    ("train digits --set partition.alpha=0", 2, "greater than 0"),
    ("train digits --set partition.min_size=200", 2, "min_size"),
    ("train digits --set train.precision=fp16", 2, "'bf16'"),
    ("train digits --set clients.total=2000", 2, "1500"),
    ("train digits --set name=../up", 2, "name"),
    ("train digits --set nonsense", 2, "key=value"),
    ("train digits --set method=fedprox", 2, "method"),
    (f"train digits --set model.hidden={DEEP}", 2, "hidden"),
    ("train digits --rounds 3", 2, "rounds"),
    ("train digits --seed 12345678901234567890", 2, "seed"),
    ("train digits --set data.name=mnist", 2, "FLDIAG_DATA"),
    ("train digit", 2, "'digits'"),
    ("train gone.toml", 2, "gone.toml"),
    ("train bad.toml", 2, "TOML"),
    ("train deep.toml", 2, "deep.toml"),
    (f"{QUICK} --out RUN", 2, "--resume"),
    ("sweep digits --over seed", 2, "seed"),
    ("sweep digits --over seed=0,1 --shard 3/2", 2, "3/2"),
    ("sweep digits --over metod.name=fedavg", 2, "metod"),
    ("runs file", 2, "no run"),
    ("runs nothing", 2, "nothing"),
    ("prune nothing", 2, "nothing"),
    ("report nothing", 2, "nothing"),
    ("drift nothing", 2, "nothing"),
    ("matching CKPT", 2, "run"),
    ("check", 2, "argument"),
    ("check CKPT nowhere", 2, "nowhere"),
    ("check CKPT --fail-if 'accuracy < basline'", 2, "basline"),
    (f"{SIDES} 'accuracy < 1e400'", 2, "1e400"),
    (f"{SIDES} 'acuracy < 1'", 2, "accuracy"),
    ("check RUN OTHER --level nan", 2, "between 0 and 1"),
    ("diff RUN", 2, "argument"),
    ("diff RUN OTHER --level 2", 2, "between 0 and 1"),
    ("list method", 2, "'methods'"),
    ("explain fedsoll", 2, "'fedsol'"),
    ("partition digits --format gif", 2, "png"),
    ("spectrum data.npz", 2, "which data"),
    ("spectrum plain.pt", 2, "--data"),
    ("spectrum plain.pt --data digits", 2, "--model"),
    ("spectrum plain.pt --data digits --model small_cnn", 2, "fc1.weight"),
    ("spectrum CKPT --memory 5", 2, "at least 1k"),
    ("spectrum CKPT --slice client:99", 2, "client"),
    ("spectrum CKPT --slice tset", 2, "test"),
    ("spectrum CKPT --samples 0", 2, "samples"),
    ("spectrum CKPT --device tpu", 2, "tpu"),
    ("spectrum CKPT --precision fp8", 2, "fp32"),
    ("landscape CKPT --points 0", 2, "points"),
    ("landscape nowhere.pt", 2, "nowhere.pt"),
    ("nonsense", 2, "nonsense"),
    # diverged, or a check failed
    (f"{QUICK} --set train.lr=1e9 --out far", 3, "diverged"),
    (f"{SIDES} 'loss > 0'", 3, "fail"),
    (f"{SIDES} 'accuracy < 101%' --json", 3, "fail"),
]


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory):
    """Files that are not what they are taken for."""
    path = tmp_path_factory.mktemp("wrong")
    (path / "bad.toml").write_text("rounds = = 3")
    (path / "deep.toml").write_text(f"rounds = {DEEP}")
    (path / "file").write_text("")
    (path / "text.pt").write_text("no checkpoint")
    (path / "empty.pt").write_bytes(b"")
    np.savez(path / "data.npz", train_images=np.zeros((2, 8, 8)))
    state = runs["fedavg"].checkpoint().state
    torch.save(state, path / "plain.pt")
    whole = (path / "plain.pt").read_bytes()
    (path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    shutil.copytree(runs["fedavg"].path, path / "deep_run")
    (path / "deep_run" / "run.json").write_text(f'{{"config": {DEEP}}}')
    return path


def files(path):
    return {p for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("call", "code", "word"), CALLS)
def test_exit_code_and_cause(call, code, word, folder, runs, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FLDIAG_DATA", raising=False)
    run = runs["fedavg"].path
    places = {"RUNS": run.parent, "RUN": run, "OTHER": runs["scaffold"].path}
    places["CKPT"] = max((run / "rounds").iterdir())
    before = files(folder) | files(run.parent)
    answer = typed(*(str(places.get(w, w)) for w in shlex.split(call)))
    said = answer.out + answer.err
    assert answer.code == code, said
    assert word in said and "Traceback" not in said and "error: unexpected" not in said
    if code == 2:
        assert answer.out == "" and files(folder) | files(run.parent) == before
    if "--json" in call:
        assert json.loads(answer.out)["verdict"] == "fail"
    elif code in (1, 2):
        assert "error" in answer.err.lower()


def test_only_a_bug_report_shows_a_traceback():
    with pytest.raises(fldiag.FldiagError, match=r"nowhere\.pt"):
        typed("spectrum", "nowhere.pt", "--debug")


REFUSES = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name != "torch", "torch was imported"
sys.meta_path.insert(0, Refuse())
from importlib.metadata import entry_points
main = next(iter(entry_points(group="console_scripts", name="fldiag"))).load()
for words in (["--help"], ["list"], ["list", "methods", "--json"], ["--version"]):
    sys.argv = ["fldiag", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""


def test_help_list_and_version_do_without_torch():
    done = subprocess.run([sys.executable, "-c", REFUSES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout and "fedsol" in done.stdout
    assert done.stdout.strip().splitlines()[-1].endswith(metadata.version("fldiag"))


X, Y = torch.randn(12, 4), torch.arange(12) % 3


def net(width=3):
    return torch.nn.Linear(4, width)


def recorder(out, **options):
    options = {"data": (X, Y), "clients": [range(6), range(6, 12)]} | options
    return fldiag.Recorder(out, net(), **options)


def taken(out):
    recorder(out).close()
    recorder(out)


def closed(out):
    record = recorder(out)
    record.close()
    record.round(received=net(), aggregated=net(), clients={0: net()})


#: How a recorder is misused, and a word of the cause.
MISUSE = [
    (taken, "resume"),
    (closed, "closed"),
    (lambda out: recorder(out).client(0, net(2)), "weight"),
    (lambda out: recorder(out).client(0, {"weight": torch.zeros(3, 4)}), "bias"),
    (lambda out: recorder(out).client(0, torch.zeros(3)), "15"),
    (lambda out: recorder(out, clients=[range(6), range(6, 13)]), "12"),
    (lambda out: recorder(out, data=(X, Y[:5])), r"\[12, 4\].*\[5\]"),
    (lambda out: recorder(out, test=(X[:, :2], Y)), "test"),
]


@pytest.mark.parametrize(("use", "word"), MISUSE, ids=[word for _, word in MISUSE])
def test_a_recorder_refuses(use, word, tmp_path):
    with pytest.raises(fldiag.FldiagError, match=word):
        use(tmp_path / "run")


@pytest.mark.parametrize("wrong", ["client", "aggregated", "received"])
def test_a_refused_round_leaves_nothing(wrong, tmp_path):
    good = net()
    with recorder(tmp_path / "run") as record:
        start = record.run.rounds
        given = {"received": good, "clients": {0: good, 1: good}, "aggregated": good}
        given |= {"clients": {0: good, 1: net(2)}} if wrong == "client" else {wrong: net(2)}
        with pytest.raises(fldiag.FldiagError, match="weight"):
            record.round(**given)
        assert record.run.rounds == start
        record.round(received=good, clients={0: good}, aggregated=good)
    stored = fldiag.load(tmp_path / "run").checkpoint(1)
    assert list(stored.client_ids) == [0]
