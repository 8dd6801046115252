"""End to end at the smoke scale, on a part: made, made again to the byte, stopped and continued."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from fldiag.data import load
from fldiag.errors import FldiagError
from fldiag.runs.history import History
from fldiag.runs.run import Run
from fldiag_papers import (
    gather,
    ledger,
    make,
    pictures,
    plan,
    questions,
    records,
    reported,
    workers,
)
from fldiag_papers.caption import without_folders
from fldiag_papers.lines import lines, means
from fldiag_papers.scales import scale
from fldiag_papers.study import Study, Trial, curve, diagnostic, seconds

SMOKE = scale("smoke")
ENDS = (".json", ".csv", ".pdf", ".png")


def some(*names):
    return [reported.studies()[n] for n in names]


def shorter(name, count):
    """A study with its first trials only."""
    study = reported.studies()[name]
    return replace(study, trials=study.trials[:count])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder of figures, folder of runs, what was made)."""
    root = tmp_path_factory.mktemp("figures")
    studies = [*some("fedsol/fig2", "fedsol/fig12", "fedsol/fig6"), shorter("fedsol/table2", 4)]
    return (
        root / "out",
        root / "runs",
        make.make(studies, SMOKE, out=root / "out", store=root / "runs", strict=True),
    )


@pytest.mark.slow
def test_every_study_has_its_files(world):
    out, _, made = world
    for done in made:
        assert done.error == "" and {f.suffix for f in done.files} >= set(ENDS)
        assert all(f.is_file() and f.parent == out / done.study.paper for f in done.files)
    assert (out / "fedsol" / "table2.md").is_file()


@pytest.mark.slow
def test_the_same_again_to_the_byte_without_training(world, monkeypatch):
    out, runs, made = world
    before = {f: f.read_bytes() for m in made for f in m.files}
    monkeypatch.setattr(workers.rounds, "train", lambda *a, **k: pytest.fail("trained again"))
    again = make.make([m.study for m in made], SMOKE, out=out, store=runs, strict=True)
    assert {f: f.read_bytes() for m in again for f in m.files} == before


@pytest.mark.slow
def test_trained_again_elsewhere_the_csv_is_the_same(world, tmp_path):
    out, _, made = world
    study = next(m.study for m in made if m.study.id == "fig6")
    make.make([study], SMOKE, out=tmp_path / "out", store=tmp_path / "runs", strict=True)
    for name in ("fig6.csv", "fig6.png", "fig6.pdf"):
        assert (tmp_path / "out" / "fedsol" / name).read_bytes() == (
            out / "fedsol" / name
        ).read_bytes()


@pytest.mark.slow
def test_the_json_says_what_was_done(world):
    about = json.loads((world[0] / "fedsol" / "fig6.json").read_text())
    assert (
        about["scale"] == "smoke"
        and "4 instead of 300 rounds" in about["caption"]
        and "digits-500 instead of cifar10" in about["caption"]
    )
    assert {r["config"]["method"]["name"] for r in about["runs"].values()} == {
        "fedavg",
        "fedsol",
    } and about["threads"] == 1
    assert str(world[1]) not in (world[0] / "fedsol" / "fig6.json").read_text(), (
        "no paths of this machine"
    )
    assert "cores" in about["machine"] and about["failed"] == about["left_out"] == []


@pytest.mark.slow
def test_numbers_of_a_table_are_those_of_the_runs(world):
    out, runs, _ = world
    table = pd.read_csv(out / "fedsol" / "table2.csv", keep_default_na=False, na_values=[""])
    cell = {"setting": "partition=sharding;shards=5", "method": "fedavg", "data": "cifar10"}
    mine = table[(table[list(cell)] == pd.Series(cell)).all(axis=1)]
    assert dict(zip(mine["origin"], mine["value"], strict=True))["reported"] == 70.96
    hit = next(
        h
        for h in json.loads((out / "fedsol" / "table2.json").read_text())["measured"]
        if all(h[k] == v for k, v in cell.items())
    )
    (path,) = runs.glob(f"*-{hit['runs'][0]}-*")
    metrics = Run.open(path).metrics
    assert (
        hit["value"]
        == pytest.approx(100 * metrics.loc[metrics["metric"] == "accuracy", "value"].iloc[-1])
        and hit["seeds"] == 1
    )
    assert Run.open(path).config.partition.shards == 5


