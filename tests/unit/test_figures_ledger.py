"""The ledger: every id of the papers is in it, and a number stands beside the right one."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fldiag import config as configs
from fldiag.errors import FldiagError
from fldiag.results import files as result_files
from fldiag_papers import agreement, arithmetic, claims, ledger, ledger_picture, make, reported
from fldiag_papers.claims import Claim, Verdict, everywhere, lowest, ordered, per_seed
from fldiag_papers.pictures import markdown
from fldiag_papers.scales import SCALES

SETTING = "partition=lda;alpha=0.1"


def hit(
    value,
    std=None,
    method="fedavg",
    setting=SETTING,
    metric="accuracy",
    data="cifar10",
    trained_on="cifar10-4000",
    seeds=3,
):
    return {
        "setting": setting,
        "method": method,
        "model": "fedavg_cifar",
        "data": data,
        "metric": metric,
        "value": value,
        "std": std,
        "seeds": seeds,
        "trained_on": trained_on,
        "trained_model": "fedavg_cifar",
        "runs": [f"{method}-{value}"[:10]],
    }


def put(out, id, measured, scale="small", paper="fedsol", **more):
    folder = out / paper if "at" not in more else out / more.pop("at") / paper
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "paper": paper,
        "id": id,
        "scale": scale,
        "title": "T",
        "caption": "C",
        "source": "S",
        "machine": "M",
        "seeds": [0, 1, 2],
        "runs": {"r": {"hash": "abc"}},
        "failed": [],
        "left_out": [],
        "measured": measured,
        **more,
    }
    (folder / f"{id}.json").write_text(json.dumps(about))
    return folder / id


def line(out, id, method="fedavg", setting=SETTING, metric="accuracy", data="cifar10", **more):
    found = ledger.rows(out).query("basis != 'arithmetic'")
    for column, value in {
        "id": id,
        "method": method,
        "setting": setting,
        "metric": metric,
        "data": data,
        **more,
    }.items():
        found = found[found[column] == value]
    assert len(found) == 1, found
    return found.iloc[0]


#: Ids whose row in reported.csv says that there is nothing to measure need no file.
MUST = [
    (r.paper, r.id)
    for paper in reported.papers()
    for r in reported.rows(paper)
    if not ("nothing is measured" in r.note and not r.metric) and r.metric[:5] != "best_"
]


def test_every_id_of_the_inventory_has_a_file():
    assert set(MUST) <= {tuple(name.split("/")) for name in reported.studies()}


def test_language_tasks_whose_data_and_model_stand_for_others_never_agree(tmp_path):
    """SST-2 is the paper's own set; the public set of the run is not."""
    assert set(ledger.rows(tmp_path).query("id == 'table2' and paper == 'fedproj'")["status"]) == {
        "not run"
    }
    made = SCALES["real"].config(reported.studies()["fedproj/table2"].trials[8])
    assert (made.data.name, made.data.public) == ("sst2", "snli")
    split = "partition=lda;alpha=0.3;public=sent140"
    one = hit(57.0, 1.0, "fedavg", split, data="sst2", trained_on="sst2") | {
        "model": "TinyBERT",
        "trained_model": "bert_tiny",
    }
    put(
        tmp_path,
        "table2",
        [one],
        paper="fedproj",
        scale="real",
        runs={"r": {"hash": one["runs"][0], "config": made.model_dump(mode="json")}},
    )
    assert line(tmp_path, "table2", setting=split, data="sst2")["agrees"] == "other data"


def test_every_file_is_an_id_of_the_inventory():
    ids = {(r.paper, r.id) for paper in reported.papers() for r in reported.rows(paper)}
    varied = {
        (study.paper, study.id): (study.paper, study.varies)
        for study in reported.studies().values()
        if study.varies
    }
    assert {tuple(name.split("/")) for name in reported.studies()} <= ids | varied.keys()
    assert set(varied.values()) <= ids and not varied.keys() & ids


def test_every_id_and_number_has_an_entry_even_when_nothing_was_run(tmp_path):
    found = ledger.rows(tmp_path)
    every = [r for paper in reported.papers() for r in reported.rows(paper)]
    worked = found["basis"] == "arithmetic"
    assert len(found) == len(every) + len(claims.claims()) + worked.sum()
    assert set(zip(found["paper"], found["id"], strict=True)) >= {(r.paper, r.id) for r in every}
    assert found.loc[~worked, "measured"].isna().all() and found["status"].notna().all()
    assert set(found.loc[found["kind"] == "claim", "status"]) <= {"not run"}


def test_a_measured_number_stands_beside_its_own_reported_one(tmp_path):
    put(tmp_path, "table2", [hit(50.0, 2.0), hit(60.0, 1.0, "fedsol")])
    row = line(tmp_path, "table2")
    assert (row["reported"], row["reported_std"], row["measured"], row["measured_std"]) == (
        56.13,
        0.78,
        50.0,
        2.0,
    )
    assert (
        row["difference"] == pytest.approx(50 - 56.13)
        and row["agrees"] == "no"
        and row["status"] == "measured"
    )
    assert (row["scale"], row["seeds"], row["machine"]) == ("small", 3, "M")
    assert line(tmp_path, "table2", "fedsol")["measured"] == 60.0
    assert line(tmp_path, "table2", "fedsol", data="svhn")["status"] == "not part of the study"


#: Half the width of Welch's interval for 0.78 and 2 from three runs each, and of a t-interval with 0.78 taken for both.
BOTH, ONE = 4.317, 4.3027 * 0.78 * (2 / 3) ** 0.5


@pytest.mark.parametrize(
    ("value", "std", "says"),
    [
        (56.13 + BOTH - 0.02, 2.0, "yes"),
        (56.13 - BOTH - 0.02, 2.0, "no"),
        (56.13 + 0.7, None, "one spread"),
        (56.13 + ONE - 0.1, None, "one spread"),
        (56.13 - ONE - 0.1, None, "no"),
    ],
)
def test_agreement_is_a_t_interval(tmp_path, value, std, says):
    put(tmp_path, "table2", [hit(value, std)])
    assert line(tmp_path, "table2")["agrees"] == says


