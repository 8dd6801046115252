"""What is stored comes back bit for bit, after a kill, too; a damaged file is refused, or makes no difference."""

import io
import json
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from reference import train
from torch import nn

import fldiag

MEMORIES = {
    "fedavg": {},
    "fedavgm": {"method__name": "fedavgm"},  # of the server
    "scaffold": {"method__name": "scaffold"},  # of both
    "feddyn": {"method__name": "feddyn"},
    "momentum": {"train__momentum": 0.9, "train__keep_momentum": True},  # of the clients
    "half": {"method__name": "scaffold", "checkpoint__every": 2},
    "tuned": {"method__name": "fedavg_ft"},  # of none; its last numbers are of the end
}
#: When a run is killed: with which event, or as which file takes its place.
KILLS = [
    ("fedavg", "event", 2),
    ("fedavgm", "file", 6),
    ("scaffold", "file", 4),
    ("scaffold", "event", 4),
    ("feddyn", "event", 3),
    ("momentum", "file", 5),
    ("half", "event", 3),
]
KILLED = """
import json, os, signal, sys
import torch
from reference import train
torch.set_num_threads(1)

def killed(folder, options, kind, count):
    reached = []
    def stop(*event):
        reached.append(event)
        if len(reached) == count:
            os.kill(os.getpid(), signal.SIGKILL)
    replace = os.replace
    if kind == "file":
        os.replace = lambda *paths: (stop(), replace(*paths))
    train(folder, on_event=stop if kind == "event" else None, **options)

for job in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        killed(*job)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""


def options(name):
    how = {"rounds": 4, "clients__total": 6, "clients__per_round": 3, "train__epochs": 1}
    return how | {"train__batch_size": 100, "checkpoint__clients": "sampled"} | MEMORIES[name]


def bits(run):
    """All stored weights of a run."""
    stored = [run.checkpoint(r) for r in run.rounds]
    return [t for s in stored for t in (*s.state.values(), s.clients, s.received)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return {name: train(folder / name, **options(name)) for name in MEMORIES}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    jobs = [[str(folder / f"{i}" / n), options(n), *kill] for i, (n, *kill) in enumerate(KILLS)]
    command = [sys.executable, "-c", KILLED, json.dumps(jobs)]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [str(int(signal.SIGKILL))] * len(jobs), result.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(KILLS)), ids=["-".join(map(str, k)) for k in KILLS])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(i, killed, whole):
    name = KILLS[i][0]
    folder = killed / str(i) / name
    assert fldiag.load(folder).done < 4
    run = train(folder, resume=True, **options(name))
    assert run.done == 4 and run.status == whole[name].status and same(bits(run), bits(whole[name]))
    pd.testing.assert_frame_equal(run.metrics, whole[name].metrics)


@pytest.mark.parametrize("name", ["feddyn", "scaffold", "tuned"])
def test_more_rounds_are_those_of_a_longer_run(name, whole, tmp_path):
    run = train(tmp_path / name, **options(name) | {"rounds": 2})
    run = train(run.path, resume=True, **options(name))
    assert same(bits(run), bits(whole[name]))
    pd.testing.assert_frame_equal(run.metrics, whole[name].metrics)


def flip(part, of=bytes(range(256))):
    """A bit of the first of these bytes from there on; of an even digit: a text stays readable."""

    def damage(path):
        content = bytearray(path.read_bytes())
        start = int(part * len(content))
        i = next(i for i in [*range(start, len(content)), *range(start)] if content[i] in of)
        content[i] ^= 1
        path.write_bytes(bytes(content))

    return damage


DAMAGE = {f"a bit at {part}": flip(part) for part in (0.02, 0.4, 0.8)} | {
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
}
DIGITS = {f"a digit at {part}": flip(part, b"2468") for part in np.linspace(0, 0.98, 15)}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Folders of a run that ended and of one that was stopped, both after two rounds; and what they are after three."""
    folder, events = tmp_path_factory.mktemp("damaged"), []

    def stop(event):
        events.append(event)
        if len(events) == 3:
            shutil.copytree(folder / "whole" / "run", folder / "stopped" / "run")

    how = options("scaffold") | {"on_event": stop}
    expected = train(folder / "whole" / "run", **how | {"rounds": 3})
    ended = train(folder / "ended" / "run", **how | {"rounds": 2}).path
    stopped = folder / "stopped" / "run"
    assert fldiag.load(stopped).done == 2
    return [stopped, ended], expected