@pytest.mark.slow
def test_the_ledger_of_what_was_made(world):
    found = ledger.rows(world[0])
    mine = found[(found["id"] == "table2") & found["measured"].notna()]
    assert (
        len(mine) == 4
        and set(mine["agrees"]) == {"other data"}
        and set(mine["trained_on"]) == {"digits-500"}
    )
    assert set(
        found.loc[
            (found["paper"] == "fedsol") & found["id"].isin(["fig2", "fig6", "fig12"]), "status"
        ]
    ) == {"drawn"}
    assert found.loc[found["id"] == "fedsol-divergence", "status"].iloc[0].startswith("undecided")


@pytest.mark.parametrize(
    "asked, where", [((curve(),), "processes:2"), ((curve(), seconds()), "serial")]
)
def test_a_single_run_has_its_clients_trained_by_the_executor_unless_it_is_timed(
    tmp_path, monkeypatch, asked, where
):
    study = Study(
        "a",
        "somewhere",
        "words",
        trials=(Trial("fedsol-cifar10-lda0.1", "fedavg"),),
        ask=asked,
        draw=None,
        paper="test",
        id="a",
    )
    told, train = [], workers.rounds.train

    def noted(*args, executor, **named):
        told.append(str(executor))
        return train(*args, **named)

    def answered(subject, name, options):
        told.append(str(subject.executor))
        return answer(subject, name, options)

    answer = questions.answer
    monkeypatch.setattr(workers.rounds, "train", noted)
    monkeypatch.setattr(questions, "answer", answered)
    make.make(
        [study],
        SMOKE,
        out=tmp_path / "out",
        store=tmp_path / "runs",
        executor="processes:2",
        draw=False,
        strict=True,
    )
    (run,) = (tmp_path / "runs").glob("*/run.json")
    assert told == [where, *["processes:2"] * len(asked)] and (
        run.parent / questions.CLOCK
    ).is_file() == (where == "serial")


@pytest.mark.slow
def test_stopped_and_continued_is_as_if_never_stopped(world, tmp_path):
    study, seen = next(m.study for m in world[2] if m.study.id == "fig6"), []

    def stop(done, total, text):
        seen.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make.make([study], SMOKE, out=tmp_path / "out", store=tmp_path / "runs", progress=stop)
    (half,) = (tmp_path / "runs").glob("*/run.json")
    assert (Run.open(half.parent).status, Run.open(half.parent).done) == ("interrupted", 2)
    trained = []
    make.make(
        [study],
        SMOKE,
        out=tmp_path / "out",
        store=tmp_path / "runs",
        progress=lambda *a: trained.append(a[0]),
        strict=True,
    )
    assert (tmp_path / "out" / "fedsol" / "fig6.csv").read_bytes() == (
        world[0] / "fedsol" / "fig6.csv"
    ).read_bytes()


@pytest.mark.slow
def test_a_figure_is_written_when_its_last_run_is_done(world, tmp_path):
    """What is ready when somebody stops is there."""

    def stop(text, done, total):
        if done == total:
            raise KeyboardInterrupt

    studies = [shorter("fedsol/table2", 1), shorter("fedsol/fig6", 2), *some("fedsol/fig12")]
    with pytest.raises(KeyboardInterrupt):
        make.make(studies, SMOKE, out=tmp_path / "out", store=tmp_path / "runs", on_done=stop)
    found = {f.name for f in (tmp_path / "out" / "fedsol").glob("*.png")}
    assert "fig12.png" in found and len(found) == 2, (
        "the figure whose run was the last is not there"
    )


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes:2", "dask"])
def test_several_at_a_time_give_the_same(world, tmp_path, executor):
    study = next(m.study for m in world[2] if m.study.id == "fig6")
    told, rounds = [], []
    make.make(
        [study],
        SMOKE,
        out=tmp_path / "out",
        store=tmp_path / "runs",
        executor=executor,
        on_done=lambda *a: told.append(a),
        progress=lambda *a: rounds.append(a[0]),
        strict=True,
    )
    assert (tmp_path / "out" / "fedsol" / "fig6.csv").read_bytes() == (
        world[0] / "fedsol" / "fig6.csv"
    ).read_bytes()
    assert [(done, total) for _, done, total in told] == [(1, 2), (2, 2)] and max(rounds) > 0


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(world, tmp_path, monkeypatch):
    train = workers.rounds.train
    monkeypatch.setattr(
        workers.rounds,
        "train",
        lambda config, **k: train(config, **k) if config.method.name == "fedavg" else 1 / 0,
    )
    study = next(m.study for m in world[2] if m.study.id == "fig6")
    told = []
    (made,) = make.make(
        [study], SMOKE, out=tmp_path, store=tmp_path / "runs", on_done=lambda *a: told.append(a[0])
    )
    assert made.error == "" and any("ZeroDivisionError" in t for t in told)
    (failed,) = json.loads((tmp_path / "fedsol" / "fig6.json").read_text())["failed"]
    assert failed["method"] == "fedsol" and "ZeroDivisionError" in failed["why"]
    assert set(pd.read_csv(tmp_path / "fedsol" / "fig6.csv")["label"]) == {"FedAvg"}