SIXTEEN = "partition=lda;alpha=0.5;clients=16;ratio=1;epochs=20;rounds=25"


@pytest.mark.parametrize(
    ("value", "profiled", "says"),
    [(87.34, 90.0, "yes"), (87.36, 90.0, "no"), (87.24, 87.26, "as profilers count")],
)
def test_a_count_agrees_to_the_printed_digit_or_as_profilers_count(tmp_path, value, profiled, says):
    mine = [
        hit(v, None, "fedavg", SIXTEEN, metric, "cifar100", "cifar100", seeds=1)
        | {"model": "resnet56", "trained_model": "resnet56"}
        for metric, v in (("MFLOPs", value), ("MFLOPs_profiled", profiled))
    ]
    put(tmp_path, "table5_counts", mine, paper="fedalign")
    row = line(tmp_path, "table5_counts", "fedavg", SIXTEEN, "MFLOPs", "cifar100", paper="fedalign")
    assert (row["agrees"], row["basis"]) == (says, "cost") and ("87.26" in row["status"]) == (
        says == "as profilers count"
    )
    assert "MFLOPs_profiled" not in set(ledger.rows(tmp_path)["metric"])


def test_numbers_are_worked_out_from_the_papers_own():
    """481 / 135 = 3.563 is printed as 3.6; FedTOGA's own ratio says nothing."""
    found = {
        (r.method, r.metric): again
        for r in reported.rows("fedtoga")
        if r.id == "table3" and (again := arithmetic.work_out(r))
    }
    assert (
        found["fedsam", "cost_80"].value == pytest.approx(481 / 135)
        and found["fedsam", "cost_80"].text == "FedTOGA Table 3: 481 / 135"
    )
    assert ("fedtoga", "cost_80") not in found and len(found) == 12


def test_rounding_what_a_number_is_worked_out_from_may_explain_it():
    row = next(
        r for r in reported.rows("fedalign") if r.metric == "MFLOPs_saved" and "n=1" in r.setting
    )
    again = arithmetic.work_out(row)
    assert (again.low, again.high) == pytest.approx(
        (100 * (1 - 89.15 / 133.85), 100 * (1 - 89.05 / 133.95))
    )
    verdicts = [again.agrees(replace(row, value=value)) for value in (32.8, 33.0, 34.0, 34.1)]
    assert verdicts == [False, True, True, False]


def test_the_number_meant_must_be_the_only_one(monkeypatch):
    rule = arithmetic.Rule("saving", "table7_counts", "MFLOPs", of="gradaug")
    row = next(r for r in reported.rows("fedalign") if r.metric == "MFLOPs_saved")
    monkeypatch.setitem(arithmetic.RULES, ("fedalign", row.id, row.metric), rule)
    with pytest.raises(FldiagError, match="gradaug has 2 numbers"):
        arithmetic.work_out(replace(row, data="cifar10"))


def test_numbers_are_counted_apart_by_what_they_rest_on(tmp_path):
    """Twelve ratios, six best weights, four savings and two differences follow from other printed numbers."""
    put(tmp_path, "table2", [hit(56.13, 1.0)], at="paper", scale="paper")
    put(
        tmp_path,
        "table7",
        [hit(50_000, None, "fedavg", "", "train_examples", trained_on="cifar10", seeds=1)],
    )
    put(
        tmp_path,
        "table5",
        [
            hit(140.0, 1.0, "fedavg", SIXTEEN, "seconds_per_round", "cifar100", "cifar100")
            | {"model": "resnet56", "trained_model": "resnet56"}
        ],
        paper="fedalign",
    )
    found = agreement.counts(ledger.rows(tmp_path))
    assert found["numbers"].to_dict() == {"trained": 1, "cost": 0, "data": 1, "arithmetic": 24}
    assert found.loc["arithmetic", "yes"] == 21 and found.loc["data", "yes"] == 1
    assert (found.attrs["like"], found.attrs["otherwise"]) == (26, 1), (
        "seconds of another machine say nothing"
    )
    assert found.attrs["printed"] == sum(
        r.value is not None and bool(r.metric) and "derived" not in r.note
        for paper in reported.papers()
        for r in reported.rows(paper)
    )


def test_hours_are_told_by_run_and_machine(tmp_path):
    segment = {
        "machine": "A, 2 cores",
        "capability": "AVX2",
        "threads": 1,
        "commit": "c" * 40,
        "torch": "2.15",
        "first_round": 1,
        "last_round": 20,
        "seconds": 7200.0,
        "cpu_seconds": 1800.0,
    }
    later = [
        {**segment, "first_round": 21, "last_round": 30, "cpu_seconds": 900.0},
        {
            **segment,
            "machine": "B, 8 cores",
            "capability": "AVX512",
            "first_round": 31,
            "last_round": 300,
        },
    ]
    runs = {
        "cifar10-fedavg-s0": {"hash": "abc", "segments": [segment, *later]},
        "old": {"hash": "def"},
    }
    half = {
        "cifar10-fedsol-s0": {
            "hash": "ghi",
            "segments": [{**segment, "last_round": 300}],
            "config": {"train": {"precision": "bf16"}},
        }
    }
    (
        put(tmp_path, "table2", [], scale="paper", runs=runs),
        put(tmp_path, "table10", [], scale="paper", runs=runs),
    )
    put(tmp_path, "fig7", [], scale="paper-bf16", runs=half)
    page = ledger.write(tmp_path)[0].read_text()
    assert re.findall(r"(?m)^\| cifar10-fed.*", page) == [
        "| cifar10-fedavg-s0 | 30 | A, 2 cores | AVX2 |  | 1 | 0.75 | 4.00 | ccccccc | 2.15 |",
        "| cifar10-fedavg-s0 | 270 | B, 8 cores | AVX512 |  | 1 | 0.50 | 2.00 | ccccccc | 2.15 |",
        "| cifar10-fedsol-s0 | 300 | A, 2 cores | AVX2 | bf16 | 1 | 0.50 | 2.00 | ccccccc | 2.15 |",
    ]
    put(tmp_path, "table2", [], runs=runs)
    for id in ("table10", "fig7"):
        (tmp_path / "fedsol" / f"{id}.json").unlink()
    assert "Hours of the runs" not in ledger.write(tmp_path)[0].read_text()


