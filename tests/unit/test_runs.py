"""Run folders and files of weights: what the seam (tests/store) does not say."""

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
from fldiag.runs.run import Run, folder_size, lock
from fldiag.training import train


def weights(run):
    return torch.cat([t.flatten() for t in run.checkpoint().state.values()])


def stop_after(count):
    def stop(event):
        if event["event"] == "round" and event["round"] == count:
            raise KeyboardInterrupt

    return stop


def test_two_writers(tmp_path):
    """Of another process, and of the same one; a reader is no writer."""
    code = f"from fldiag.runs.run import lock; from pathlib import Path; lock(Path({str(tmp_path)!r})).__enter__()"
    with lock(tmp_path):
        with pytest.raises(FldiagError, match="another process"), lock(tmp_path):
            pass
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode and "another process" in done.stderr
    with lock(tmp_path):
        pass


@pytest.mark.parametrize("full_at", range(2, 12))
def test_a_full_disk_is_one_error_and_the_run_goes_on(tmp_path, monkeypatch, full_at):
    whole = train.train(config("scaffold", rounds=3), out=tmp_path / "whole")
    done, is_full, write, append = 0, True, files.write_atomic, files.append

    def fill(real):
        def written(path, *rest, **options):
            nonlocal done
            done += 1
            if is_full and done >= full_at:
                raise FldiagError(f"cannot write {path}: no space left")
            return real(path, *rest, **options)

        return written

    monkeypatch.setattr(files, "write_atomic", fill(write))
    monkeypatch.setattr(files, "append", fill(append))
    with pytest.raises(FldiagError, match="no space left"):
        train.train(config("scaffold", rounds=3), out=tmp_path / "run")
    is_full = False
    run = train.train(config("scaffold", rounds=3), out=tmp_path / "run", resume=True)
    assert run.status == "finished" and torch.equal(weights(run), weights(whole))


@pytest.mark.parametrize(
    ("order", "words"),
    [([0, 2, 3], "line 2"), ([1, 0, 2, 3], "line 1 of"), ([0, 0, 1, 2, 3], "line 2")],
)
def test_lines_in_another_order_or_with_a_gap_are_refused(tmp_path, order, words):
    run = train.train(config("scaffold", rounds=3), out=tmp_path / "run")
    path = run.path / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(FldiagError, match=words):
        fldiag.load(run.path)


@pytest.mark.parametrize("lines", [0, 1])
def test_rounds_whose_lines_are_gone_are_refused_and_stay(tmp_path, lines):
    """Also where whole lines are missing at the end, which each by itself are intact."""
    run = train.train(config("scaffold", rounds=4), out=tmp_path / "run")
    path = run.path / "rounds.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    before = sorted(run.path.rglob("*"))
    for act in (
        fldiag.load,
        lambda p: train.train(config("scaffold", rounds=4), out=p, resume=True),
    ):
        with pytest.raises(FldiagError, match="lacks rounds"):
            act(run.path)
    path.unlink()
    with pytest.raises(FldiagError, match=r"rounds\.jsonl"):
        train.train(config("scaffold", rounds=4), out=run.path, resume=True)
    (run.path / "run.json").unlink()
    with pytest.raises(FldiagError, match=r"holds rounds and no run\.json"):
        train.train(config("scaffold", rounds=4), out=run.path)
    assert [p for p in before if p.parent.name in ("rounds", "state")] == [
        p for p in sorted(run.path.rglob("*")) if p.parent.name in ("rounds", "state")
    ]


def test_resuming_removes_what_a_killed_write_left_and_nothing_else(tmp_path):
    chosen = config("fedavg", rounds=3)
    with pytest.raises(KeyboardInterrupt):
        train.train(chosen, out=tmp_path, on_event=stop_after(2))
    with open(tmp_path / "rounds.jsonl", "ab") as file:
        file.write(b'{"line": 3, "ro')
    left = [tmp_path / "rounds" / n for n in ("0003.safetensors", ".0003.safetensors.71.tmp")]
    mine = [tmp_path / "rounds" / "notes.txt", tmp_path / "mine.pt"]
    for file in (*left, *mine):
        file.write_bytes(b"x")
    run = train.train(chosen, out=tmp_path, resume=True)
    assert run.rounds == [1, 2, 3] and all(f.exists() for f in mine) and not left[1].exists()
    assert run.checkpoint(3).round == 3