def test_a_smaller_scale_does_not_replace_a_larger_one(world, tmp_path):
    study = some("fedsol/fig12")[0]
    (tmp_path / "fedsol").mkdir()
    (tmp_path / "fedsol" / "fig12.json").write_text('{"scale": "small"}')
    assert make.target(tmp_path, study, SMOKE) == tmp_path / "smoke" / "fedsol" / "fig12"
    assert make.target(tmp_path, study, scale("paper")) == tmp_path / "fedsol" / "fig12"
    assert (
        make.target(tmp_path, study, scale("paper"), False)
        == tmp_path / "paper" / "fedsol" / "fig12"
    )
    assert (
        make.target(tmp_path, study, scale("small"), False)
        == tmp_path / "small" / "fedsol" / "fig12"
    )
    (tmp_path / "fedsol" / "fig12.json").write_text(
        '{"scale": "small", "left_out": [{"why": "not finished yet"}]}'
    )
    assert make.target(tmp_path, study, scale("small"), False) == tmp_path / "fedsol" / "fig12"


def test_reduced_data_are_balanced_and_the_first_of_each_class(world):
    kept, whole = load("digits-500", root=world[1] / "data"), load("digits")
    assert len(kept.train_y) == 500 and set(np.bincount(kept.train_y.numpy())) == {50}
    first = whole.train_x[(whole.train_y == 3).nonzero()[:50, 0]]
    assert (kept.train_x[kept.train_y == 3].float() == first.float()).all()


def test_left_out_everywhere_is_said(tmp_path):
    study = replace(some("fedsol/fig6")[0], trials=(Trial("fedsol-svhn-lda0.1", "fedavg"),))
    small = plan.make_plan(scale("small"), [study], [], tmp_path)
    with pytest.raises(FldiagError, match="svhn is not part of the scale small"):
        gather.table_of(study, small, {})


def test_what_a_scale_has_not_is_said_beside_what_it_has(world, tmp_path):
    """One column of a table left out: the others are drawn, and caption, json and ledger say why."""
    mine, theirs = (
        shorter("fedsol/table2", 1),
        Trial("fedsol-svhn-lda0.1", "fedavg", data="svhn", setting="partition=lda;alpha=0.1"),
    )
    without = replace(SMOKE, data={"cifar10": "digits", "mnist": "digits"})
    (made,) = make.make(
        [replace(mine, trials=(*mine.trials, theirs))], without, out=tmp_path, store=world[1]
    )
    assert made.error == ""
    about = json.loads((tmp_path / "fedsol" / "table2.json").read_text())
    assert [(hit["data"], hit["why"]) for hit in about["left_out"]] == [
        ("svhn", "svhn is not part of the scale smoke")
    ]
    assert about["caption"].endswith("Left out: svhn is not part of the scale smoke.")
    assert (tmp_path / "fedsol" / "table2.md").read_text().startswith(about["caption"])
    assert set(
        ledger.rows(tmp_path).query(
            "id == 'table2' and data == 'svhn' and method == 'fedavg' and setting == @theirs.setting"
        )["status"]
    ) == {"not run: svhn is not part of the scale smoke"}


