"""The studies of FedSOL without training: their configs at every scale, and their pictures of made-up answers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from fldiag import config as configs
from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.results.select import only
from fldiag.results.table import table
from fldiag_papers import claims, gather, make, plan, questions, reported
from fldiag_papers.scales import SCALES, scale

STUDIES = {name: study for name, study in reported.studies().items() if name.startswith("fedsol/")}
TRAINED = [name for name, study in STUDIES.items() if any(t.train for t in study.trials)]
#: Table 2 is made end to end elsewhere, and is as large as all others.
DRAWN = [name for name in TRAINED if name != "fedsol/table2"]
ROUNDS = (10, 20)


#: "real" has text tasks only, which FedSOL does not have.
@pytest.fixture(scope="module", params=[name for name in SCALES if name != "real"])
def planned(request, tmp_path_factory):
    return plan.make_plan(
        scale(request.param), STUDIES.values(), [], tmp_path_factory.mktemp("runs")
    )


def test_every_trial_is_a_run_or_left_out_for_its_data_or_model(planned):
    for name, study in STUDIES.items():
        trained = {n for n, t in enumerate(study.trials) if t.train}
        there = {n for s, n, _ in planned.cells if s == name}
        gone = {n for s, n in planned.left_out if s == name}
        assert there | gone & trained == trained and not there & gone
        assert there or not trained, f"{name} is empty at {planned.scale.name}"
    why = {text.partition(" is ")[0] for text in planned.left_out.values()}
    assert why <= (
        {"svhn", "cinic10", "pathmnist", "tissuemnist", "sl_vit", "vgg11"}
        if planned.scale.name == "small"
        else set()
    )


def test_headline_runs_are_shared(planned):
    for one, other in (("fig10", "table2"), ("fig6", "fig3"), ("fig8", "fig6")):
        mine, theirs = (
            {planned.cells[c] for c in planned.cells if c[0] == f"fedsol/{n}"} for n in (one, other)
        )
        assert mine & theirs, (one, other)
    core = {c: t for c, t in planned.tasks.items() if t.config.method.name == "fedsol"}
    head = [
        t
        for t in core.values()
        if {"fedsol/table2", "fedsol/table5", "fedsol/fig4", "fedsol/fig5"} <= set(t.users)
    ]
    assert {t.config.method.options["rho"] for t in head} == {1.5}
    assert all(t.config.method.options["part"] != "head" for t in core.values()), (
        "FedSOL's default part has that name already"
    )


def test_sweeps_stay_apart_at_every_scale(planned):
    study = STUDIES["fedsol/fig4"]
    for factor in ("ratio", "epochs", "lr", "rho"):
        mine = [
            n
            for n, t in enumerate(study.trials)
            if t.setting.startswith(f"{factor}=") and t.label == "FedSOL"
        ]
        found = {planned.cells["fedsol/fig4", n, 0] for n in mine}
        # Of two clients in ten there are no five different shares.
        assert len(found) == len(mine) if planned.scale.name != "smoke" else len(found) >= 2


# ---- made-up answers: of the columns that the questions give


def _final(task, metrics):
    return [
        {
            "metric": m,
            "value": 50 + task.config.seed,
            "round": 20,
            "scope": "global",
            "slice": "test",
        }
        for m in metrics
    ]


def _curve(task, metrics):
    return [
        {**row, "round": r, "unit": "%", "value": 3.0 * r}
        for r in ROUNDS
        for row in _final(task, metrics)
    ]


def _drift(task, **options):
    base = {"moment": "trained", "scope": "global", "slice": "train"}
    rho = task.config.method.options.get("rho", 0.0)
    named = {
        "cos_gu_gp": -0.5 / (1 + rho),
        "proximal_loss": 0.1 / (1 + rho),
        "global_local_divergence": 2 - rho / 4,
        "local_local_divergence": 3 - rho / 4,
    }
    rows = [
        {**base, "round": r, "metric": m, "value": v + r / 1000, "estimator": e}
        for r in ROUNDS
        for m, v in named.items()
        for e in (("exact",) if "divergence" in m else ("exact", "steps"))
    ]
    other = {
        "cos_gu_gp": "exact",
        "proximal_loss": "steps",
    }  # of these, the estimator that no study wants
    rows = [
        {**row, "value": 5.0} if other.get(row["metric"]) == row["estimator"] else row
        for row in rows
    ]
    rows += [
        {**row, "layer": "part:head", "value": 9.0} for row in rows if row["metric"] == "cos_gu_gp"
    ]
    rows += [{**row, "scope": "client", "client": 3, "value": 9.0} for row in rows]
    return (
        rows
        + [
            {
                **base,
                "round": r,
                "metric": "lambda_mean",
                "layer": name,
                "value": 0.5 / n,
                "scaled": 0.5,
                "estimator": e,
            }
            for r in ROUNDS
            for n, name in ((10, "conv"), (100, "fc"))
            for e in ("exact", "steps")
        ]
        + [{**base, "round": r, "metric": "accuracy", "value": 0.7} for r in ROUNDS]
    )


def _forgetting(task, **options):
    base = {"scope": "global", "slice": "test"}
    lost = 0.2 if task.config.method.name == "fedsol" else 0.4
    rows = [
        {**base, "round": r, "moment": m, "metric": "accuracy", "value": v}
        for r in ROUNDS
        for m, v in (("received", 0.6), ("trained", 0.6 - lost), ("aggregated", 0.6))
    ]
    rows += [
        {**base, "round": r, "moment": "trained", "metric": "drop", "value": lost} for r in ROUNDS
    ]
    rows += [
        {**base, "round": r, "moment": m, "metric": "class_accuracy", "index": c, "value": c / 10}
        for r in ROUNDS
        for m in ("received", "aggregated")
        for c in range(10)
    ]
    return [*rows, *({**row, "scope": "client", "client": 1} for row in rows)]


def _personal(task, epochs):
    return [
        {
            "metric": m,
            "value": v + e,
            "index": e,
            "scope": "global",
            "round": 20,
            "moment": "trained",
        }
        for e in epochs
        for m, v in (("personal_accuracy", 80.0), ("personal_accuracy_std", 9.0))
    ]


def _spectrum(task, **options):
    rows = [
        {"metric": "eigenvalue", "index": i, "value": 6.0 - i, "round": 20} for i in range(1, 6)
    ]
    return [*rows, {"metric": "eigenvalue_ratio", "index": 5, "value": 5.0, "round": 20}]


def _landscape(task, **options):
    axis = np.linspace(-1, 1, 5)
    return [
        *_spectrum(task),
        *(
            {
                "metric": "loss",
                "x": x,
                "y": y,
                "value": 1 + x * x + y * y / 2,
                "round": 20,
                "slice": "train",
                "n_examples": 100,
            }
            for x in axis
            for y in axis
        ),
    ]


ANSWERS = {
    "final": _final,
    "curve": _curve,
    "drift": _drift,
    "forgetting": _forgetting,
    "personal": _personal,
    "spectrum": _spectrum,
    "landscape": _landscape,
    "cost": lambda task: [{"metric": "flops_relative", "value": 2.0, "scope": "global"}],
    "propositions": lambda task: [{"metric": "proposition_1", "value": 1.0, "scope": "client"}],
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Table of each study as its csv has it, of a scale that leaves nothing out, with as many seeds as the study wants."""
    whole = plan.make_plan(
        replace(scale("smoke"), name="test"),
        [STUDIES[n] for n in DRAWN],
        [],
        tmp_path_factory.mktemp("runs"),
    )
    answer = {}
    for core, task in whole.tasks.items():
        for key, ask in task.asks.items():
            options = {
                k: tuple(v) if isinstance(v, list) else v
                for k, v in whole.scale.options(ask).items()
            }
            answer[core, key] = table(
                ANSWERS[ask.name](task, **options),
                run="r",
                method=task.config.method.name,
                seed=task.config.seed,
            )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gather,
            "answers",
            lambda path: SimpleNamespace(get=lambda *key: answer[path.name, key]),
        )
        found = {
            n: gather.table_of(STUDIES[n], whole, {c: Path(c) for c in whole.tasks}) for n in DRAWN
        }
    made = {}
    for name, frame in found.items():
        made[name] = make.read(files.csv_text(frame))
    return whole, made


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.slow
def test_a_study_draws_and_lays_out_what_its_questions_give(name, tables):
    figure = STUDIES[name].picture(tables[1][name])
    assert isinstance(figure, Figure) and figure.axes
    figure.canvas.draw()
    if STUDIES[name].layout is not None:
        layout = STUDIES[name].layout(tables[1][name])
        assert layout.notna().any(axis=1).all() and layout.notna().any(axis=0).all()