def test_the_picture_has_a_point_for_every_number_with_both(tmp_path):
    put(
        tmp_path,
        "table2",
        [hit(50.0, 2.0), hit(60.0, None, "fedsol")],
        reduction="12 instead of 300 rounds",
    )
    found = ledger.rows(tmp_path)
    left, right = ledger_picture.draw(found).axes
    points = [
        np.column_stack(bar.lines[0].get_data()) for ax in (left, right) for bar in ax.containers
    ]
    both = found[found["measured"].notna() & found["reported"].notna()]
    assert sorted(map(tuple, np.concatenate(points))) == sorted(
        zip(both["reported"], both["measured"], strict=True)
    )
    assert (left.get_xscale(), left.get_yscale(), right.get_xscale()) == ("log", "log", "linear")
    emphasised = [
        bar for bar in right.containers if bar.lines[0].get_color() != ledger_picture.GREY
    ]
    assert sum(len(bar.lines[0].get_xdata()) for bar in emphasised) == 12, (
        "those that are worked out"
    )


def test_another_public_set_is_other_data(tmp_path):
    """A number that distils on a stand-in of the paper's public data is not under its protocol, whatever was trained on."""
    split, paper = "partition=lda;alpha=0.3", configs.load("fedproj-cifar10-lda0.3").data.public
    mine = hit(61.0, 1.0, "feddf", split, trained_on="cifar10") | {
        "model": "resnet8_p3",
        "trained_model": "resnet8_p3",
        "runs": ["abc"],
    }
    for public, says in ((paper, "yes"), ("holdout:500", "other data")):
        about = {
            "hash": "abc",
            "config": {"name": "fedproj-cifar10-lda0.3", "data": {"public": public}},
        }
        put(tmp_path, "table1", [mine], paper="fedproj", runs={"r": about})
        assert line(tmp_path, "table1", "feddf", split, paper="fedproj")["agrees"] == says


def test_iris_has_no_known_protocol(tmp_path):
    split = "clients=3;rounds=20;epochs=5;lr=0.001"
    put(
        tmp_path,
        "fig1",
        [hit(64.0, 1.0, "feddf", split, data="iris", trained_on="iris") | {"model": "mlp_iris"}],
        paper="fedproj",
    )
    assert (
        line(tmp_path, "fig1", "feddf", split, data="iris", paper="fedproj")["agrees"]
        == "protocol unknown"
    )


def test_agreement_needs_a_spread_and_the_same_data(tmp_path):
    put(
        tmp_path,
        "table2",
        [
            hit(62.0, None, setting="partition=sharding;shards=3"),
            hit(56.13, 1.0, trained_on="digits-500"),
        ],
    )
    assert line(tmp_path, "table2", setting="partition=sharding;shards=3")["agrees"] == "no spread"
    assert line(tmp_path, "table2")["agrees"] == "other data"
    put(tmp_path, "table2", [hit(56.13, 1.0) | {"trained_model": "small_cnn"}])
    assert line(tmp_path, "table2")["agrees"] == "other model"


def test_a_reduced_protocol_neither_agrees_nor_disagrees(tmp_path):
    put(tmp_path, "table2", [hit(56.13, 1.0)], reduction="12 instead of 300 rounds")
    assert (line(tmp_path, "table2")["agrees"], line(tmp_path, "table2")["difference"]) == (
        "reduced",
        0.0,
    )
    before = agreement.counts(ledger.rows(tmp_path)).attrs
    put(tmp_path, "table2", [hit(56.13, 1.0)], at="paper", scale="paper")
    after = agreement.counts(ledger.rows(tmp_path)).attrs
    assert (after["like"] - before["like"], before["otherwise"], after["otherwise"]) == (1, 1, 0)
    whole = re.search(
        r"Of (\d+) reported numbers, (\d+) were measured under the paper's conditions",
        ledger.write(tmp_path)[0].read_text(),
    )
    assert whole.groups() == (str(after["printed"]), str(after["like"]))


def test_a_bound_is_not_compared(tmp_path):
    split = "partition=dirichlet;alpha=0.6;clients=100;ratio=0.1"
    put(
        tmp_path,
        "table3",
        [hit(790, 1.0, "fedsam", split, "rounds_to_82") | {"model": "", "trained_model": "lenet"}],
        paper="fedtoga",
    )
    assert (
        line(tmp_path, "table3", "fedsam", split, "rounds_to_82", paper="fedtoga")["agrees"]
        == "bound"
    )


def test_a_second_printing_gets_the_same_measured_number(tmp_path):
    put(tmp_path, "table2", [hit(70.0, 1.0, "fedntd", "partition=sharding;shards=5")])
    for setting, printed in (
        ("partition=sharding;shards=5", 75.21),
        ("partition=sharding;shards=5;printed=early_version", 70.47),
    ):
        row = line(tmp_path, "table2", "fedntd", setting)
        assert (row["reported"], row["measured"]) == (printed, 70.0)