@pytest.mark.slow
def test_as_is_nothing_is_trained_and_what_is_there_is_drawn(world, tmp_path, monkeypatch):
    monkeypatch.setattr(workers.rounds, "train", lambda *a, **k: pytest.fail("trained"))
    study = next(m.study for m in world[2] if m.study.id == "fig6")
    (path,) = (
        p
        for p in world[1].glob("digits-500-fedsol-*")
        if "lda" in Run.open(p).config.partition.kind
    )
    shutil.copytree(world[1] / "data", tmp_path / "runs" / "data")
    shutil.copytree(path, tmp_path / "runs" / path.name)
    (made,) = make.make(
        [study], SMOKE, out=tmp_path, store=tmp_path / "runs", only=lambda config: False
    )
    about = json.loads((tmp_path / "fedsol" / "fig6.json").read_text())
    assert (
        made.error == ""
        and about["caption"].endswith("Left out: 1 of 2 runs, not finished yet.")
        and about["failed"] == []
    )
    assert [hit["label"] for hit in about["left_out"]] == ["FedAvg"] and set(
        pd.read_csv(tmp_path / "fedsol" / "fig6.csv")["label"]
    ) == {"FedSOL"}
    (made,) = make.make(
        [study], SMOKE, out=tmp_path / "none", store=tmp_path / "empty", only=lambda config: False
    )
    assert (
        made.is_absent
        and made.error == "none of its runs is finished"
        and not list((tmp_path / "none").rglob("*.csv"))
    )
    (made,) = make.make(
        some("fedsol/fig12"),
        SMOKE,
        out=tmp_path / "none",
        store=tmp_path / "empty",
        only=lambda config: False,
    )
    assert made.error == ""  # it needs no run


def test_a_part_at_a_larger_scale_lies_beside_the_whole_at_a_smaller_one(world, tmp_path):
    """One run of six is there: it is drawn, the whole one stays, and caption, command and statements say what is missing."""
    (path,) = (
        p
        for p in world[1].glob("digits-500-fedavg-*")
        if "lda" in Run.open(p).config.partition.kind
    )
    for folder in ("data", path.name):
        shutil.copytree(world[1] / folder, tmp_path / "runs" / folder)
    shutil.copytree(
        world[0] / "fedsol",
        tmp_path / "out" / "fedsol",
        ignore=lambda _, names: [n for n in names if "fig6" not in n],
    )
    before = (tmp_path / "out" / "fedsol" / "fig6.png").read_bytes()
    (made,) = make.make(
        some("fedsol/fig6"),
        replace(SMOKE, name="small"),
        out=tmp_path / "out",
        store=tmp_path / "runs",
        only=lambda config: False,
    )
    stem = tmp_path / "out" / "small" / "fedsol" / "fig6"
    assert made.error == "" and made.files[-1] == stem.with_suffix(".png")
    assert (tmp_path / "out" / "fedsol" / "fig6.png").read_bytes() == before
    about = json.loads(stem.with_suffix(".json").read_text())
    assert about["caption"].endswith(
        "1 seed. Finished so far, 1 of 2: FedAvg. Left out: 5 of 6 runs, not finished yet."
    )
    assert [hit["label"] for hit in about["left_out"]] == ["FedAvg", "FedSOL"], (
        "two of three seeds, and all: each once"
    )
    text = ledger.write(tmp_path / "out")[1].read_text()
    assert (
        text.index("small/fedsol/fig6.png") < text.index("](fedsol/fig6.png")
        and "--only method.name=fedavg" in text
    )
    found = (
        ledger.rows(tmp_path / "out")
        .query("kind == 'claim' and id == 'fedsol-divergence'")
        .set_index("scale")
    )
    assert found.loc["small", "status"] == "not decided" and "FedSOL" in found.loc["small", "note"]
    drawn = [m.files[-1] for m in make.redraw(some("fedsol/fig6"), tmp_path / "out")]
    assert drawn == [tmp_path / "out" / "fedsol" / "fig6.png", stem.with_suffix(".png")]