def is_part(run, expected):
    """Whether a run has nothing but what the expected one has up to there."""
    table = expected.metrics[expected.metrics["round"] <= run.done].reset_index(drop=True)
    stored = bits(run)
    return run.metrics.equals(table) and same(stored, bits(expected)[: len(stored)])


def accepts(damage, path, file, expected, folder):
    """Whether a run is read, or trained further, to something else once the file is damaged."""
    copy = shutil.copytree(path, folder / "run")
    damage(copy / file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run may say that it is shorter than it was
        try:
            if not is_part(fldiag.load(copy), expected):
                return True
        except fldiag.FldiagError:
            pass
        try:
            run = train(copy, resume=True, **options("scaffold") | {"rounds": 3})
            return run.done < 3 or not is_part(run, expected)
        except fldiag.FldiagError:
            return False


@pytest.mark.parametrize("damage", DAMAGE | DIGITS)
def test_a_damaged_file_of_a_run_is_refused_or_makes_no_difference(damage, damaged, tmp_path):
    paths, expected = damaged
    files = [
        (path, file.relative_to(path))
        for path in paths
        for file in sorted(path.rglob("*.json*" if damage in DIGITS else "*"))
        if file.is_file() and file.stat().st_size
    ]
    assert len(files) >= 4
    act = (DAMAGE | DIGITS)[damage]
    wrong = [
        (path, str(file))
        for i, (path, file) in enumerate(files)
        if accepts(act, path, file, expected, tmp_path / f"{i}")
    ]
    assert not wrong


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def safetensors(weight, data=b""):
    header = json.dumps({"weight": {"dtype": "F32", **weight}}).encode()
    return len(header).to_bytes(8, "little") + header + data


NET, DATA = nn.Linear(4, 3), (torch.randn(6, 4), torch.arange(6) % 3)
STATE = NET.state_dict()

NO_WEIGHTS = {
    "nothing": b"",
    "text": b"no weights at all\n" * 20,
    "a zip of something else": b"PK\x05\x06" + bytes(18),
    "half of a file": saved(STATE)[:600],
    "numbers": saved({"weight": 3, "bias": [1.0, 2.0]}),
    "other weights": saved(nn.Linear(5, 3).state_dict()),
    "a module": saved(NET),
    "a header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": (9).to_bytes(8, "little") + b"{{{{{{{{{",
    "a header without data": safetensors({"shape": [3, 4], "data_offsets": [0, 48]}),
    "sizes that do not fit": safetensors({"shape": [3, 4], "data_offsets": [0, 40]}, bytes(40)),
    "a pickle that runs code": b"cos\nsystem\n(S'echo run > executed'\ntR.",
}


@pytest.mark.parametrize("ending", [".pt", ".safetensors", ".npz"])
@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_a_file_that_holds_no_weights_is_refused(name, ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"w{ending}").write_bytes(NO_WEIGHTS[name])
    with pytest.raises(fldiag.FldiagError):
        checkpoint = fldiag.load(f"w{ending}", model=NET, data=DATA)
        fldiag.diagnose(checkpoint, "spectrum", k=1)
    assert not (tmp_path / "executed").exists()


CLAIMS = {
    "w.pt": saved({"weight": torch.ones(1).expand(10**6, 10**6)}),
    "w.safetensors": safetensors({"shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_file_that_claims_to_hold_terabytes_is_refused_when_it_is_read(name, tmp_path):
    (tmp_path / name).write_bytes(CLAIMS[name])
    with pytest.raises(fldiag.FldiagError):
        fldiag.load(tmp_path / name)