def test_a_difference_is_that_of_two_measured_numbers(tmp_path):
    loss = f"{SETTING};loss=kl"
    put(
        tmp_path,
        "table1",
        [hit(40.0, 3.0, "gradient_projection", loss), hit(55.0, 4.0, "strategy:A5", loss)],
    )
    row = line(
        tmp_path, "table1", "gradient_projection", f"{loss};over=strategy:A5", "accuracy_change"
    )
    assert (row["reported"], row["measured"], row["measured_std"]) == (-9.43, -15.0, 5.0)
    put(
        tmp_path,
        "table1",
        [hit(40.0, None, "gradient_projection", f"{SETTING};loss=l2"), hit(52.0, None, "fedprox")],
    )
    row = line(
        tmp_path,
        "table1",
        "gradient_projection",
        f"{SETTING};loss=l2;over=fedprox",
        "accuracy_change",
    )
    assert row["measured"] == -12.0


def test_what_was_left_out_failed_or_diverged_says_so(tmp_path):
    key = {"setting": SETTING, "method": "fedavg", "model": "fedavg_cifar"}
    put(
        tmp_path,
        "table2",
        [hit(None, None, "scaffold", seeds=0)],
        left_out=[{**key, "data": "svhn", "why": "no svhn"}],
        failed=[{**key, "data": "cinic10", "seed": 0, "why": "it broke"}],
    )
    assert line(tmp_path, "table2", data="svhn")["status"] == "not run: no svhn"
    assert line(tmp_path, "table2", data="cinic10")["status"] == "failed: it broke"
    assert line(tmp_path, "table2", "scaffold")["status"] == "diverged"


def test_each_scale_has_its_line(tmp_path):
    put(tmp_path, "table2", [hit(50.0)])
    put(tmp_path, "table2", [hit(10.0)], scale="smoke", at="smoke")
    found = ledger.rows(tmp_path)
    found = found[(found["id"] == "table2") & found["measured"].notna()]
    assert dict(zip(found["scale"], found["measured"], strict=True)) == {
        "smoke": 10.0,
        "small": 50.0,
    }


def test_the_ledger_is_rebuilt_from_files_alone_and_twice_the_same(tmp_path):
    put(tmp_path, "table2", [hit(50.0, 2.0)])
    page, _, table, _ = files = ledger.write(tmp_path)
    first = [file.read_bytes() for file in files]
    ledger.write(tmp_path)
    assert [file.read_bytes() for file in files] == first
    assert (
        "| 56.13 ± 0.78 | small | 50 ± 2 | 3 | fedavg_cifar on cifar10-4000 | -6.13 | no |"
        in page.read_text()
        and "table2.png" in page.read_text()
    )
    (tmp_path / "fedsol" / "table2.json").unlink()
    ledger.write(tmp_path)
    assert "56.13" not in page.read_text() and len(pd.read_csv(table)) == len(ledger.rows(tmp_path))


def test_the_gallery_shows_every_picture_with_its_command_in_the_papers_order(tmp_path):
    for id, more in (
        ("fig10", {}),
        ("fig2", {"at": "smoke", "scale": "smoke"}),
        ("fig2", {}),
        ("table1", {"paper": "fedproj"}),
    ):
        put(tmp_path, id, [], **more)
    text = ledger.write(tmp_path)[1].read_text()
    assert re.findall(r"\]\((\S+png)\)", text) == [
        "fedsol/fig2.png",
        "smoke/fedsol/fig2.png",
        "fedsol/fig10.png",
        "fedproj/table1.png",
    ]
    assert re.findall("(?m)^fldiag figures .*", text) == [
        "fldiag figures fedsol/fig2 --scale small",
        "fldiag figures fedsol/fig2 --scale smoke",
        "fldiag figures fedsol/fig10 --scale small",
        "fldiag figures fedproj/table1 --scale small",
    ]
    assert text.index("## FedSOL") < text.index("## FedProj") and "FedTOGA" not in text
    assert "### S: T (scale smoke)" in text and text.count("(scale ") == 2, (
        "said where an id has several"
    )


def test_the_overview_says_of_every_figure_at_which_scale_it_was_made_and_what_came_of_it(tmp_path):
    put(tmp_path, "table2", [hit(50.0, trained_on="mnist-2000")])
    part = {"at": "paper-bf16", "scale": "paper-bf16", "seeds": [0], "left_out": [WAITING]}
    put(tmp_path, "table2", [hit(56.0, trained_on="cifar10", seeds=1)], **part)
    put(tmp_path, "fig12", [], runs={}, seeds=[0])
    put(tmp_path, "clients", [], varies="table2")
    text = ledger.write(tmp_path)[-1].read_text()
    rows = dict(re.findall(r"(?m)^\| (FedSOL [^:|]*?)(?:: T)? \| (.*) \|$", text))
    protocol, reduced, verdict = rows["FedSOL Table 2"].split(" | ")
    assert (protocol, reduced) == ("part of it, 1 seed, bf16", "small, 3 seeds")
    assert re.match(r"numbers: 147, 1 trained \(undecided 1\); statements: not decided \d", verdict)
    assert rows["FedSOL Figure 12"] == "no training | – | drawn; nothing is printed to compare"
    assert rows["FedSOL Table 9"] == "– | – | not run"
    assert text.count("FedSOL Table 2") == 1, "a question about a table is none of the paper's"


def test_the_page_on_reproduction_begins_with_the_overview_and_is_short():
    """At most 900 words after the table, and only pictures that there are."""
    page = FIGURES.parent / "docs" / "explanation" / "reproduction.md"
    text = page.read_text("utf-8")
    assert text.split("\n")[2] == "```{include} ../../figures/overview.md"
    assert len(text.split()) <= 900
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / path).is_file(), path