@pytest.mark.slow
def test_a_record_stands_for_a_run_whose_weights_are_gone(world, tmp_path, monkeypatch):
    """Made from records alone, a figure is the same; a question that looks at weights is asked of a new run, never of a record."""
    study = next(m.study for m in world[2] if m.study.id == "fig6")
    runs, kept = tmp_path / "runs", tmp_path / "records"
    shutil.copytree(world[1], runs)
    with monkeypatch.context() as now:
        now.setattr(workers.rounds, "train", lambda *a, **k: pytest.fail("trained"))
        make.make(
            [study],
            SMOKE,
            out=tmp_path / "first",
            store=runs,
            records=kept,
            only=lambda config: False,
        )
        for folder in runs.glob("digits-500-*"):
            shutil.rmtree(folder)
        make.make([study], SMOKE, out=tmp_path / "again", store=runs, records=kept, strict=True)
    for name in ("fig6.csv", "fig6.json", "fig6.png"):
        assert (tmp_path / "again" / "fedsol" / name).read_bytes() == (
            world[0] / "fedsol" / name
        ).read_bytes(), name
    (path,) = kept.glob("digits-500-fedavg-*")
    record = Run.open(path)
    assert (
        record.is_record
        and record.rounds == []
        and record.config.data.root is None
        and len(record.metrics)
    )
    assert (
        not list(path.rglob("*.pt"))
        and sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) < 200_000
    )
    with pytest.raises(FldiagError, match="record of a run"):
        record.checkpoint()
    with pytest.raises(FldiagError, match="record of a run"):
        History.of(record)
    with (
        monkeypatch.context() as now,
        pytest.warns(UserWarning, match="no record of .* is kept: no room"),
    ):
        now.setattr(records, "keep", lambda *a: (_ for _ in ()).throw(FldiagError("no room")))
        records.keep_records(SimpleNamespace(records=kept), [path])
    monkeypatch.setenv("FLDIAG_DATA", str(runs / "data"))
    with pytest.raises(FldiagError, match=r"record of a run.*training cannot go on"):
        workers.rounds.train(record.config.replace(rounds=9), out=path, resume=True)
    before = {f: f.read_bytes() for f in (path / "answers").iterdir()}
    plain = replace(study, ask=(curve(),), pick={}, draw=lambda *tables: Figure())
    with monkeypatch.context() as now:
        now.setattr(workers.rounds, "train", lambda *a, **k: pytest.fail("trained"))
        make.make(
            [plain], SMOKE, out=tmp_path / "curve", store=runs, records=kept, strict=True
        )  # metrics: asked of the record
    asked = replace(plain, ask=(diagnostic("spectrum", k=1),))
    make.make(
        [asked], SMOKE, out=tmp_path / "spectrum", store=runs, records=kept, strict=True
    )  # weights: trained again
    assert len(list(runs.glob("digits-500-fedavg-*"))) == 1
    assert before.items() <= {f: f.read_bytes() for f in (path / "answers").iterdir()}.items(), (
        "what was answered before stays"
    )


@pytest.mark.slow
def test_only_the_chosen_runs_are_trained(tmp_path):
    study = some("fedsol/fig6")[0]
    tasks = plan.make_plan(SMOKE, [study], [], tmp_path).tasks.values()
    chosen = plan.only(["method.name=fedavg", "partition.kind=lda"], [t.config for t in tasks])
    (made,) = make.make([study], SMOKE, out=tmp_path, store=tmp_path / "runs", only=chosen)
    trained = [Run.open(p.parent).config for p in (tmp_path / "runs").glob("*/run.json")]
    assert made.error == "" and {c.method.name for c in trained} == {"fedavg"}
    assert len(trained) == sum(t.config.method.name == "fedavg" for t in tasks) < len(tasks)
    (again,) = make.make([study], SMOKE, out=tmp_path, store=tmp_path / "runs")
    assert (
        again.error == "" and "not finished" not in (tmp_path / "fedsol" / "fig6.json").read_text()
    )
    (part,) = make.make([study], SMOKE, out=tmp_path, store=tmp_path / "empty", only=chosen)
    assert part.files[-1] == tmp_path / "smoke" / "fedsol" / "fig6.png"  # what is whole stays
    (entry,) = ledger.read_figures(tmp_path)
    assert entry.file == tmp_path / "fedsol" / "fig6.json"