#: The studies that share the FedAvg run of the first column (Table 2 is made end to end elsewhere).
HEADLINE = ("fedsol/table1", "fedsol/fig3", "fedsol/fig6", "fedsol/fig8", "fedsol/fig10")


@pytest.mark.parametrize("name", HEADLINE)
def test_one_finished_run_is_drawn_and_decides_nothing(name, tables):
    """FedAvg on CIFAR-10 with LDA 0.1, one seed, and nothing else."""
    whole = tables[1][name]
    cell = (
        whole["setting"].isin(["", "partition=lda;alpha=0.1"])
        & (whole["method"] == "fedavg")
        & (whole["data"] == "cifar10")
    )
    part = make.read(
        files.csv_text(
            gather.tidy(whole[(whole["origin"] == "reported") | (cell & (whole["seed"] == 0))])
        )
    )
    assert set(part.loc[part["origin"] == "measured", "method"]) == {"fedavg"}
    STUDIES[name].picture(part).canvas.draw()
    if STUDIES[name].layout is not None:
        assert STUDIES[name].layout(part).notna().any(axis=None)
    for claim in claims.claims():
        if claim.study == name:
            with pytest.raises(FldiagError, match=r"nothing was measured of|no rows|no setting"):
                claim.check(part)


@pytest.mark.parametrize(
    "name", ["fedsol/fig4", "fedsol/fig5", "fedsol/table4", "fedsol/table5", "fedsol/table10"]
)
@pytest.mark.slow
def test_one_finished_run_of_fedsol_decides_nothing_or_says_so(name, tables):
    """A radius of 1.5, or the first run of the study; what the others would have asked has no columns."""
    whole = only(tables[1][name], origin="measured", seed=0)
    mine = [
        key
        for key in dict.fromkeys(zip(whole["setting"], whole["label"], strict=True))
        if "1.5" in key[0]
    ] or [(whole["setting"].iloc[0], whole["label"].iloc[0])]
    part = make.read(
        files.csv_text(
            gather.tidy(only(whole, setting=mine[0][0], label=mine[0][1], metric="accuracy"))
        )
    )
    STUDIES[name].picture(part).canvas.draw()
    for claim in claims.claims():
        if claim.study == name:
            with pytest.raises(FldiagError):
                claim.check(part)


