"""fldiag figures and fldiag list figures, as a user types them."""

import json
from pathlib import Path

import pytest
from commands import invoke

from fldiag.results import machine
from fldiag_papers import make, plan, reported


def test_list():
    found = json.loads(invoke("list", "figures", "--json").stdout)["rows"]
    assert {"fedsol/fig6", "fedsol/table2", "fedalign/table1"} <= {row["name"] for row in found}


@pytest.mark.slow
def test_a_figure_and_the_ledger(tmp_path):
    done = invoke("figures", "fedsol/fig2", "fig12")
    assert done.exit_code == 0, done.output
    assert done.stdout.rstrip().endswith("figures/fedsol/fig12.png")
    for name in (
        "fedsol/fig2.png",
        "fedsol/fig2.pdf",
        "fedsol/fig2.csv",
        "fedsol/fig2.json",
        "ledger.csv",
        "ledger.md",
        "gallery.md",
    ):
        assert (tmp_path / "figures" / name).is_file()
    (tmp_path / "figures" / "ledger.csv").unlink()
    again = invoke("figures", "--ledger", "--json")
    assert again.exit_code == 0, again.output
    names = {Path(path).name for path in json.loads(again.stdout)["paths"]}
    assert {"ledger.csv", "overview.md"} <= names
    assert (tmp_path / "figures" / "ledger.csv").is_file()


def test_dry_run_writes_no_run(tmp_path):
    done = invoke("figures", "fedsol/fig6", "--dry-run", "--json", "--jobs", "1")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and (found["runs"], found["rounds"], found["there"]) == (2, 8, 0)
    assert not list(tmp_path.rglob("run.json"))
    one = invoke("figures", "fedsol/fig6", "--only", "method.name=fedsol", "--dry-run", "--json")
    assert json.loads(one.stdout)["runs"] == 1


def test_emulated_bf16_is_said_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(machine, "has_bf16", lambda: False)
    said = {
        scale: invoke(
            "figures", "fedsol/fig7", "--scale", scale, "--only", "seed=0", "--dry-run"
        ).output
        for scale in ("paper", "paper-bf16")
    }
    assert ["bf16 is emulated" in text for text in said.values()] == [False, True], said
    monkeypatch.setattr(machine, "has_bf16", lambda: True)
    assert machine.emulated("bf16", "cpu") == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fedsol/fig66"], "unknown figure 'fedsol/fig66'"),
        (["fig2x"], "unknown figure"),
        (["--scale", "tiny"], "unknown scale 'tiny'"),
        (["fedsol/fig2", "--jobs", "0"], "jobs = 0"),
        (["fedsol/fig6", "--as-is", "--dry-run"], "nothing to plan"),
        (["fedsol/fig11"], "concept"),
        (
            ["fedsol/fig6", "--only", "method.name=fedsol,ours"],
            "unknown method.name of --only 'ours'",
        ),
    ],
)
def test_wrong_use(arguments, says):
    done = invoke("figures", *arguments)
    assert done.exit_code == 2 and says in done.output


def test_parts_are_all_runs_each_once_also_where_steps_are_recorded(monkeypatch):
    parts = []

    def choose(studies, size, *, only, store, records, **more):
        tasks = plan.make_plan(size, studies, reported.studies().values(), store, records).tasks
        parts.append({core for core, task in tasks.items() if only(task.config)})
        return []

    monkeypatch.setattr(make, "make", choose)
    for part in ("1/2", "2/2"):
        done = invoke("figures", "fedsol/fig3", "--shard", part)
        assert done.exit_code == 0, done.output
    assert [len(part) for part in parts] == [2, 2] and len(set.union(*parts)) == 4


@pytest.mark.slow
def test_as_is_with_nothing_there_says_how_to_train_it():
    done = invoke("figures", "fedsol/fig6", "--as-is", "--out", "figures", "--runs", "runs")
    assert (
        done.exit_code == 1
        and "error: 1 of 1 could not be made" in done.stderr
        and "without --as-is" in done.stderr
    )
    both = invoke(
        "figures", "fedsol/fig6", "fedsol/fig12", "--as-is", "--out", "figures", "--runs", "runs"
    )
    assert (
        both.exit_code == 0
        and "none of their runs is finished: fedsol/fig6" in both.stderr
        and both.stdout.rstrip().endswith("fig12.png")
    )