@pytest.mark.slow
def test_one_seed_of_several_is_told_as_one(tmp_path):
    """Caption, json and numbers name the runs that are there."""
    study = replace(shorter("fedsol/table2", 2), seeds=2)
    twice = replace(SMOKE, name="small", seeds=2)
    tasks = plan.make_plan(twice, [study], [], tmp_path / "runs").tasks
    (made,) = make.make(
        [study],
        twice,
        out=tmp_path,
        store=tmp_path / "runs",
        only=plan.only(["seed=1"], [t.config for t in tasks.values()]),
    )
    about = json.loads((tmp_path / "fedsol" / "table2.json").read_text())
    assert made.error == "" and about["seeds"] == [1] and "1 seed." in about["caption"]
    assert about["caption"].endswith(
        f"Left out: {len(tasks) // 2} of {len(tasks)} runs, not finished yet."
    )
    there = {run["hash"] for run in about["runs"].values()}
    assert {h for hit in about["measured"] for h in hit["runs"]} == there and len(there) == len(
        tasks
    ) // 2
    for path in (tmp_path / "runs").glob("*/answers"):
        shutil.rmtree(path)  # finished, and asked nothing
    (made,) = make.make(
        [study], twice, out=tmp_path / "again", store=tmp_path / "runs", only=lambda config: False
    )
    assert made.is_absent


@pytest.mark.parametrize(
    "text, message",
    [
        ("fedavg", "--only fedavg; give KEY=VALUE"),
        ("method=fedavg", "unknown key of --only 'method'; did you mean"),
        ("method.name=fedav", "unknown method.name of --only 'fedav'; did you mean 'fedavg'"),
        ("seed=7", "unknown seed of --only '7'"),
    ],
)
def test_a_choice_that_no_run_has_is_an_error(text, message, tmp_path):
    tasks = plan.make_plan(SMOKE, some("fedsol/fig6"), [], tmp_path).tasks.values()
    with pytest.raises(FldiagError) as raised:
        plan.only([text], [t.config for t in tasks])
    assert message in str(raised.value) and raised.value.usage


def test_a_choice_is_read_as_a_setting_is(tmp_path):
    configs = [
        t.config for t in plan.make_plan(SMOKE, some("fedsol/fig3"), [], tmp_path).tasks.values()
    ]

    def chosen(*texts):
        return [c for c in configs if plan.only(texts, configs)(c)]

    assert {c.method.options["rho"] for c in chosen("method.rho=2")} == {2.0}
    assert (
        chosen("train.lr=1e-2") == chosen("train.lr=0.01") == chosen("data.augment=true") == configs
    )
    assert {c.method.name for c in chosen("method.name=fedavg", "method.name=fedsol")} == {
        "fedavg",
        "fedsol",
    }
    assert len(chosen("method.name=fedsol", "method.rho=0.5,1.0")) == 2
    assert plan.only(["seed=0"], [])(configs[0])  # nothing to choose from, nothing to complain of


@pytest.mark.slow
def test_numbers_of_configs_name_no_run_and_their_failure_is_no_whole_figure(
    world, tmp_path, monkeypatch
):
    study = replace(some("fedalign/table5_counts")[0], seeds=1)
    keep = [t for t in study.trials if t.method == "fedavg"]
    study = replace(study, trials=tuple(keep), draw=lambda table: pictures.dots(table))
    counted = pd.DataFrame([{"metric": m, "value": 1.0} for m in ("MFLOPs", "params_M")])
    monkeypatch.setitem(questions.OWN, "flops", lambda subject, **k: counted)
    (made,) = make.make([study], SMOKE, out=tmp_path, store=tmp_path / "runs")
    said = json.loads((tmp_path / "fedalign" / "table5_counts.json").read_text())
    runs = {hit["metric"]: hit["runs"] for hit in said["measured"]}
    assert made.error == "" and runs["MFLOPs"] == runs["params_M"] == []
    shutil.rmtree(tmp_path / "runs" / "configs")

    def fails(subject, **k):
        raise FldiagError("no pictures here", "bring some")

    monkeypatch.setitem(questions.OWN, "flops", fails)
    (made,) = make.make([study], SMOKE, out=tmp_path, store=tmp_path / "runs")
    assert made.files == [] and made.error.startswith(
        "nothing of fedalign/table5_counts could be made"
    )
    assert json.loads((tmp_path / "fedalign" / "table5_counts.json").read_text()) == said


def test_nothing_is_written_of_a_study_that_cannot_be_drawn(world, tmp_path):
    study = replace(
        next(m.study for m in world[2] if m.study.id == "fig6"), draw=lambda table: 1 / 0
    )
    (made,) = make.make([study], SMOKE, out=tmp_path, store=world[1])
    assert "ZeroDivisionError" in made.error and list(tmp_path.rglob("fig6*")) == []


