"""Run folders and files of weights: what the seam (tests/store) does not say."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import config
from torch import nn

import fldiag
from fldiag import FldiagError
from fldiag.integrations.recorder import mean
from fldiag.results import files
from fldiag.runs import checkpoint
from fldiag.runs.checkpoint import pack, read_checkpoint
from fldiag.runs.run import LOCK, Run, lock
from fldiag.training import train


def trained(out, method="fedavg", rounds=2, *, resume=False, on_event=None, **options):
    chosen = config(method, rounds=rounds, **options)
    return train.train(chosen, out=out, resume=resume, on_event=on_event)


def refused(words):
    return pytest.raises(FldiagError, match=words)


def names(folder):
    """Its files, but the lock."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*.*")} - {".lock"}


def test_two_writers(tmp_path):
    """Of another process, which has no PyTorch to import, and of the same one; a reader is no writer."""
    code = f"import filelock; filelock.FileLock({str(tmp_path / LOCK)!r}).acquire(blocking=False)"
    with lock(tmp_path):
        with refused("another process"), lock(tmp_path):
            pass
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode and "Timeout" in done.stderr
    with lock(tmp_path):
        pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole") / "run", "scaffold", 3)


@pytest.mark.parametrize("full_at", range(2, 12))
def test_a_full_disk_is_one_error_and_the_run_goes_on(whole, tmp_path, monkeypatch, full_at):
    done = itertools.count(1)

    def fill(real):
        def written(path, *rest, **options):
            if next(done) >= full_at:
                raise FldiagError(f"cannot write {path}: no space left")
            return real(path, *rest, **options)

        return written

    with monkeypatch.context() as disk, refused("no space left"):
        for name in ("write_atomic", "append"):
            disk.setattr(files, name, fill(getattr(files, name)))
        trained(tmp_path / "run", "scaffold", 3)
    run = trained(tmp_path / "run", "scaffold", 3, resume=True)
    a, b = (r.checkpoint().state for r in (run, whole))
    assert run.status == "finished" and all(torch.equal(t, b[n]) for n, t in a.items())


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 2, 3], "line 2"),
        ([1, 0, 2, 3], "line 1 of"),
        ([0, 0, 1, 2, 3], "line 2"),
        # whole lines are missing at the end, which each by itself are intact
        ([0], "lacks rounds"),
        ([], "lacks rounds"),
    ],
)
def test_lines_in_another_order_or_with_a_gap_are_refused_and_nothing_is_removed(
    tmp_path, order, words
):
    run = trained(tmp_path / "run", "scaffold", 3)
    path, before = run.path / "rounds.jsonl", names(run.path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in order))
    with refused(words):
        fldiag.load(run.path)
    with refused(words):
        trained(run.path, "scaffold", 3, resume=True)
    path.unlink()
    with refused(r"rounds\.jsonl"):
        trained(run.path, "scaffold", 3, resume=True)
    (run.path / "run.json").unlink()
    with refused(r"holds rounds and no run\.json"):
        trained(run.path, "scaffold", 3)
    assert names(run.path) == before - {"run.json", "rounds.jsonl"}


def test_resuming_removes_what_a_killed_write_left_and_nothing_else(tmp_path):
    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, rounds=3, on_event=stop)
    with open(tmp_path / "rounds.jsonl", "ab") as file:
        file.write(b'{"line": 3, "ro')
    left = [tmp_path / "rounds" / n for n in ("0003.safetensors", ".0003.safetensors.71.tmp")]
    mine = [tmp_path / "rounds" / "notes.txt", tmp_path / "mine.pt"]
    for file in (*left, *mine):
        file.write_bytes(b"x")
    run = trained(tmp_path, rounds=3, resume=True)
    assert run.rounds == [1, 2, 3] and all(f.exists() for f in mine) and not left[1].exists()
    assert run.checkpoint(3).round == 3


def test_what_a_run_is_not_continued_with(tmp_path):
    """Another config, without a word that it is to go on, without a file, or through a link."""
    run = trained(tmp_path / "run")
    for words, options in {
        r"another config.*train\.lr": {"lr": 0.5},
        r"another config.*rounds": {"rounds": 1},
        "already holds a run": {"resume": False},
    }.items():
        with refused(words):
            trained(run.path, **{"resume": True, **options})
    (run.path / run.round_file(1)).rename(tmp_path / "file")
    with refused("is not there"):
        trained(run.path, rounds=3, resume=True)
    (tmp_path / "file").rename(run.path / run.round_file(1))
    for name in ("rounds", "rounds.jsonl"):
        elsewhere = (run.path / name).rename(tmp_path / name)
        (run.path / name).symlink_to(elsewhere)
        with refused("symbolic link"):
            trained(run.path, rounds=3, resume=True)
        (run.path / name).unlink()
        elsewhere.rename(run.path / name)