@pytest.mark.slow
def test_a_study_that_varies_a_table_stands_beside_its_numbers(tables):
    whole, made = tables
    found = made["fedsol/clients"]
    printed = only(found, origin="reported")
    assert dict(zip(printed["method"], printed["value"], strict=True)) == {
        "fedavg": 56.13,
        "fedprox": 59.8,
        "fedntd": 63.16,
        "fedsol": 64.13,
    }
    assert not len(only(made["fedsol/fig10"], origin="reported"))
    hits = gather.measured(found, STUDIES["fedsol/clients"], whole, set(whole.tasks))
    names = {
        (m, a) for m in printed["method"] for a in ("accuracy", "accuracy_late", "accuracy_ahead")
    }
    assert {(h["method"], h["metric"]) for h in hits} == names - {("fedavg", "accuracy_ahead")}
    assert {h["value"] for h in hits if h["metric"] == "accuracy"} == {60.0}
    assert {h["value"] for h in hits if h["metric"] == "accuracy_late"} == {45.0}, (
        "the mean of rounds 10 and 20"
    )


@pytest.mark.slow
def test_printed_accuracies_are_drawn_where_the_papers_data_were_trained_on(tables):
    found = tables[1]["fedsol/clients"]
    figure = STUDIES["fedsol/clients"].picture(found)
    (ax,) = figure.axes
    lines = len(ax.lines)
    (own,) = (
        STUDIES["fedsol/clients"]
        .picture(
            found.assign(
                trained_on=found["trained_on"].where(found["origin"] == "reported", "cifar10")
            )
        )
        .axes
    )
    levels = {line.get_ydata()[0] for line in own.lines[lines:]}
    assert levels == {56.13, 59.8, 63.16, 64.13} and own.get_ylim()[1] > 64.13


