"""Which tables a report takes: decided by the checkpoints their provenance names, by nothing else."""

import json
import os
import shutil

import pandas as pd
import pytest
import reports

from fldiag import registry
from fldiag.diagnosis.places import distinct
from fldiag.errors import FldiagError
from fldiag.report import build, measured
from fldiag.report.collect import collect
from fldiag.results.files import write_table


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def kinds(found, place=0):
    return set(found.members[place].tables)


def test_a_table_is_found_by_its_checkpoints_whatever_the_folder_is_called(tmp_path):
    made = reports.everything(reports.run(tmp_path / "a"))
    shutil.move(made.path, tmp_path / "renamed")
    found = collect([tmp_path / "renamed"])
    assert kinds(found) == {
        "metrics",
        "forgetting",
        "drift",
        "matching",
        "account",
        "personalise",
        "spectrum",
        "landscape",
    }
    assert not found.notes


@pytest.mark.parametrize("kind", ["forgetting", "landscape"])
def test_a_table_of_other_weights_is_not_shown_and_that_is_said(tmp_path, kind):
    old = reports.run(tmp_path / "a", salt="before")
    if kind == "forgetting":
        reports.of_run(old, kind, reports.forgetting())
    else:
        reports.of_checkpoints(old, kind, lambda _: reports.surface())
    reports.run(tmp_path / "a", salt="after")
    found = collect([tmp_path / "a"])
    assert kinds(found) == {"metrics"}
    assert (
        len(found.notes) == 1
        and f"{kind}-1.csv" in found.notes[0]
        and "other checkpoints" in found.notes[0]
    )


def test_several_tables_of_other_weights_are_one_line(tmp_path):
    old = reports.run(tmp_path / "a", salt="before")
    reports.of_run(old, "forgetting", reports.forgetting())
    reports.of_checkpoints(old, "landscape", lambda _: reports.surface())
    reports.run(tmp_path / "a", salt="after")
    (note,) = collect([tmp_path / "a"]).notes
    assert note.startswith("2 tables are not shown (") and note.endswith(
        "other checkpoints than those of this run."
    )


def test_one_wrong_checkpoint_among_the_right_ones_is_enough_to_refuse(tmp_path):
    made = reports.run(tmp_path / "a")
    csv = reports.of_run(made, "drift", reports.drift())
    about = json.loads(csv.with_suffix(".json").read_text())
    about["checkpoints"]["2"] = "f" * 64
    csv.with_suffix(".json").write_text(json.dumps(about))
    assert kinds(collect([made.path])) == {"metrics"}


def test_places_that_are_looked_through(tmp_path):
    made = reports.run(tmp_path / "runs" / "a")
    reports.of_run(
        made, "forgetting", reports.forgetting(), folder=tmp_path / "runs"
    )  # beside the run, as the demo has it
    reports.of_run(made, "drift", reports.drift(), folder=tmp_path / "fldiag-out")
    reports.of_run(
        made, "matching", reports.matching(), folder=tmp_path / "elsewhere" / "deep" / "down"
    )
    assert kinds(collect([made.path])) == {"metrics", "forgetting", "drift"}
    assert kinds(collect([made.path], [tmp_path / "elsewhere"])) == {
        "metrics",
        "forgetting",
        "drift",
        "matching",
    }


def test_of_several_tables_the_later_round_the_more_rounds_the_newer_wins(tmp_path):
    made = reports.run(tmp_path / "a")

    def chosen():
        source = collect([made.path]).members[0].tables["drift"]
        return source.name, source.alternatives

    def put(name, rounds, age):
        csv = reports.of_run(made, "drift", reports.drift(), name=name, rounds=rounds)
        os.utime(csv, (1e9 - age, 1e9 - age))

    put("drift-early", [1, 2], age=0)
    assert chosen() == ("drift-early.csv", 0)
    put("drift-last", [3], age=500)
    assert chosen() == ("drift-last.csv", 1)
    put("drift-all", [1, 2, 3], age=900)
    assert chosen() == ("drift-all.csv", 2)
    put("drift-newer", [1, 2, 3], age=800)
    assert chosen() == ("drift-newer.csv", 3)


