"""A run that is stopped, at whatever moment and however rudely, and resumed, ends with the bits of one that was not."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import classification, config, setup

from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.runs.run import Run
from fldiag.training import rounds, storing

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from fldiag import config
from fldiag.training import rounds, storing
sys.path.insert(0, sys.argv[2])
from test_resume import killed
rounds.train(killed(), out=sys.argv[1], resume=True, on_event=lambda e: print(e["event"], e.get("round"), flush=True))
"""


def killed():
    """SCAFFOLD on digits: state on the server and on every client."""
    return config(
        "scaffold",
        rounds=40,
        total=6,
        per_round=3,
        data="digits",
        model_options={"hidden": (16,)},
        epochs=1,
        batch_size=32,
        precision="fp32",
        momentum=0.9,
        checkpoint={"every": 2, "clients": "sampled"},
    )


def vector(run, round=None):
    return torch.cat([v.flatten() for v in run.checkpoint(round).state.values()])


def equal_runs(a, b):
    assert a.status == b.status == "finished"
    assert a.rounds == b.rounds
    for r in a.rounds:
        one, other = a.checkpoint(r), b.checkpoint(r)
        assert all(torch.equal(one.state[k], other.state[k]) for k in other.state)
        assert (one.clients is None) == (other.clients is None)
        assert one.clients is None or torch.equal(one.clients, other.clients)
    assert a.metrics.drop(columns="run").equals(b.metrics.drop(columns="run"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return rounds.train(killed(), out=tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(uninterrupted, tmp_path):
    chance, out, kills = random.Random(0), tmp_path / "run", 0
    for _ in range(5):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }
        child = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(out), str(Path(__file__).parent)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        first = child.stdout.readline()
        assert first.startswith("start"), child.stderr.read()
        for _ in range(chance.randrange(8)):
            child.stdout.readline()
        time.sleep(
            chance.uniform(0, 0.04)
        )  # anywhere in a round, also while files are being written
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += child.returncode == -signal.SIGKILL
    assert kills >= 4
    assert Run.open(out).status in ("running", "finished")
    resumed = rounds.train(killed(), out=out, resume=True)
    equal_runs(resumed, uninterrupted)


SMALL = {"rounds": 4, "total": 4, "per_round": 2}


def small(**more):
    return config("scaffold", **{**SMALL, **more})


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """The same run uninterrupted, by how often it is stored."""
    return {
        n: rounds.train(
            small(checkpoint={"every": n}), out=tmp_path_factory.mktemp("whole") / str(n)
        )
        for n in (1, 3)
    }


@pytest.mark.parametrize(
    ("every", "name"),
    [
        (1, "rounds/0003.pt"),
        (1, "state/server-0003.pt"),
        (1, "journal.jsonl"),
        (1, "state/clients-00000003.safetensors"),
        (3, "state/clients-00000003.safetensors"),
        (3, "rounds/0003.pt"),
        (3, "state/server-0003.pt"),
        (3, "metrics/0003.parquet"),
        (3, "run.json"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt, FldiagError("disk full", "free some space")],
    ids=["ctrl-c", "full"],
)
@pytest.mark.slow
def test_stopped_while_a_file_is_written(every, name, error, tmp_path, monkeypatch, never_stopped):
    """run.json and journal must never count a round whose files are not all there. The first stored round writes run.json
    whole (here that of every = 3), and the later ones a line of the journal."""
    chosen, whole = small(checkpoint={"every": every}), never_stopped[every]
    seen = []

    def breaking(write):
        def broken(path, *given, **options):
            seen.append(path.name)
            last = any("0003." in n for n in seen)  # round 3 is being stored
            if (
                last
                and path.relative_to(tmp_path / "cut").as_posix() == name
                and "broken" not in seen
            ):
                seen.append("broken")
                raise error
            return write(path, *given, **options)

        return broken

    monkeypatch.setattr(rounds, "HELD", 0)  # every round's states go to the disk
    for how in ("write_atomic", "append"):
        monkeypatch.setattr(files, how, breaking(getattr(files, how)))
    with pytest.raises((KeyboardInterrupt, FldiagError)):
        rounds.train(chosen, out=tmp_path / "cut")
    monkeypatch.undo()
    stopped = Run.open(tmp_path / "cut")
    assert stopped.done == (2 if every == 1 else 0)
    assert stopped.status in ("running", "interrupted")
    assert "broken" in seen
    for file in stopped.index["files"]:
        stopped.verified(file)
    equal_runs(rounds.train(chosen, out=tmp_path / "cut", resume=True), whole)


def test_what_a_killed_write_left_behind_is_cleaned_up(tmp_path):
    chosen = small()
    whole = rounds.train(chosen, out=tmp_path / "whole")

    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(chosen, out=tmp_path / "cut", on_event=stop)
    stray = tmp_path / "cut" / "state" / "clients-00000003.safetensors"
    stray.write_bytes(b"half a file of round 3")
    equal_runs(rounds.train(chosen, out=tmp_path / "cut", resume=True), whole)
    for run in ("cut", "whole"):
        listed = Run.open(tmp_path / run).index["files"]
        on_disk = {
            f.relative_to(tmp_path / run).as_posix()
            for f in (tmp_path / run).rglob("*")
            if f.is_file()
        }
        assert on_disk == {*listed, "run.json"}


def test_only_the_newest_state_is_kept(tmp_path):
    run = rounds.train(small(rounds=6), out=tmp_path)
    files = [f.name for f in (tmp_path / "state").iterdir()]
    assert files.count("server-0006.pt") == 1
    assert len(files) == 1 + len(run.index["state"]) - 1
    assert all(
        torch.equal(run.states[i][k], v)
        for i, s in Run.open(tmp_path).states.items()
        for k, v in s.items()
    )


def test_interrupted_after_the_last_round_is_finished(tmp_path):
    def stop(event):
        if event["event"] == "round" and event["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(small(), out=tmp_path, on_event=stop)
    assert Run.open(tmp_path).status == "finished"
    assert rounds.train(small(), out=tmp_path, resume=True).status == "finished"


def test_resuming_a_finished_run_returns_it_untouched(tmp_path):
    run = rounds.train(small(), out=tmp_path)
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.is_file()}
    again = rounds.train(small(), out=tmp_path, resume=True)
    assert torch.equal(vector(again), vector(run))
    assert before == {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.is_file()}


def test_resume_without_a_run_starts_one(tmp_path):
    run = rounds.train(small(), out=tmp_path / "new", resume=True)
    equal_runs(run, rounds.train(small(), out=tmp_path / "other"))


def stopped_after_a_round(out, data):
    def stop(event):
        if event["event"] == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(small(), out=out, on_event=stop, setup=setup(small(), data))


def test_resuming_on_other_data_or_another_partition_is_refused(tmp_path):
    dataset, parts = classification((10, 9, 8, 7))
    stopped_after_a_round(tmp_path, (dataset, parts))
    other, _ = classification((10, 9, 8, 7), seed=1)
    with pytest.raises(FldiagError, match="the data set 'random' is not the one"):
        rounds.train(small(), out=tmp_path, resume=True, setup=setup(small(), (other, parts)))
    with pytest.raises(FldiagError, match="the partition is not the one"):
        rounds.train(
            small(), out=tmp_path, resume=True, setup=setup(small(), (dataset, parts[::-1]))
        )
    assert (
        rounds.train(
            small(), out=tmp_path, resume=True, setup=setup(small(), (dataset, parts))
        ).status
        == "finished"
    )


def test_a_damaged_state_is_refused_by_name(tmp_path):
    def stop(event):
        if event["event"] == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(small(), out=tmp_path, on_event=stop)
    state = tmp_path / "state" / "server-0001.pt"
    state.write_bytes(state.read_bytes()[:-20])
    with pytest.raises(FldiagError, match=r"server-0001\.pt is not the file this run wrote"):
        rounds.train(small(), out=tmp_path, resume=True)


def test_every_stretch_of_a_run_says_what_trained_it(tmp_path, monkeypatch):
    """Another processor rounds otherwise: what took a run up again must show, and what is in the other stretches must stay."""

    def stop(event):
        if event.get("round") == 3:
            raise KeyboardInterrupt

    whole = config(rounds=5, data="digits", model_options={"hidden": (4,)})
    with pytest.raises(KeyboardInterrupt):
        rounds.train(whole, out=tmp_path / "run", on_event=stop)
    monkeypatch.setattr(storing, "capability", lambda: "OTHER")
    found = rounds.train(whole, out=tmp_path / "run", resume=True).index["segments"]
    assert [(s["first_round"], s["last_round"]) for s in found] == [(1, 3), (4, 5)]
    assert [s["capability"] for s in found] == [torch.backends.cpu.get_cpu_capability(), "OTHER"]
    assert all(
        s["commit"] and s["torch"] and s["machine"] and s["threads"] and s["seconds"] > 0
        for s in found
    )
