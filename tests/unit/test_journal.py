"""The journal of a run that is being trained: it says what run.json will say, its damage costs what comes after it, and it does not grow
dear."""

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from commands import invoke
from helpers import config
from test_resume import equal_runs

from fldiag.errors import FldiagError
from fldiag.report.collect import collect
from fldiag.results import files
from fldiag.runs import journal
from fldiag.runs import run as runs
from fldiag.runs.index import write_index
from fldiag.runs.run import Run
from fldiag.training import rounds


def small(**more):
    return config(
        "scaffold",
        **{"rounds": 5, "total": 4, "per_round": 2, "checkpoint": {"clients": "sampled"}, **more},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return rounds.train(small(), out=tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that was killed after round 4: copied while it was trained."""
    out = tmp_path_factory.mktemp("killed")

    def copy(event):
        if event["event"] == "round" and event["round"] == 4:
            shutil.copytree(out / "run", out / "killed")

    rounds.train(small(), out=out / "run", on_event=copy)
    (out / "killed" / "owner.json").unlink()
    return out / "killed"


@pytest.fixture
def copy(killed, tmp_path):
    return Path(shutil.copytree(killed, tmp_path / "run"))


def test_a_run_that_was_killed_says_all_that_it_stored(copy, whole):
    assert json.loads((copy / "run.json").read_text())["done"] == 1
    run = Run.open(copy)
    assert (run.done, run.rounds, run.status) == (4, [1, 2, 3, 4], "running")
    for name in run.index["files"]:
        run.verified(name)
    there = whole.metrics[whole.metrics["round"] <= 4].drop(columns="run").reset_index(drop=True)
    assert run.metrics.drop(columns="run").equals(there)
    assert "metrics" in collect([copy])[0].tables
    equal_runs(rounds.train(small(), out=copy, resume=True), whole)
    assert not (copy / journal.NAME).exists() and "journal" not in json.loads(
        (copy / "run.json").read_text()
    )


def test_a_run_that_an_earlier_version_left_unfinished_goes_on(copy, whole):
    """Its run.json has no digest; its journal is written as today's."""
    index = json.loads((copy / "run.json").read_text("utf-8"))
    del index["digest"]
    (copy / "run.json").write_text(json.dumps(index, indent=1, sort_keys=True), "utf-8")
    assert Run.open(copy).done == 4
    equal_runs(rounds.train(small(), out=copy, resume=True), whole)
    assert "digest" in json.loads((copy / "run.json").read_text("utf-8"))


def test_an_earlier_fldiag_does_not_take_run_json_for_whole(copy):
    assert json.loads((copy / "run.json").read_text())["schema"] == 3
    assert Run.open(copy).index["schema"] == 1


def test_a_last_line_that_was_cut_off_does_not_count(copy):
    file = copy / journal.NAME
    content = file.read_bytes()
    last = content[:-1].rindex(b"\n") + 1
    for end in {last + 1, last + 40, len(content) - 2, len(content) - 1}:
        file.write_bytes(content[:end])
        assert Run.open(copy).done == 3
    for there in (0, 20):  # the disk had made room, and nothing, or only the end, was there yet
        file.write_bytes(
            content[:last] + bytes(len(content) - last - there) + content[len(content) - there :]
        )
        assert Run.open(copy).done == 3


def test_a_flipped_bit_in_a_line_costs_what_comes_after_it(copy, whole):
    file = copy / journal.NAME
    content = file.read_bytes()
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")][:-1]
    for place in [*range(0, len(content) - 1, 97), *ends]:
        # no NUL: in the last line it stands for a block that never reached the disk
        bit = next(bit for bit in (1 << place % 8, 1) if bit != content[place])
        file.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        line = content[:place].count(b"\n") + 1
        with pytest.warns(
            UserWarning, match=rf"line {line} of .*journal\.jsonl is damaged"
        ) as warned:
            run = Run.open(copy)
        assert run.done == max(line - 1, 1) and run.rounds == list(
            range(1, run.done + 1)
        )  # run.json itself knows of round 1
        assert f"up to round {run.done}," in str(warned[0].message)
        assert set(run.metrics["round"]) == set(run.rounds)
        state = run.checkpoint().state
        assert all(torch.equal(state[n], t) for n, t in whole.checkpoint(run.done).state.items())
    for words in (["runs", copy.parent], ["report", copy, "--out", copy.parent]):
        result = invoke(*words)
        assert (
            result.exit_code == 0
            and result.stderr.count(f"is damaged: the run is read up to round {run.done},") == 1
        ), result.output
    lines = content.splitlines(keepends=True)
    for changed, done in (
        (lines[:1] + lines[2:], 1),
        ([lines[0], lines[2], lines[1], *lines[3:]], 1),
        ([lines[0], lines[1], lines[1], *lines[2:]], 2),
        ([lines[0], *lines[3:]], 1),
    ):
        file.write_bytes(b"".join(changed))
        with pytest.warns(UserWarning, match="is damaged"):
            assert Run.open(copy).done == done


def test_the_journal_cut_off_at_any_byte_is_its_whole_lines(copy):
    file = copy / journal.NAME
    content = file.read_bytes()
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    for end in {*range(0, len(content), 11), *ends, *(end + 1 for end in ends)}:
        file.write_bytes(content[:end])
        assert Run.open(copy).done == max(content[:end].count(b"\n"), 1)


@pytest.mark.filterwarnings("ignore:line . of:UserWarning", "ignore:.*is lost:UserWarning")
@pytest.mark.parametrize("damage", ["bit", "cut"])
@pytest.mark.parametrize("method", ["scaffold", "fedavg"])
def test_a_run_with_a_damaged_journal_goes_on_to_the_same_bits(method, damage, tmp_path):
    """Also where the state of the last round before the damage is gone: from its checkpoint, or again from the beginning."""
    settings = config(method, rounds=4, total=4, per_round=2, checkpoint={"clients": "sampled"})
    copies = iter(range(9))

    def copy(event):
        if event["event"] == "round" and event["round"] == 3:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    uninterrupted = rounds.train(settings, out=tmp_path / "run", on_event=copy)
    (tmp_path / "killed" / "owner.json").unlink()
    content = (tmp_path / "killed" / journal.NAME).read_bytes()
    lines = [0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))]
    for start, end in itertools.pairwise(lines):
        place = (start + end) // 2
        out = Path(shutil.copytree(tmp_path / "killed", tmp_path / f"{next(copies)}"))
        spoilt = (
            content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            if damage == "bit"
            else content[:place]
        )
        (out / journal.NAME).write_bytes(spoilt)
        events = []
        equal_runs(
            rounds.train(settings, out=out, resume=True, on_event=events.append), uninterrupted
        )
        assert on_disk(out) == on_disk(tmp_path / "run")
        last = max(content[:start].count(b"\n"), 1)
        state = (tmp_path / "killed" / "state" / f"server-{last:04d}.pt").is_file()
        assert events[0]["round"] == (last if state or method == "fedavg" else 0)


