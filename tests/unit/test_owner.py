"""One process owns a run folder: others are told which, and what a dead one left behind is removed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import config
from test_resume import equal_runs

from fldiag.errors import FldiagError
from fldiag.runs import owner
from fldiag.runs.run import Run
from fldiag.training import rounds

ROOT = Path(__file__).parents[2]


def small(**more):
    return config("scaffold", **{"rounds": 4, "total": 4, "per_round": 2, **more})


def leave_behind(folder, content='{"process": 1}'):
    """Files as a killed owner leaves them: nobody locks them."""
    folder.mkdir(exist_ok=True)
    (folder / owner.NAME).write_text(content)
    (folder / owner.LOCK).touch()


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


@pytest.mark.parametrize("content", ['{"process": 1}', "", "{", "[]", "[" * 100_000, "\0"])
def test_what_a_dead_one_left_behind_is_no_owner(content, tmp_path):
    leave_behind(tmp_path / "run", content)
    assert rounds.train(small(), out=tmp_path / "run").status == "finished"
    assert not list((tmp_path / "run").glob("owner.*"))


def test_an_owner_whose_file_cannot_be_read_is_still_one(tmp_path):
    with owner.hold(tmp_path):
        (tmp_path / owner.NAME).write_text("{")
        with pytest.raises(FldiagError, match=r"process \(unknown\)"):
            rounds.train(small(), out=tmp_path)


def test_one_whose_folder_was_replaced_stops_before_it_writes(tmp_path):
    def replace(event):
        if event["event"] == "round" and event["round"] == 2:
            leave_behind(tmp_path)

    with pytest.raises(FldiagError, match="was removed or moved"):
        rounds.train(small(), out=tmp_path, on_event=replace)
    assert Run.open(tmp_path).done == 2
    assert (tmp_path / owner.NAME).exists()  # it is the other one's to remove


def test_a_copy_of_the_process_does_not_release_the_folder(tmp_path):
    with owner.hold(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(FldiagError, match=f"by process {os.getpid()}"), owner.hold(tmp_path):
            pass


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
        ".owner.json.77.tmp",
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