def test_pruned_runs_answer_and_get_no_more_rounds(tmp_path):
    run = trained(tmp_path, "scaffold", 3)
    assert len(list((tmp_path / "state").iterdir())) == 1  # the states before are not kept
    metrics, there = run.metrics, set(tmp_path.rglob("*"))
    unneeded = run.unneeded([3])
    assert set(tmp_path.rglob("*")) == there and len(unneeded) == 3
    run.remove(unneeded)
    pruned = Run.open(tmp_path)
    assert pruned.rounds == [3] and pruned.status == "finished"
    assert set(tmp_path.rglob("*")) == there.difference(tmp_path / name for name in unneeded)
    assert pruned.metrics.equals(metrics) and not list((tmp_path / "state").iterdir())
    with refused("is not there"):
        trained(tmp_path, "scaffold", 4, resume=True)


def test_a_round_costs_the_same_however_many_there_were(tmp_path, monkeypatch):
    """Bytes written, and files opened or looked for, with a line of each round."""
    run, done = Run.create(tmp_path, {"method": {}, "rounds": 9}, {}, hash=""), []
    monkeypatch.setattr(files, "append", lambda path, line, at: done.append(len(line)))
    for t in range(1, 2001):
        run._new = {run.round_file(t): "0" * 64}
        run.append(t, [{"round": t, "metric": "loss", "value": 0.5}], state="s", clients=[t % 7])
    assert max(done[1000:]) < max(done[:100]) + 12


STATE, OTHER = (
    dict(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).state_dict()) for _ in range(2)
)


def test_a_checkpoint_comes_back(tmp_path):
    about = {"round": 3, "seed": 0, "config": {"method": {"name": "m"}}, "clients": [1, 5]}
    rows, buffers = torch.randn(2, 7), {"a/b": torch.arange(2), "c": torch.ones(2, 3).half()}
    tensors = {"received": rows[0], "clients": rows, "buffers": buffers}
    path = tmp_path / "0003.safetensors"
    path.write_bytes(pack({"manifest": about}, model=STATE, **tensors))
    c = read_checkpoint(path)
    assert c.manifest == about and c.client_ids == [1, 5] and c.label == "m round 3"
    assert list(c.state) == list(STATE) and list(c.buffers) == list(buffers)
    stored = {name: getattr(c, name) for name in tensors}
    torch.testing.assert_close([c.state, stored], [STATE, tensors], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("content", "key", "expected"),
    [
        ({"state_dict": STATE, "epoch": 3}, None, STATE),
        ({"epoch": 1, "student": STATE}, None, STATE),
        ({"model": STATE, "optimizer": {"state": {0: {"m": torch.ones(9)}}}}, None, STATE),
        ({"ema": OTHER, "model": STATE}, "ema", OTHER),
        ({"ema": OTHER, "model": STATE}, None, "several sets of weights"),
        ({"model": STATE, "lr": np.float64(0.1)}, None, STATE),
        ({"model": STATE}, "ema", "no set of weights ema"),
        ({"epoch": 3}, None, "no set of weights"),
        ({"w": torch.ones(2).to_sparse()}, None, "holds a tensor"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, None, "holds a tensor"),
        ({"w": torch.ones(2, device="meta")}, None, "on meta"),
    ],
)
def test_containers_of_other_programs(tmp_path, content, key, expected):
    torch.save(content, tmp_path / "a.pt")
    if isinstance(expected, str):
        with refused(expected):
            read_checkpoint(tmp_path / "a.pt", key)
    else:
        state = read_checkpoint(tmp_path / "a.pt", key).state
        assert all(torch.equal(state[n], t) for n, t in expected.items())


def test_below_the_safe_torch_a_file_needs_the_users_word(tmp_path, monkeypatch):
    torch.save(STATE, tmp_path / "a.pt")
    monkeypatch.setattr(checkpoint, "SAFE_TORCH", "99.0")
    monkeypatch.delenv(checkpoint.TRUST, raising=False)
    with refused("can harm this machine") as caught:
        fldiag.load(tmp_path / "a.pt")
    assert "--trust-file" in caught.value.remedy
    monkeypatch.setenv(checkpoint.TRUST, "")  # undone at the end
    assert fldiag.load(tmp_path / "a.pt", trust_file=True).state.keys() == STATE.keys()


def test_mean_is_weighted_in_double_and_counters_take_the_largest():
    big, small = torch.tensor([1e8, 1.0]), torch.tensor([1.0, 3.0])
    states = [{"w": big, "n": torch.tensor(3)}, {"w": small, "n": torch.tensor(7)}]
    average = mean(states, [3, 1])
    assert torch.equal(average["w"], ((3 * big.double() + small.double()) / 4).float())
    assert int(average["n"]) == 7