def test_a_run_that_lacks_a_file_is_not_resumed(tmp_path):
    run = train.train(config("fedavg", rounds=2), out=tmp_path)
    (tmp_path / run.round_file(1)).unlink()
    with pytest.raises(FldiagError, match="is not there"):
        train.train(config("fedavg", rounds=3), out=tmp_path, resume=True)


def test_another_config_data_or_partition_is_named(tmp_path):
    train.train(config("fedavg", rounds=2), out=tmp_path)
    with pytest.raises(FldiagError, match=r"another config.*train\.lr"):
        train.train(config("fedavg", rounds=2, lr=0.5), out=tmp_path, resume=True)
    with pytest.raises(FldiagError, match=r"another config.*rounds"):
        train.train(config("fedavg", rounds=1), out=tmp_path, resume=True)
    with pytest.raises(FldiagError, match="already holds a run"):
        train.train(config("fedavg", rounds=2), out=tmp_path)


def test_pruned_runs_answer_and_get_no_more_rounds(tmp_path):
    run = train.train(config("scaffold", rounds=3), out=tmp_path)
    metrics, size = run.metrics, folder_size(tmp_path)
    run.prune([3])
    pruned = Run.open(tmp_path)
    assert pruned.rounds == [3] and pruned.status == "finished" and folder_size(tmp_path) < size
    assert pruned.metrics.equals(metrics) and not list((tmp_path / "state").iterdir())
    with pytest.raises(FldiagError, match="is not there"):
        train.train(config("scaffold", rounds=4), out=tmp_path, resume=True)


def test_nothing_is_written_through_a_link(tmp_path):
    run = train.train(config("fedavg", rounds=1), out=tmp_path / "run")
    (run.path / "rounds").rename(tmp_path / "elsewhere")
    (run.path / "rounds").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FldiagError, match="symbolic link"):
        train.train(config("fedavg", rounds=2), out=run.path, resume=True)


def test_a_round_costs_the_same_however_many_there_were(tmp_path, monkeypatch):
    """Bytes written, and files opened or looked for, with a line of each round."""
    run, done = Run.create(tmp_path, {"method": {}, "rounds": 9}, {}, hash=""), []
    monkeypatch.setattr(files, "append", lambda path, line, at: done.append(len(line)))
    for t in range(1, 2001):
        run._new = {run.round_file(t): "0" * 64}
        run.append(t, [{"round": t, "metric": "loss", "value": 0.5}], state="s", clients=[t % 7])
    assert max(done[1000:]) < max(done[:100]) + 12


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


STATE, OTHER = dict(net().state_dict()), dict(net().state_dict())


def test_a_checkpoint_comes_back(tmp_path):
    shape = {"data": {}, "model": {}, "partition": {}, "clients": {}, "method": {"name": "m"}}
    about = {"round": 3, "seed": 0, "config": shape, "shape": [4], "classes": 3, "clients": [1, 5]}
    rows, buffers = torch.randn(2, 7), {"a/b": torch.arange(2), "c": torch.ones(2, 3).half()}
    content = pack(
        {"manifest": about}, model=STATE, received=rows[0], clients=rows, buffers=buffers
    )
    (tmp_path / "0003.safetensors").write_bytes(content)
    c = read_checkpoint(tmp_path / "0003.safetensors")
    assert c.manifest == about and c.client_ids == [1, 5] and c.label == "m round 3"
    assert list(c.state) == list(STATE) and list(c.buffers) == list(buffers)
    for a, b in [(c.clients, rows), *zip(c.state.values(), STATE.values(), strict=True)]:
        assert torch.equal(a, b) and a.dtype == b.dtype


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
        with pytest.raises(FldiagError, match=expected):
            read_checkpoint(tmp_path / "a.pt", key)
    else:
        state = read_checkpoint(tmp_path / "a.pt", key).state
        assert all(torch.equal(state[n], t) for n, t in expected.items())


def test_below_the_safe_torch_a_file_needs_the_users_word(tmp_path, monkeypatch):
    torch.save(STATE, tmp_path / "a.pt")
    monkeypatch.setattr(checkpoint, "SAFE_TORCH", "99.0")
    monkeypatch.delenv(checkpoint.TRUST, raising=False)
    with pytest.raises(FldiagError, match="can harm this machine") as caught:
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