def test_state_that_somebody_removed_from_a_run_is_not_trained_again_unasked(whole, tmp_path):
    copy = shutil.copytree(whole.path, tmp_path / "copy")
    (copy / "state" / "server-0005.pt").unlink()
    before = on_disk(copy)
    with pytest.raises(
        FldiagError, match=r"server-0005\.pt is listed in run\.json but is not there"
    ):
        rounds.train(small(rounds=6), out=copy, resume=True)
    assert on_disk(copy) == before


def test_lines_that_somebody_wrote_with_the_right_checksum(copy):
    file = copy / journal.NAME
    header = journal.encode_line(
        1, {"journal": json.loads((copy / "run.json").read_text())["journal"]}
    )
    for entry in (
        {},
        {"set": 3, "drop": {}, "rows": []},
        {"set": {"files": 3}, "drop": {}, "rows": []},
        {"set": {}, "drop": {"state": [[]]}, "rows": []},
        {"set": {}, "drop": {}, "rows": [3]},
        {"set": {"done": -1}, "drop": {}, "rows": []},
        {"set": {}, "drop": {"config": None}, "rows": []},
    ):
        line = journal.encode_line(2, entry)
        last = journal.encode_line(3, {"set": {}, "drop": {}, "rows": []})
        file.write_bytes(header + line + last)
        with pytest.raises(FldiagError, match=r"is damaged|is not valid"):
            Run.open(copy)


def test_a_run_of_an_earlier_journal_is_refused(copy):
    write_index(copy, {**files.read_json(copy / "run.json"), "schema": 2})
    with pytest.raises(FldiagError, match="begun under an earlier fldiag"):
        rounds.train(small(), out=copy, resume=True)


def test_a_journal_that_run_json_does_not_name_says_nothing(copy, whole):
    run = Run.open(copy)
    stale = (copy / journal.NAME).read_bytes()
    run.commit()
    (copy / journal.NAME).write_bytes(
        stale
    )  # killed between run.json and the removal of the journal
    assert Run.open(copy).index == run.index and not Run.open(copy).rows
    equal_runs(rounds.train(small(), out=copy, resume=True), whole)
    assert not (copy / journal.NAME).exists()