def test_a_table_given_by_name_is_taken_first(tmp_path):
    made = reports.run(tmp_path / "a")
    reports.of_run(made, "drift", reports.drift())
    mine = reports.of_run(made, "drift", reports.drift(), name="drift-mine", rounds=[1])
    assert collect([made.path]).members[0].tables["drift"].name == "drift-1.csv"
    assert collect([made.path], [mine]).members[0].tables["drift"].name == "drift-mine.csv"


def test_a_damaged_table_is_passed_over_for_the_next_and_named(tmp_path):
    made = reports.run(tmp_path / "a")
    reports.of_run(made, "drift", reports.drift(), rounds=[3])
    reports.of_run(made, "drift", reports.drift(), name="drift-bad").write_text("a,b\n1,2\n")
    (made.path / "diagnostics" / "odd.json").write_text("{")
    (made.path / "diagnostics" / "odd.csv").write_text("")
    found = collect([made.path])
    assert found.members[0].tables["drift"].name == "drift-1.csv"
    assert any("drift-bad.csv" in n and "columns" in n for n in found.notes) and any(
        "odd.json" in n for n in found.notes
    )


@pytest.mark.parametrize("options", [{"params": "fc*"}, {"matrix": "ggn"}, {"which": "smallest"}])
def test_eigenvalues_of_other_matrices_are_not_taken_for_the_hessians(tmp_path, options):
    made = reports.run(tmp_path / "a")
    reports.of_checkpoints(made, "spectrum", lambda _: reports.eigenvalues(), **options)
    assert kinds(collect([made.path])) == {"metrics", f"spectrum:{next(iter(options.values()))}"}


def test_a_table_of_two_runs_belongs_to_both(tmp_path):
    a, b = reports.run(tmp_path / "a"), reports.run(tmp_path / "b", "fedsol")
    reports.of_checkpoints(
        [a, b], "landscape", lambda label: reports.surface(), folder=tmp_path / "fldiag-out"
    )
    found = collect([a.path, b.path])
    assert found.members[0].tables["landscape"] is found.members[1].tables["landscape"]
    assert sum(s.kind == "landscape" for s in found.sources) == 1
    assert [s.place for s in found.sources] == list(range(len(found.sources)))


def test_directions_are_kinds_of_their_own(tmp_path):
    made = reports.run(tmp_path / "a")
    for name in ("eigen", "pca"):
        reports.of_checkpoints(
            made,
            "landscape",
            lambda _: reports.surface(),
            name=f"landscape-{name}",
            directions=name,
        )
    assert {"landscape", "landscape:pca"} <= kinds(collect([made.path]))


def test_a_run_without_metrics_or_checkpoints_is_still_a_run(tmp_path):
    made = reports.run(tmp_path / "a")
    shutil.rmtree(made.path / "rounds")
    (made.path / "rounds.jsonl").write_bytes(b"")
    assert kinds(collect([made.path])) == set()