#: A FedAvg run as the json of a figure has it, and the cells of the column that wait.
FEDAVG = {
    "hash": "abc",
    "last_rounds": {"rounds": 20, "accuracy": 51.25, "std": 2.04},
    "config": {
        "data": {"name": "cifar10"},
        "partition": {"kind": "lda", "alpha": 0.1, "shards": None, "classes": None},
        "model": {"name": "fedavg_cifar"},
        "method": {"name": "fedavg"},
        "seed": 0,
    },
}
WAITING = {
    "setting": SETTING,
    "method": "fedsol",
    "model": "fedavg_cifar",
    "data": "cifar10",
    "why": "not finished yet",
}


def test_a_part_at_a_larger_scale_stands_before_the_whole_at_a_smaller_one(tmp_path):
    svhn = {**WAITING, "method": "fedavg", "data": "svhn"}
    put(
        tmp_path,
        "table2",
        [hit(70.0), hit(60.0, None, "fedsol")],
        left_out=[{**svhn, "why": "no svhn"}],
        reduction="12 instead of 300 rounds",
    )
    put(
        tmp_path,
        "table2",
        [hit(55.0, trained_on="cifar10", seeds=1) | {"runs": ["abc"]}],
        scale="paper",
        at="paper",
        runs={"r": FEDAVG},
        left_out=[WAITING, svhn, {**svhn, "data": "cinic10"}],
    )
    found = ledger.rows(tmp_path).query("id == 'table2' and setting == @SETTING")
    mine = found[(found["method"] == "fedavg") & (found["data"] == "cifar10")]
    assert mine[["scale", "measured"]].to_numpy().tolist() == [["paper", 55.0], ["small", 70.0]]
    assert mine["status"].tolist() == [
        "measured; mean of the last 20 rounds 51.2 ± 2.0",
        "measured",
    ]
    assert line(tmp_path, "table2", "fedsol")["scale"] == "small", (
        "what is not finished there has no line of its own"
    )
    assert line(tmp_path, "table2", data="svhn")["status"] == "not run: no svhn", (
        "that will not change when more is finished"
    )
    assert line(tmp_path, "table2", data="cinic10")["status"] == "not run: not finished yet"
    (one,) = agreement.trained(ledger.rows(tmp_path)).to_dict("records")
    assert (one["method"], one["measured"], one["agrees"]) == ("fedavg", 55.0, "one spread")
    commands = re.findall("(?m)^fldiag figures .*", ledger.write(tmp_path)[1].read_text())
    only = " ".join(
        f"--only {choice}"
        for choice in (
            "data.name=cifar10",
            "partition.kind=lda",
            "partition.alpha=0.1",
            "model.name=fedavg_cifar",
            "method.name=fedavg",
            "seed=0",
        )
    )
    assert commands == [
        f"fldiag figures fedsol/table2 --scale paper {only}",
        "fldiag figures fedsol/table2 --scale small",
    ]


def test_a_damaged_file_is_named(tmp_path):
    put(tmp_path, "table2", []).with_suffix(".json").write_text("{")
    with pytest.raises(FldiagError, match=r"table2\.json cannot be read"):
        ledger.rows(tmp_path)


# ---- what is committed

FIGURES = Path(__file__).parents[2] / "figures"


@pytest.mark.slow
def test_the_committed_ledger_is_made_of_the_committed_figures(tmp_path):
    """Nothing in it was filled in by hand, and nothing is older than the figures, the reported numbers or the statements."""
    for name in (*reported.papers(), *SCALES):
        if (FIGURES / name).is_dir():
            shutil.copytree(
                FIGURES / name, tmp_path / name, ignore=shutil.ignore_patterns("*.png", "*.pdf")
            )
    for file in ledger.write(tmp_path):
        assert file.read_text() == (FIGURES / file.name).read_text(), (
            f"{file.name}: run fldiag figures --ledger"
        )


#: At the scale small, made before figures noted their commit. Nothing may come to it: what is made again notes it.
WITHOUT_A_COMMIT = {
    "fedalign/fig1",
    "fedalign/table1",
    "fedalign/table2",
    "fedalign/table3",
    "fedalign/table4",
    "fedalign/table5",
    "fedalign/table6",
    "fedalign/table7",
    "fedproj/fig1",
    "fedproj/fig3",
    "fedproj/table1",
    "fedproj/table3",
    "fedtoga/ablation",
    "fedtoga/fig1",
    "fedtoga/fig2",
    "fedtoga/fig5",
    "fedtoga/table1",
    "fedtoga/table2",
    "fedtoga/table2_reference",
    "fedtoga/table3",
    "fedtoga/table7",
    "fedtoga/table8",
    "fedtoga/table9",
}


def test_every_committed_number_can_be_tied_to_the_code_that_made_it():
    found = pd.read_csv(FIGURES / "ledger.csv", low_memory=False)
    made = found[found["scale"].notna()]
    assert made["code"].str.match(r"\S+ at (commit not recorded|[0-9a-f]{40}\b)").all()
    assert made["torch"].str.match(r"\d+\.\d+").all()
    for entry in ledger.read_figures(FIGURES):
        about, name = entry.about, "/".join(entry.name)
        assert {"fldiag", "torch"} <= about.keys() and (
            name in WITHOUT_A_COMMIT and about["scale"] == "small"
        ) == (about.get("commit") is None), name
        assert not str(about.get("commit")).endswith("-dirty"), (
            f"{name} was made by code that is in no commit"
        )
        assert {"fldiag", "torch"} <= set.intersection(
            *(set(run) for run in about["runs"].values()), {"fldiag", "torch"}
        )


def test_a_line_names_the_code_of_the_runs_and_not_of_who_drew_them(tmp_path):
    run = {"hash": "abc", "fldiag": "1.2", "commit": "a" * 40, "torch": "2.9"}
    put(
        tmp_path,
        "table2",
        [hit(50.0)],
        runs={"r": run},
        fldiag="1.3",
        commit="b" * 40,
        torch="2.15",
    )
    assert tuple(line(tmp_path, "table2")[["code", "torch"]]) == (f"1.2 at {'a' * 40}", "2.9")
    put(tmp_path, "table2", [hit(50.0)], runs={}, fldiag="1.3", torch="2.15")
    assert tuple(line(tmp_path, "table2")[["code", "torch"]]) == (
        "1.3 at commit not recorded",
        "2.15",
    )