@pytest.mark.parametrize(
    ("size", "data", "text"),
    [
        ("smoke", "digits-500", "Smoke test: digits-500, 4 rounds, 1 seed"),
        ("small", "mnist-2000", "Reduced: MNIST (2,000 images), 4 rounds, 1 seed"),
        ("paper-bf16", "cifar10", "Trained in bf16: CIFAR-10, 4 rounds, 1 seed"),
        ("paper", "cifar10", ""),
    ],
)
def test_a_picture_says_what_was_trained_instead_of_the_papers_protocol(size, data, text):
    study = replace(some("fedsol/fig6")[0], draw=lambda table: Figure())
    runs = {"r": {"config": {"data": {"name": data}, "rounds": 4}}}
    about = {"scale": size, "seeds": [0], "runs": runs}
    assert make._draw(study, pd.DataFrame(columns=["ask", "origin"]), about).get_suptitle() == text


def test_messages_are_without_folders():
    text = "svhn was not found: looked for /srv/some place/x.npz, /data/images/svhn.npz (see https://a.org/b/c) and in runs/q"
    assert (
        without_folders(text, Path("/data/images"))
        == "svhn was not found: looked for some place/x.npz, images/svhn.npz (see https://a.org/b/c) and in runs/q"
    )


# ---- the numbers of the ledger


def numbers(values, metric, ask="final", **more):
    study = replace(shorter("fedsol/table2", 1), pick={metric: {}})
    rows = [
        {
            "origin": "measured",
            "ask": ask,
            "setting": "s",
            "method": "m",
            "model": "x",
            "data": "d",
            "metric": metric,
            "seed": i,
            "value": v,
            **{k: c[i] for k, c in more.items()},
        }
        for i, v in enumerate(values)
    ]
    (found,) = gather.measured(pd.DataFrame(rows), study, plan.Plan(SMOKE, Path()), ())
    return found


def test_a_level_that_one_seed_never_has_has_no_mean_round():
    found = numbers([9.0, 10.0, None], "rounds_to_80")
    assert (found["value"], found["seeds"], found["diverged"]) == (None, 2, 1)
    assert ledger._status(found) == "not reached by 1 of 3 seeds"
    assert ledger._status(numbers([None, None], "rounds_to_80")) == "not reached"
    assert ledger._status(numbers([None, 3.0], "accuracy")) == "measured; 1 of 2 seeds diverged"


def test_the_best_round_of_a_run_that_diverged_later_says_so():
    found = numbers([60.0, 50.0], "accuracy", "best", converged=[True, False])
    assert (
        found["value"] == 55.0 and ledger._status(found) == "measured; 1 of 2 seeds diverged later"
    )
    assert (
        ledger._status(numbers([3.0, 5.0], "lambda_max", "matching", converged=[True, False]))
        == "measured"
    )


# ---- the picture and the layout of a table


def cells(**more):
    common = {
        "setting": "partition=lda;alpha=0.1",
        "model": "m",
        "data": "cifar10",
        "metric": "accuracy",
        "trained_on": "cifar10",
        "trained_model": "m",
    }
    rows = [
        ("measured", "fedavg", 50.0, 0),
        ("measured", "fedavg", 54.0, 1),
        ("measured", "fedsol", 60.0, 0),
        ("reported", "fedavg", 56.0, None),
    ]
    return pd.DataFrame(
        [
            {
                **common,
                "origin": o,
                "method": m,
                "value": v,
                "seed": s,
                "std": 0.5 if o == "reported" else None,
                **more,
            }
            for o, m, v, s in rows
        ]
    )


def test_a_cell_is_mean_and_spread_beside_the_reported_number():
    layout = pictures.cells(cells())
    assert layout.loc["fedavg"].tolist() == ["52.0 ± 2.8 (56.0 ± 0.5)"] and layout.loc[
        "fedsol"
    ].tolist() == ["60.0"]
    both = pd.concat([cells(), cells(setting="partition=sharding;shards=2;part=head")])
    assert (
        list(pictures.cells(both).columns) == ["LDA 0.1", "2 shards"]
        and "fedavg (part=head)" in pictures.cells(both).index
    )