@pytest.mark.slow
def test_a_table_that_was_changed_is_not_shown(tmp_path):
    """Every byte of a csv flipped: the table is left out, with a note, and the next one of its kind is taken."""
    made = reports.run(tmp_path / "a")
    reports.of_run(made, "forgetting", reports.forgetting(), name="forgetting-old", rounds=[1, 2])
    csv = reports.of_run(made, "forgetting", reports.forgetting(), name="forgetting-new")
    [about, same] = write_table(
        pd.read_csv(csv), csv.with_suffix(""), json.loads(csv.with_suffix(".json").read_text())
    )
    assert same == csv and collect([made.path]).members[0].tables["forgetting"].name == csv.name
    good = csv.read_bytes()
    for place in range(0, len(good), max(1, len(good) // 60)):
        csv.write_bytes(good[:place] + bytes([good[place] ^ 0x01]) + good[place + 1 :])
        found = collect([made.path])
        assert found.members[0].tables["forgetting"].name == "forgetting-old.csv"
        assert found.notes == [
            "forgetting-new.csv is not shown: it cannot be read as a table (forgetting-new.csv is not the "
            "table that was written (its sha256 differs from the json beside it))."
        ]
    csv.write_bytes(good)
    kept = about.read_bytes()
    for place in range(len(kept)):  # a damaged json: the table as it is, or none of it
        about.write_bytes(kept[:place] + bytes([kept[place] ^ 0x02]) + kept[place + 1 :])
        table = collect([made.path]).members[0].tables.get("forgetting")
        assert table is None or table.raw in (
            good,
            (csv.parent / "forgetting-old.csv").read_bytes(),
        )


def test_a_table_without_a_checksum_is_shown(tmp_path):
    made = reports.run(tmp_path / "a")
    reports.of_run(made, "forgetting", reports.forgetting())
    found = collect([made.path])
    assert "forgetting" in kinds(found) and not found.notes


def test_a_table_that_no_section_can_draw_does_not_stop_the_report(tmp_path):
    """Without a checksum anything may stand in a table."""
    good, bad = reports.run(tmp_path / "a"), reports.run(tmp_path / "b", seed=1)
    for made in (good, bad):
        reports.of_run(made, "account", reports.account(), name=f"account-{made.path.name}")
    csv = bad.path / "diagnostics" / "account-b.csv"
    csv.write_text(csv.read_text().replace(",4,", ",inf,"))  # no number of a client
    found = collect([good.path, bad.path])
    assert "account" in kinds(found, 1) and not found.notes
    section = measured.section(registry.diagnostic.get("account"), found)
    (group,) = section.groups
    assert {p.caption for p in group.pictures} == {"Account, FedAvg, seed 0"}
    assert any("account-b.csv is not drawn" in note for note in group.notes)
    page = build.write(found, tmp_path / "report.html").read_text()
    assert "account-b.csv is not drawn" in page


def test_wrong_use_is_refused(tmp_path):
    made = reports.run(tmp_path / "a")
    for paths, places, word in (
        ([], [], "no run"),
        ([made.path, tmp_path / "." / "a"], [], "twice"),
        ([tmp_path], [], "not a run folder"),
        ([made.path], [tmp_path / "nowhere"], "not there"),
    ):
        with pytest.raises(FldiagError, match=word) as caught:
            collect(paths, places)
        assert caught.value.usage and caught.value.remedy


def test_labels_are_as_short_as_they_can_be(tmp_path):
    assert distinct([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    assert distinct([tmp_path / "x" / "a", tmp_path / "y" / "b"]) == ["a", "b"]


def test_runs_are_named_by_method_and_seed_and_by_what_else_differs(tmp_path):
    def labels(*runs):
        return [m.label for m in collect([r.path for r in runs]).members]

    a, b = reports.run(tmp_path / "1f3e"), reports.run(tmp_path / "2c4d", "fedsol", seed=1)
    assert labels(a, b) == ["FedAvg, seed 0", "FedSOL, seed 1"]
    c = reports.run(tmp_path / "rho", "fedsol", seed=1, method__rho=0.5)
    assert labels(a, b, c) == [
        "FedAvg, seed 0",
        "FedSOL, ρ = 1.5, seed 1",
        "FedSOL, ρ = 0.5, seed 1",
    ]
    d = reports.run(tmp_path / "lr", train__lr=0.5)
    first, second = labels(a, d)
    assert first != second and "learning rate = 0.5" in second
    again = reports.run(tmp_path / "again")
    assert labels(a, again) == ["FedAvg, seed 0 (1f3e)", "FedAvg, seed 0 (again)"]