@pytest.mark.slow
def test_a_changed_choice_is_compared_round_by_round(tables):
    """Over the last 20 of the rounds that all lines have, with the deviation of the difference and not of the rounds."""
    study, curve = STUDIES["fedsol/causes"], only(tables[1]["fedsol/causes"], ask="curve")
    step = {"as in Table 2": 0.0, "uniform weights": 2.0, "no augmentation": -3.0}
    one = curve[curve["round"] == curve["round"].max()]
    rows = pd.concat(
        [
            one.assign(
                round=r, value=np.where(r > 20, 30 + 9 * np.sin(r) + one["label"].map(step), 0.0)
            )
            for r in range(1, 41)
        ]
        + [only(one, label="as in Table 2").assign(round=300, value=99.0)],
        ignore_index=True,
    )
    ahead = only(study.derive(rows), metric="accuracy_ahead").set_index("label")
    assert ahead["value"].to_dict() == pytest.approx(
        {"uniform weights": 2.0, "no augmentation": -3.0}
    )
    assert ahead["std"].to_list() == pytest.approx([0.0, 0.0], abs=1e-9)
    late = only(study.derive(rows), metric="accuracy_late").set_index("label")
    assert (
        late.loc["uniform weights", "value"] == pytest.approx(32 + 9 * np.sin(range(21, 41)).mean())
        and late["std"].min() > 6
    )


@pytest.mark.parametrize("name", [n for n in DRAWN if STUDIES[n].pick])
def test_every_reported_number_gets_a_measured_one(name, tables):
    whole, made = tables
    keys = [*gather.KEYS, "metric"]
    mine = {
        tuple(hit[k] for k in keys)
        for hit in gather.measured(made[name], STUDIES[name], whole, set(whole.tasks))
    }
    theirs = {
        (r.setting, r.method, r.model, r.data, r.metric)
        for r in reported.rows("fedsol")
        if r.id == STUDIES[name].id and r.value is not None and r.plain == r.setting
    }
    assert theirs and theirs <= mine


def test_personal_accuracy_stands_at_its_epochs(tables):
    found = tables[1]["fedsol/table9"].query(
        "origin == 'measured' and metric == 'personal_accuracy'"
    )
    expected = found["setting"].str.extract(r"tune_epochs=(\d)")[0].fillna("0").astype(int) + 80.0
    assert (found["value"] == expected).all() and set(expected) == {80.0, 81.0, 85.0}


def test_figure_5_shows_the_strength_of_every_layer_at_rho_1(tables):
    left, right = STUDIES["fedsol/fig5"].picture(tables[1]["fedsol/fig5"]).axes
    assert [bar.get_height() for bar in right.patches] == pytest.approx([0.05, 0.005]) and len(
        left.lines
    ) == 2
    assert {t.over["method.rho"] for t in STUDIES["fedsol/fig5"].trials if t.ask} == {1.0}
    assert min(min(line.get_ydata()) for line in left.lines) > 1, "no share among percentages"
    (left,) = (
        STUDIES["fedsol/fig5"].picture(tables[1]["fedsol/fig5"].query("label == 'fixed'")).axes
    )  # without that run
    assert len(left.lines) == 1