def test_every_committed_figure_is_whole_and_of_this_inventory():
    made = [entry.file for entry in ledger.read_figures(FIGURES)]
    assert made and {f"{f.parent.name}/{f.stem}" for f in made} <= set(reported.studies())
    for file in made:
        assert all(file.with_suffix(end).stat().st_size > 200 for end in (".png", ".pdf", ".json"))
        assert (
            len(result_files.read_csv_bytes(file.with_suffix(".csv"), result_files.read_json(file)))
            > 200
        )
        assert not re.search(
            r"(?<![\w.:/])/(work|tmp|home|root|mnt|usr|var|data)/", file.read_text()
        ), "a folder of some machine"


@pytest.mark.slow
def test_committed_figures_are_of_the_studies_as_they_are():
    """Captions begin with the study's, and tables for reading are laid out from the csv as they would be today."""
    for entry in ledger.read_figures(FIGURES):
        about, study = entry.about, reported.studies()["/".join(entry.name)]
        again = f"fldiag figures {study.name} --scale {about['scale']} --as-is"
        assert about["caption"].startswith(study.caption), again
        if study.layout is not None:
            content = result_files.read_csv_bytes(entry.file.with_suffix(".csv"), about)
            table = make.read(content.decode())
            assert (
                entry.file.with_suffix(".md").read_text()
                == f"{about['caption']}\n\n{markdown(study.layout(table))}"
            ), again


# ---- claims

#: Statements on numbers that no committed figure has.
NOT_MEASURED = {"fedsol-heterogeneity"}

TABLE = pd.DataFrame(
    {
        "origin": "measured",
        "metric": "m",
        "label": ["a", "b"] * 3,
        "seed": [0, 0, 1, 1, 2, 2],
        "layer": None,
        "value": [1.0, 2.0, 1.5, 3.0, 5.0, 4.0],
    }
)


def test_an_order_is_voted_by_seed_and_decided_beyond_the_noise():
    values = per_seed(TABLE, metric="m", layer=None)
    verdict = ordered(values, ["a", "b"])
    assert verdict.votes == (True, True, False) and verdict.text.startswith(
        "undecided (2 of 3 seeds; a and b: difference 0.5"
    )
    assert ordered(values, ["b", "a"]).outcome == "undecided", (
        "what does not clearly hold is not thereby refuted"
    )
    assert (
        ordered(values[values.index < 2], ["a", "b"]).text
        == "undecided (2 of 2 seeds; a and b: difference 1.2 ± 3.2 (95 %, paired t))"
    )
    assert (
        ordered(values[values.index < 1], ["a", "b"]).text
        == "undecided (1 of 1 seeds; a and b: difference 1, one seed)"
    )
    assert "a 2.5 ± 2.2" in verdict.numbers and verdict.numbers.endswith("2.2, b 3 ± 1")
    values["b"] = values["a"] + [1.0, 1.1, 0.9]
    assert (
        ordered(values, ["a", "b"]).text == "holds (3 of 3 seeds)"
        and ordered(values, ["b", "a"]).outcome == "does not hold"
    )
    assert (
        lowest(values, "a", ["a", "b"]).outcome
        == "holds"
        == lowest(values, "b", ["a", "b"], highest=True).outcome
    )
    values.loc[2, "b"] = np.nan
    assert ordered(values, ["a", "b"]).numbers.endswith("; 1 seeds without a number")


def accuracies(low, *high, trained_on="cifar10"):
    """One method and another, which has so many seeds; the paper prints hardly any deviation."""
    rows = [
        {
            "origin": "measured",
            "metric": "accuracy",
            "label": m,
            "seed": seed,
            "value": v,
            "unit": "%",
            "trained_on": trained_on,
        }
        for seed, value in enumerate(high)
        for m, v in (("a", low), ("b", value))
    ]
    rows += [
        {"origin": "reported", "metric": "accuracy", "label": m, "std": 0.01, "value": 60.0}
        for m in "ab"
    ]
    return per_seed(pd.DataFrame(rows), metric="accuracy")


@pytest.mark.parametrize(
    ("high", "says"),
    [
        ((99.0,), "undecided"),
        ((70.0, 71.0), "holds"),  # 10.5 ± 6.4
        ((50.0, 49.0), "does not hold"),
        ((70.0, 72.0), "undecided"),  # 11 ± 12.7
        ((70.0, 72.0, 71.0), "holds"),
    ],
)
def test_a_statement_is_decided_by_two_seeds_of_its_own_or_more(high, says):
    assert ordered(accuracies(60.0, *high), ["a", "b"]).outcome == says


@pytest.mark.parametrize(
    ("low", "high", "trained_on", "says"),
    [
        (10.0, 60.0, "cifar10", "undecided"),
        (22.0, 60.0, "cifar10-500", "undecided"),
        (24.0, 60.0, "cifar10", "holds"),
        (6.0, 60.0, "cifar100", "holds"),
    ],
)
def test_models_near_chance_or_a_two_class_ceiling_decide_nothing(low, high, trained_on, says):
    verdict = ordered(accuracies(low, high, high + 1, trained_on=trained_on), ["a", "b"])
    assert verdict.outcome == says and (
        says == "holds" or verdict.why.startswith("not trained far enough: a ")
    )


