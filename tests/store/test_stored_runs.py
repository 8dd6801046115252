"""What is stored comes back bit for bit, after a kill, too; a damaged file is refused, or makes no difference."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from reference import train

import fldiag

KILLED = """
import os, signal, sys
import torch
from reference import train
torch.set_num_threads(1)
events = []
def stop(event):
    events.append(event)
    if len(events) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
train(sys.argv[1], rounds=4, clients__per_round=3, method__name=sys.argv[2], on_event=stop)
"""


def bits(run):
    """All stored weights of a run."""
    stored = [run.checkpoint(r) for r in run.rounds]
    return [t for s in stored for t in (*s.state.values(), s.clients, s.received)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(name, runs, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / name), name]
    folder = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert 0 < fldiag.load(tmp_path / name).done < 4
    run = train(tmp_path / name, rounds=4, clients__per_round=3, method__name=name, resume=True)
    assert run.done == 4 and same(bits(run), bits(runs[name]))
    pd.testing.assert_frame_equal(run.metrics, runs[name].metrics)


@pytest.mark.parametrize("executor", ["processes:2"])
def test_every_executor_gives_the_same_bits(executor, runs, tmp_path):
    options = {"rounds": 2, "clients__per_round": 3, "method__name": "scaffold"}
    run = train(tmp_path / "run", executor=executor, **options)
    assert same(bits(run), bits(runs["scaffold"])[: len(bits(run))])


def flip(part):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[min(int(part * len(content)), len(content) - 1)] ^= 1
        path.write_bytes(bytes(content))

    return damage


DAMAGE = {f"a bit at {part}": flip(part) for part in (0.02, 0.3, 0.55, 0.8, 0.99)} | {
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def more(runs, tmp_path_factory):
    """The run with a memory, and what it is after one more round."""
    folder = tmp_path_factory.mktemp("more")
    shutil.copytree(runs["scaffold"].path, folder / "run")
    return runs["scaffold"].path, bits(go_on(folder / "run"))


def go_on(path):
    options = {"clients__per_round": 3, "method__name": "scaffold", "resume": True}
    return train(path, rounds=5, **options)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_a_run_is_refused_or_makes_no_difference(damage, more, tmp_path):
    path, expected = more
    accepted = []
    for i, file in enumerate(sorted(p for p in path.rglob("*") if p.is_file())):
        copy = shutil.copytree(path, tmp_path / str(i))
        DAMAGE[damage](copy / file.relative_to(path))
        try:
            metrics = fldiag.load(copy).metrics
            run = go_on(copy)
            found = bits(run)
        except fldiag.FldiagError:
            continue
        if not same(found, expected) or len(metrics) != len(fldiag.load(path).metrics):
            accepted.append(str(file.relative_to(path)))
    assert not accepted


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_makes_no_difference(damage, runs, tmp_path):
    ask = {"name": "drift", "representation": False, "cache": tmp_path}
    expected = fldiag.diagnose(runs["fedavg"], **ask)
    for file in [p for p in tmp_path.rglob("*") if p.is_file()]:
        DAMAGE[damage](file)
        pd.testing.assert_frame_equal(fldiag.diagnose(runs["fedavg"], **ask), expected)


WEIGHTS = {
    "nothing": b"",
    "text": b"no weights at all\n" * 20,
    "a zip of something else": b"PK\x05\x06" + bytes(18),
    "a header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": (9).to_bytes(8, "little") + b"{{{{{{{{{",
    "a pickle that runs code": b"cos\nsystem\n(S'echo run > executed'\ntR.",
}


@pytest.mark.parametrize("ending", [".pt", ".safetensors", ".npz"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_file_that_holds_no_weights_is_refused(name, ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"w{ending}").write_bytes(WEIGHTS[name])
    data = torch.randn(6, 4), torch.arange(6) % 3
    with pytest.raises(fldiag.FldiagError):
        checkpoint = fldiag.load(f"w{ending}", model=torch.nn.Linear(4, 3), data=data)
        fldiag.diagnose(checkpoint, "spectrum", k=1)
    assert not (tmp_path / "executed").exists()