def test_figure_4_has_fedavg_beside_every_radius(tables):
    *panels, last = STUDIES["fedsol/fig4"].picture(tables[1]["fedsol/fig4"]).axes
    lines = [
        [len(line.get_xdata()) for line in ax.lines if line.get_label() in ("FedAvg", "FedSOL")]
        for ax in [*panels, last]
    ]
    assert lines == [[4, 4], [3, 3], [4, 4], [2, 5]], (
        "10 and 20 epochs are both 4 here, and FedAvg has no radius"
    )
    assert [t.get_text() for t in panels[0].get_xticklabels()] == ["10", "20", "40", "80"], (
        "percent of what was sampled, not the paper's share"
    )


def test_figure_3_takes_the_cosine_of_the_steps_over_all_parameters(tables):
    left, right = STUDIES["fedsol/fig3"].picture(tables[1]["fedsol/fig3"]).axes
    curves = [
        np.asarray(line.get_ydata(), dtype=float)
        for line in left.get_lines()
        if line.get_label() == "curve"
    ]
    assert (
        len(curves) == 4
        and curves[0][0] == pytest.approx(-0.5 + 0.01)
        and curves[-1][0] == pytest.approx(-0.5 / 3 + 0.01)
    )
    assert max(line.get_ydata().max() for line in right.get_lines()) < 1, (
        "nothing of single clients or the head"
    )


#: Claims of three seeds whose made-up numbers differ as the paper says.
DIFFERENT = {
    "fedsol-divergence",
    "fedsol-divergence-local",
    "fedsol-forgetting",
    "fedsol-orthogonal",
    "fedsol-proximal",
}


@pytest.mark.parametrize(
    ("orders", "outcome"),
    [((1.05, 1.9), "holds"), ((1.0, 0.9), "does not hold"), ((0.2, 2.0), "does not hold")],
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_proposition_is_judged_by_the_orders_of_its_errors(number, orders, outcome):
    claim = next(c for c in claims.claims() if c.id == f"fedsol-proposition-{number}")
    frame = pd.DataFrame(
        [
            {
                "origin": "measured",
                "label": "FedSOL",
                "seed": seed,
                "metric": f"proposition_{number}_{kind}_order",
                "value": order + 0.01 * seed,
                "predicted": predicted,
            }
            for seed in range(3)
            for kind, order, predicted in (("step", orders[0], 1), ("perturbation", orders[1], 2))
        ]
    )
    assert claim.check(frame).outcome == outcome
    with pytest.raises(FldiagError, match="no rows for this claim"):
        claim.check(frame.drop(columns="predicted"))


@pytest.mark.parametrize(
    "claim",
    [c for c in claims.claims() if c.study in DRAWN and "proposition" not in c.id],
    ids=lambda c: c.id,
)
def test_claims_are_decided_and_the_other_way_round_by_what_is_measured(claim, tables):
    frame = tables[1][claim.study]
    try:
        verdict = claim.check(frame)
    except FldiagError as error:
        pytest.fail(error.what)
    turned = claim.check(frame.assign(value=1 / frame["value"]))
    if claim.id in DIFFERENT:
        assert verdict.outcome == "holds" and verdict.votes == (True,) * STUDIES[claim.study].seeds
        assert turned.outcome == "does not hold" and not any(turned.votes)
    else:  # the made-up numbers are equal, of one seed, or near chance: none of that carries a verdict
        assert (
            verdict.outcome == turned.outcome == "undecided"
            and len(verdict.votes) == len(turned.votes) > 0
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "fedavg"}, 1.0),
        ({"name": "fedsam"}, 2.0),
        ({"name": "fedsol", "part": "full"}, 2.0),
        ({"name": "fedsol"}, 1.0),
    ],
)
def test_cost_is_counted_against_fedavg_without_what_is_done_once_a_round(options, expected):
    over = {f"method.{k}": v for k, v in options.items()}
    config = configs.build(
        configs.load("digits").model_dump(), {**over, "clients.total": 40, "metrics.steps": True}
    )
    run = SimpleNamespace(config=config, path=Path("somewhere"))
    (row,) = questions.answer(questions.Subject(config, run), "cost", {}).to_dict("records")
    assert row["metric"] == "flops_relative" and row["value"] == pytest.approx(expected, abs=0.02)