def test_a_statement_on_several_columns_holds_where_all_hold():
    holds, fails, open_ = (
        ordered(accuracies(60.0, 60.0 + d, 60.5 + d), ["a", "b"]) for d in (9.0, -9.0, 1.0)
    )
    assert everywhere({"x": holds, "y": holds}, total=2).text == "holds (2 of 2 columns)"
    assert everywhere({"x": holds, "y": fails, "z": open_}, total=9).outcome == "does not hold"
    assert everywhere({"x": holds, "z": open_}).text.startswith(
        "undecided (2 of 2 columns; a and b: difference 1.2 ±"
    )
    with pytest.raises(FldiagError, match="measured in 2 of 3 columns"):
        everywhere({"x": holds, "y": holds}, total=3)
    with pytest.raises(FldiagError, match="measured in 0 of"):
        everywhere({})


def test_every_column_is_that_of_the_study_and_not_of_what_was_measured():
    check = next(c for c in claims.claims() if c.id == "fedsol-everywhere").check
    cell = {"setting": SETTING, "model": "m", "data": "cifar10", "metric": "accuracy"}
    table = pd.DataFrame(
        [
            {**cell, "origin": "measured", "seed": s, "method": m, "value": v + s}
            for s in range(3)
            for m, v in (("fedavg", 50.0), ("fedsol", 60.0 + s / 9))
        ]
    )
    columns = [{**cell, "method": m} for m in ("fedavg", "fedsol")]
    table.attrs["cells"] = columns
    assert check(table).outcome == "holds"
    table.attrs["cells"] = [*columns, *({**c, "data": "svhn"} for c in columns)]
    with pytest.raises(FldiagError, match="measured in 1 of 2 columns"):
        check(table)
    table.loc[table["method"] == "fedsol", "value"] -= 20
    assert check(table).outcome == "does not hold"


def test_numbers_of_several_questions_are_not_mixed():
    rows = [
        {"origin": "measured", "ask": a, "metric": "accuracy", "label": "x", "seed": 0, "value": v}
        for a, v in (("final", 69.6), ("drift", 0.7))
    ]
    with pytest.raises(FldiagError, match="several questions under one name: final, drift"):
        per_seed(pd.DataFrame(rows), metric="accuracy")
    assert per_seed(pd.DataFrame(rows), metric="accuracy", ask="final")["x"].tolist() == [69.6]


def test_curvatures_of_untrained_models_decide_nothing(tmp_path):
    """Their accuracy is looked up in whatever figure has it of the same run."""
    rows = [
        {
            "origin": "measured",
            "metric": "eigenvalue",
            "index": 1,
            "ask": "spectrum",
            "label": m,
            "seed": s,
            "value": v + s / 100,
            "trained_on": "cifar10",
        }
        for s in range(3)
        for m, v in (("FedAvg", 2.0), ("FedSOL", 1.0 + s / 100))
    ]
    runs = {
        "r": {
            "hash": "fedavg-60",
            "config": {"method": {"name": "fedavg"}, "partition": {"seed": 0}},
        }
    }
    claim = {
        "id": "fedsol-lambda1",
        "method": np.nan,
        "setting": np.nan,
        "metric": "x",
        "data": np.nan,
    }
    for accuracy, says in (
        (60, "holds (3 of 3 seeds), for this partition"),
        (20, "undecided (3 of 3 seeds; not trained far enough: fedavg 20 %)"),
    ):
        runs["r"]["hash"] = f"fedavg-{accuracy}"
        put(tmp_path, "table2", [hit(accuracy)])
        stem = put(tmp_path, "fig8", [], runs=runs)
        pd.DataFrame(rows).to_csv(stem.with_suffix(".csv"), index=False)
        found = ledger.rows(tmp_path)
        assert found.loc[found["id"] == claim["id"], "status"].item().startswith(says)


def test_equal_is_not_below_unless_it_may_be():
    values = pd.DataFrame({"a": [1.0], "b": [1.0], "c": [2.0]})
    assert (
        not ordered(values, ["a", "b", "c"]).votes[0]
        and ordered(values, ["a", "b", "c"], equal=[True]).votes[0]
    )
    assert lowest(values, "a", ["a", "b", "c"]).votes == (False,) and lowest(
        values, "a", ["a", "c"]
    ).votes == (True,)


def test_the_lowest_of_six_is_not_the_lowest_of_those_that_are_there():
    values = pd.DataFrame({"a": [1.0, 1.0], "b": [2.0, np.nan], "c": [np.nan, 3.0]})
    with pytest.raises(FldiagError, match="no seed has all"):
        lowest(values, "a", ["a", "b", "c"])
    with pytest.raises(FldiagError, match="nothing was measured of d"):
        lowest(values, "a", ["a", "d"])
    assert lowest(values, "a", ["a", "b"]).votes == (True,)


def test_the_highest_is_told_by_its_own_numbers():
    values = pd.DataFrame({"a": [60.0, 61.0], "b": [50.0, 62.0], "c": [40.0, 41.0]})
    verdict = lowest(values, "a", ["a", "b", "c"], highest=True)
    assert verdict.votes == (True, False) and verdict.numbers == "a 60.5, best of the others b 56"
    assert lowest(values, "c", ["a", "b", "c"]).votes == (True, True)


def test_cosines_of_both_signs_are_not_orthogonal():
    """Their mean over the rounds is 0, their distance from a right angle is not."""
    orthogonal = next(c for c in claims.claims() if c.id == "fedsol-orthogonal").check
    rows = [
        {
            "label": label,
            "value": v,
            "round": t,
            "seed": 0,
            "origin": "measured",
            "metric": "cos_gu_gp",
            "estimator": "steps",
            "scope": "global",
            "moment": "trained",
        }
        for label, size in (
            ("FedSOL, rho 2.0", 0.3),
            ("FedSOL, rho 1.0", 0.2),
            ("FedSOL, rho 0.5", 0.25),
            ("FedAvg", 0.4),
        )
        for t, v in enumerate((size, -size))
    ]
    assert orthogonal(pd.DataFrame(rows)).votes == (False,)
    ordered_rows = [
        {**r, "value": r["value"] / 2} if r["label"] == "FedSOL, rho 2.0" else r for r in rows
    ]
    assert orthogonal(pd.DataFrame(ordered_rows)).votes == (True,)