def test_a_journal_that_run_json_names_and_that_is_another_says_nothing(copy):
    run = Run.open(copy)
    stale = (copy / journal.NAME).read_bytes()
    run.commit(journal=True)
    (copy / journal.NAME).write_bytes(stale)  # killed between run.json and the new journal
    assert Run.open(copy).index == run.index and not Run.open(copy).rows
    (copy / journal.NAME).unlink()
    assert Run.open(copy).index == run.index


@pytest.mark.parametrize("long", [0, 3000])
def test_a_long_journal_is_folded_into_run_json(long, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LONG", long)
    monkeypatch.setattr(Run, "_size", lambda self: 0)
    equal_runs(rounds.train(small(), out=tmp_path / "run"), whole)
    assert {f.name for f in (tmp_path / "run").iterdir()} == {f.name for f in whole.path.iterdir()}


def test_a_round_costs_the_same_however_many_there_were(tmp_path, monkeypatch):
    """Bytes written for a round, apart from its own files: those of round 300 are those of round 10."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    written = []
    write, append = files.write_atomic, files.append
    monkeypatch.setattr(
        files,
        "append",
        lambda path, content, at: written.append(len(content)) or append(path, content, at),
    )
    run = Run.create(tmp_path / "run", small(), b"parts", {"seed": 0})
    monkeypatch.setattr(
        files,
        "write_atomic",
        lambda path, writer, **o: written.append(10**9) or write(path, writer, **o),
    )
    for t in range(1, 301):
        run.states.update({t % 4: {"c": torch.zeros(1)}})
        run.put_state(t, {"w": torch.zeros(1)})
        run.index["done"] = t
        run.index["files"][f"rounds/{t:04d}.pt"] = "0" * 64
        run.add_metrics(
            [
                {
                    "round": t,
                    "metric": "loss",
                    "value": 1 / 3,
                    "scope": "global",
                    "moment": "aggregated",
                }
            ]
        )
        written.clear()
        run.append()
        if t == 10:
            early = sum(written)
    assert sum(written) <= early + 20 < 2000
    assert Run.open(tmp_path / "run").done == 300 and len(Run.open(tmp_path / "run").metrics) == 300


# -- killed at any operation


def operations(counter):
    """Count what changes the disk, and stop the process by ``counter`` before it happens; half of a write happens."""

    def stopping(name):
        real = getattr(os, name)

        def stopped(*given, **options):
            if counter():
                if name == "write":
                    real(given[0], given[1][: len(given[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **options)

        setattr(os, name, stopped)

    for name in (
        "replace",
        "unlink",
        "write",
        "rename",
        "link",
    ):  # a kill before a flush is one before what follows it
        stopping(name)


def train_until(operation, chosen, out):
    """In a child that is killed before its n-th operation. Returns whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def due():
            nonlocal count
            count += 1
            return count == operation

        try:
            operations(due)
            rounds.train(chosen, out=out, resume=True)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["every round", "every second", "folded", "states between"])
def test_killed_before_every_operation_on_the_disk(kind, tmp_path, monkeypatch):
    keep = {
        "every second": {"every": 2},
        "states between": {"every": 3},
    }.get(kind, {})
    chosen = small(rounds=4, checkpoint={"clients": "sampled", **keep})
    if (
        kind == "states between"
    ):  # those of the clients go to the disk also in rounds that are not stored
        monkeypatch.setattr(rounds, "HELD", 0)
    if kind == "folded":
        monkeypatch.setattr(runs, "LONG", 0)
        monkeypatch.setattr(Run, "_size", lambda self: 0)
    whole = rounds.train(chosen, out=tmp_path / "whole")
    operation, tried = 0, 0
    while True:
        operation += 1 if kind == "every round" else 3  # each of them once; every third elsewhere
        out = tmp_path / f"{operation}"
        if not train_until(operation, chosen, out):
            break
        tried += 1
        if (out / "run.json").is_file():
            stopped = Run.open(out)
            for name in stopped.index["files"]:
                stopped.verified(name)
        equal_runs(rounds.train(chosen, out=out, resume=True), whole)
        assert on_disk(out) == on_disk(tmp_path / "whole")
        shutil.rmtree(out)
    assert tried > (40 if kind == "every round" else 8)


def on_disk(run):
    return {f.relative_to(run).as_posix() for f in run.rglob("*") if f.is_file()}