def test_what_stood_in_for_the_data_is_in_the_head_also_of_the_reported_number():
    both = pd.concat([cells(trained_on="mnist-2000"), cells(data="mnist", trained_on="mnist-2000")])
    both.loc[both["origin"] == "reported", "trained_on"] = None
    layout = pictures.cells(both)
    assert (
        list(layout.columns) == ["cifar10, here mnist-2000", "mnist, here mnist-2000"]
        and (layout.loc["fedavg"] == "52.0 ± 2.8 (56.0 ± 0.5)").all()
    )
    assert pictures.stand_ins(cells(trained_on="cifar10@fedtoga")) == {}
    counted = pd.concat(
        [cells(trained_on="mnist-2000"), cells(trained_on="digits", metric="MFLOPs")]
    )
    assert list(pictures.cells(counted).columns) == [
        "accuracy [%], here mnist-2000",
        "MFLOPs an image, here digits",
    ]


def test_rounds_that_some_seeds_never_reach_have_no_mean_in_a_picture_either():
    late = cells(metric="rounds_to_80")
    late.loc[(late["method"] == "fedavg") & (late["seed"] == 1), "value"] = None
    assert pictures.cells(late).loc["fedavg"].tolist() == ["1 of 2 seeds (56.0 ± 0.5)"]
    assert pictures.cells(late.assign(metric="accuracy")).loc["fedavg"].tolist() == [
        "50.0 (56.0 ± 0.5)"
    ]


def test_a_row_is_called_by_the_options_that_tell_it_apart():
    rows = [
        ("fedsol", "loss=l2;part=full"),
        ("fedsol", "loss=moon;part=full"),
        ("fedprox", "mu=1"),
        ("fedsol", "part=full"),
    ]
    table = pd.DataFrame(rows, columns=["method", "setting"])
    assert pictures.labels(table).tolist() == [
        "fedsol (loss=l2)",
        "fedsol (loss=moon)",
        "fedprox",
        "fedsol",
    ]


def test_dots_stand_where_the_numbers_are():
    fig = pictures.dots(cells())
    assert isinstance(fig, Figure)
    (ax,) = fig.axes
    (reported_, measured) = ax.containers
    assert sorted(measured[0].get_xdata()) == [52.0, 60.0] and reported_[
        0
    ].get_xdata().tolist() == [56.0]
    assert reported_[0].get_markerfacecolor() == "none" != measured[0].get_markerfacecolor()
    with pytest.raises(FldiagError, match="no measured number"):
        pictures.dots(cells().query("origin == 'reported'"))


def test_panels_share_a_scale_name_both_data_and_mark_chance():
    """Data that stand in for the paper's stand in the title; the scale reaches down to guessing among their classes."""
    both = pd.concat([cells(data=data, trained_on="mnist-2000") for data in ("mnist", "cifar10")])
    both["value"] = both["value"] - 30
    fig = pictures.dots(both)
    titles = [" ".join(ax.get_title().split()) for ax in fig.axes]
    assert titles == ["MNIST", "MNIST for CIFAR-10"]
    assert len({ax.get_xlim() for ax in fig.axes}) == 1 and fig.axes[0].get_xlim()[0] < 10
    assert all([10, 10] in [list(line.get_xdata()) for line in ax.lines] for ax in fig.axes)
    above = pictures.dots(cells(trained_on="cifar10"))
    assert all(list(line.get_xdata()) != [10, 10] for line in above.axes[0].lines)


def test_lines_over_a_setting():
    table = pd.concat([cells(setting=f"rho={r}").assign(value=10.0 * r) for r in (0.5, 2.0)]).query(
        "origin == 'measured'"
    )
    (ax,) = lines(table.assign(label=table["method"]), "rho", {"accuracy": "accuracy [%]"}).axes
    assert ax.lines[0].get_xdata().tolist() == [0.5, 2.0] and ax.lines[0].get_ydata().tolist() == [
        5.0,
        20.0,
    ]


def test_bars_stand_where_there_are_several_seeds():
    part = pd.DataFrame({"rho": [1.0, 1.0, 2.0], "value": [1.0, 3.0, 5.0]})
    ax = Figure().subplots()
    means(ax, part, "rho", pictures.MEASURED)
    (bar,) = ax.containers[0][2][0].get_segments()
    assert ax.lines[0].get_ydata().tolist() == [2.0, 5.0] and bar[:, 0].tolist() == [1.0, 1.0]
    assert bar[:, 1].tolist() == pytest.approx([2 - 2**0.5, 2 + 2**0.5])
    ax = Figure().subplots()
    means(ax, part.iloc[1:], "rho", pictures.MEASURED)
    assert not ax.containers