def test_a_claim_without_its_numbers_is_not_decided():
    values = per_seed(TABLE, metric="m")
    with pytest.raises(FldiagError, match="nothing was measured of c"):
        ordered(values, ["a", "c"])
    with pytest.raises(FldiagError, match="no rows"):
        per_seed(TABLE, metric="other")


def test_claims_are_in_the_ledger_with_their_outcome(tmp_path, monkeypatch):
    made = Claim(
        "x",
        "a is below b",
        "S",
        "fedsol/fig6",
        lambda t: ordered(per_seed(t, metric="m"), ["a", "b"]),
    )
    monkeypatch.setattr(
        claims,
        "claims",
        lambda: (made, replace(made, id="y", check=lambda t: ordered(per_seed(t), ["z", "a"]))),
    )
    TABLE.to_csv(put(tmp_path, "fig6", []).with_suffix(".csv"), index=False)
    found = ledger.rows(tmp_path).query("kind == 'claim'").set_index("id")
    assert (
        found.loc["x", "status"].startswith("undecided (2 of 3 seeds; a and b: difference 0.5")
        and found.loc["x", "agrees"] == "undecided"
    )
    assert (
        found.loc["y", "status"] == "not decided"
        and "nothing was measured of z" in found.loc["y", "note"]
    )
    assert (
        "| a is below b | S | small | undecided (2 of 3 seeds; a and b: difference"
        in ledger.write(tmp_path)[0].read_text()
    )


def test_adaptive_and_fixed_strength_are_compared_on_the_same_radii():
    check = next(c for c in claims.claims() if c.id == "fedsol-adaptive").check
    rows = pd.DataFrame(
        [
            {
                "origin": "measured",
                "ask": "final",
                "metric": "accuracy",
                "label": n,
                "setting": f"rho={r}",
                "seed": 0,
                "value": v,
            }
            for n, values in {"fixed": (65, 58), "adaptive": (50, 70)}.items()
            for r, v in enumerate(values)
        ]
    )
    assert check(rows).votes == (False,)
    with pytest.raises(FldiagError, match="not every radius"):
        check(rows.drop(index=2))


def test_the_smallest_drop_is_that_of_all_methods_measured_on_both_partitions():
    check = next(c for c in claims.claims() if c.id == "fedtoga-drop").check
    rows = pd.DataFrame(
        [
            {
                "origin": "measured",
                "metric": "accuracy",
                "data": "cifar10",
                "method": method,
                "seed": 0,
                "value": value,
                "setting": f"partition=dirichlet;alpha={alpha};clients=100;ratio=0.1",
            }
            for method, values in {
                "fedtoga": (90, 80),
                "fedsmoo": (90, 70),
                "fedspeed": (90, 85),
            }.items()
            for alpha, value in zip((0.6, 0.1), values, strict=True)
        ]
    )
    assert check(rows).votes == (False,) and check(rows[:5]).votes == (True,)


@pytest.mark.slow
def test_every_claim_compares_what_its_study_has():
    """With the committed numbers each claim gives a verdict, or says which of them were not measured."""
    for claim in claims.claims():
        paper, id = claim.study.split("/")
        try:
            content = result_files.read_csv_bytes(FIGURES / paper / f"{id}.csv", {})
            verdict = claim.check(pd.read_csv(io.BytesIO(content), low_memory=False))
            assert verdict.votes and verdict.numbers and verdict.labels, claim.id
        except (FldiagError, FileNotFoundError) as error:
            assert claim.id in NOT_MEASURED, f"{claim.id}: {error}"


def test_every_claim_is_about_a_study_that_there_is():
    assert {c.study for c in claims.claims()} <= set(reported.studies())
    assert (
        len({c.id for c in claims.claims()}) == len(claims.claims())
        and Verdict((True,), "").text == "undecided (1 of 1 seeds)"
    )


def test_numbers_of_a_study_that_varies_a_table_are_told_apart(tmp_path):
    """They are not the table's, even where they agree with it."""
    put(tmp_path, "clients", [hit(56.13, 1.0)], scale="paper", varies="table2")
    row = line(tmp_path, "clients")
    assert (
        (row["measured"], row["note"]) == (56.13, "varies table2")
        and pd.isna(row["reported"])
        and pd.isna(row["basis"])
    )
    assert line(tmp_path, "table2")["status"] == "not run"
    put(tmp_path, "fig9", [hit(1.0, 1.0)])
    assert line(tmp_path, "fig9")["note"] == "no number in the paper's text"
    text = ledger.write(tmp_path)[1].read_text()
    assert text.index("fig9.png") < text.index("clients.png"), "after the paper's own"


@pytest.mark.parametrize(
    "value, std, seeds, says",
    [
        (50.0, 4.0, 1, "one spread"),  # 6.13 below, of 2.09 * 4 * sqrt(1 + 1/3) = 9.7
        (46.0, 4.0, 1, "no"),
        (50.0, 0.5, 1, "no"),  # a swing below the paper's deviation counts for nothing
        (50.0, 4.0, 3, "no"),
    ],
)  # three seeds have a spread of their own
def test_one_run_s_last_rounds_are_the_noise_of_its_accuracy(tmp_path, value, std, seeds, says):
    run = {"hash": "abc", "last_rounds": {"rounds": 20, "accuracy": 51.25, "std": std}}
    one = hit(value, 0.5 if seeds > 1 else None, trained_on="cifar10", seeds=seeds) | {
        "runs": ["abc", "b", "c"][:seeds]
    }
    put(tmp_path, "table2", [one], scale="paper", runs={"r": run})
    row = line(tmp_path, "table2")
    assert row["agrees"] == says and (
        row["last_rounds_std"] == std if seeds == 1 else pd.isna(row["last_rounds_std"])
    )
