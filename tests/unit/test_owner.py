"""One process owns a run folder: others are told which, and what a dead one left behind is removed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import config
from test_resume import equal_runs

from fldiag.checkpoint import owner
from fldiag.checkpoint.run import Run
from fldiag.errors import FldiagError
from fldiag.training import rounds

ROOT = Path(__file__).parents[2]


def small(**more):
    return config("scaffold", **{"rounds": 4, "total": 4, "per_round": 2, **more})


def left(folder, **about):
    """A file as an owner leaves it, of this process unless said otherwise."""
    mine = {
        "host": "elsewhere",
        "process": os.getpid(),
        "since": "2026-01-02T03:04:05+00:00",
        "machine": owner.machine(),
        "started": owner.started(os.getpid()),
        "token": "t",
    }
    folder.mkdir(exist_ok=True)
    (folder / owner.NAME).write_text(json.dumps({**mine, **about}))
    return folder / owner.NAME


def test_a_second_one_is_told_who_owns_it(tmp_path):
    with owner.hold(tmp_path / "run"):
        with pytest.raises(
            FldiagError, match=rf"run is being trained by process {os.getpid()} on .+ since 20\d\d-"
        ) as caught:
            rounds.train(small(), out=tmp_path / "run", resume=True)
        assert caught.value.usage
        assert not (tmp_path / "run" / "run.json").exists()
    assert not (tmp_path / "run").exists()  # nothing was written, so nothing is left
    assert rounds.train(small(), out=tmp_path / "run", resume=True).status == "finished"


def test_training_within_training(tmp_path):
    refused = []

    def again(event):
        if event["event"] == "round" and event["round"] == 2:
            with pytest.raises(FldiagError, match="is being trained by") as caught:
                rounds.train(small(), out=tmp_path, resume=True)
            refused.append(caught.value)

    run = rounds.train(small(), out=tmp_path, on_event=again)
    assert run.status == "finished" and refused and not (tmp_path / owner.NAME).exists()


def test_a_run_can_be_read_while_it_is_trained(tmp_path):
    seen = []
    rounds.train(
        small(),
        out=tmp_path,
        on_event=lambda e: seen.append(Run.open(tmp_path).done) if e["event"] == "round" else None,
    )
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "about",
    [
        {"process": 2**22 + 5},
        {"started": "1"},
        {"process": "x", "machine": "other"},
        {"machine": "other"},
    ],
)
def test_what_a_dead_one_left_behind_is_no_owner(about, tmp_path):
    file = left(tmp_path / "run", **about)
    os.utime(file, (time.time() - owner.DEAD - 5,) * 2)
    assert rounds.train(small(), out=tmp_path / "run").status == "finished"
    assert not file.exists()


def test_an_owner_on_another_machine_lives_as_long_as_it_is_touched(tmp_path):
    file = left(tmp_path / "run", machine="other")
    with pytest.raises(
        FldiagError, match=r"by process \d+ on elsewhere since 2026-01-02T03:04:05\+00:00"
    ):
        rounds.train(small(), out=tmp_path / "run")
    os.utime(file, (time.time() - owner.DEAD + 20,) * 2)
    with pytest.raises(FldiagError, match="on elsewhere"):
        rounds.train(small(), out=tmp_path / "run")
    assert [f.name for f in (tmp_path / "run").iterdir()] == [owner.NAME]


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, "\0"])
def test_a_file_that_says_nothing_is_judged_by_its_age(content, tmp_path):
    (tmp_path / owner.NAME).write_text(content)
    with pytest.raises(FldiagError, match=r"process \(unknown\)"):
        rounds.train(small(), out=tmp_path)
    os.utime(tmp_path / owner.NAME, (1, 1))
    assert rounds.train(small(), out=tmp_path).status == "finished"


def test_the_owner_touches_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "BEAT", 0.01)
    with owner.hold(tmp_path):
        os.utime(tmp_path / owner.NAME, (1, 1))
        until = time.monotonic() + 30
        while (tmp_path / owner.NAME).stat().st_mtime < 10 and time.monotonic() < until:
            time.sleep(0.01)
        assert owner.age(tmp_path / owner.NAME) < 30


def test_one_that_was_taken_for_dead_stops_before_it_writes(tmp_path):
    def take(event):
        if event["event"] == "round" and event["round"] == 2:
            left(tmp_path, token="another")

    with pytest.raises(FldiagError, match="was taken over by another process"):
        rounds.train(small(), out=tmp_path, on_event=take)
    assert Run.open(tmp_path).done == 2
    assert (
        json.loads((tmp_path / owner.NAME).read_text())["token"] == "another"
    )  # it is the other one's to remove


def test_two_that_find_a_dead_owner_at_once_do_not_both_get_it(tmp_path, monkeypatch):
    """The second one renames the file of the first, sees it, and puts it back."""
    left(tmp_path, process=2**22 + 5, token="dead")
    alive, first = owner.alive, []

    def slow(file, about):
        found = alive(file, about)
        if not first:
            first.append(None)
            first[0] = owner._take(tmp_path)  # meanwhile
        return found

    monkeypatch.setattr(owner, "alive", slow)
    with pytest.raises(FldiagError, match=f"by process {os.getpid()}"):
        owner._take(tmp_path)
    first[0].confirm()
    first[0].release()
    assert not list(tmp_path.iterdir())


def test_the_next_owner_removes_what_a_killed_one_left_behind(tmp_path):
    whole = rounds.train(small(), out=tmp_path / "whole")

    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        rounds.train(small(), out=out, on_event=stop)
    for name in (
        "rounds/0003.pt",
        "rounds/.0003.pt.77.tmp",
        "state/.server-0003.pt.77.tmp",
        "state/server-0003.pt",
        "metrics/.0003.parquet.77.tmp",
        ".run.json.77.tmp",
        ".owner.json.0a1b2c3d.tmp",
        ".journal.jsonl.77.tmp",
    ):
        (out / name).write_bytes(b"half of it")
    (out / "rounds" / "notes.txt").write_text("mine")
    (out / ".mine.tmp").write_text("mine")
    equal_runs(rounds.train(small(), out=out, resume=True), whole)
    there = {f.relative_to(out).as_posix() for f in out.rglob("*") if f.is_file()}
    assert there == {*Run.open(out).index["files"], "run.json", "rounds/notes.txt", ".mine.tmp"}


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from test_owner import small
from fldiag.training import rounds
rounds.train(small(rounds=10_000), out=sys.argv[1], on_event=lambda e: print(e["event"], flush=True))
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(Path(__file__).parent)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline().startswith("start") and child.stdout.readline().startswith(
        "round"
    )
    with pytest.raises(FldiagError, match=f"is being trained by process {child.pid} on"):
        rounds.train(small(rounds=10_000), out=tmp_path / "run", resume=True)
    child.send_signal(signal.SIGKILL)
    with pytest.raises(KeyboardInterrupt):  # at once, though the killed one was not waited for yet
        for _ in range(50):
            try:
                rounds.train(
                    small(rounds=10_000), out=tmp_path / "run", resume=True, on_event=interrupt
                )
            except FldiagError:
                time.sleep(0.1)
    child.communicate()
    assert Run.open(tmp_path / "run").status == "interrupted"


def interrupt(event):
    if event["event"] == "round":
        raise KeyboardInterrupt
