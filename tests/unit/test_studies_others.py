"""The studies of FedTOGA, FedProj and FedAlign: valid runs at every scale, and pictures of the tables that their asks give."""

import importlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import images, multiply_adds
from matplotlib.figure import Figure

from fldiag import config as configs
from fldiag import models
from fldiag.errors import FldiagError
from fldiag.models.layers import channels
from fldiag.parts.augmentation import resized
from fldiag.results import files
from fldiag.results.table import table
from fldiag_papers import claims, costs, gather, plan, reported
from fldiag_papers.paper_tables import VALUES, first_rounds
from fldiag_papers.scales import SCALES, scale
from fldiag_papers.study import PROFILED, Trial

OTHERS = {name: study for name, study in reported.studies().items() if study.paper != "fedsol"}
ROUNDS = 4


def answer(trial, ask, seed, number):
    """What an ask gives, with made-up numbers."""
    base, at = 30 + number + seed, {"moment": "aggregated", "scope": "global"}
    if ask.name in ("final", "curve", "best"):
        rows = [
            {"metric": m, "value": base + t, "round": t, "unit": "%", "slice": "test", **at}
            for m in ask.options.get("metrics", ("accuracy",))
            for t in (range(1, ROUNDS + 1) if ask.name == "curve" else [ROUNDS])
        ]
    elif ask.name == "reach":
        rows = [
            {
                "metric": f"rounds_to_{n:g}",
                "value": None,
                "unit": "rounds",
                "index": ROUNDS,
                "scope": "global",
            }
            for n in ask.options["levels"]
        ]
    elif ask.name == "seconds":
        rows = [{"metric": "seconds_per_round", "value": base, "unit": "s", "scope": "global"}]
    elif ask.name == "flops":
        rows = [
            {"metric": m + end, "value": base, "scope": "global"}
            for m in ("MFLOPs", "GFLOPs", "params_M")
            for end in ("", PROFILED)
        ]
    elif ask.name in ("traffic", "examples"):
        names = {
            "traffic": ("uplink", "downlink", "client_state"),
            "examples": ("train_examples", "test_examples"),
        }
        rows = [{"metric": m, "value": base, "scope": "global"} for m in names[ask.name]]
    elif ask.name == "partition":
        rows = [
            {"metric": "count", "client": k, "index": c, "value": k + c, "scope": "client"}
            for k in range(4)
            for c in range(10)
        ]
    elif ask.name in ("landscape", "spectrum"):
        ends = [
            {"metric": "eigenvalue", "index": 1, "value": base},
            {"metric": "eigenvalue_ratio", "index": 5, "value": 2.0},
        ]
        grid = np.linspace(-1, 1, 5)
        rows = (
            ends
            if ask.name == "spectrum"
            else [
                *ends,
                *(
                    {"metric": "loss", "x": x, "y": y, "value": 1 + x * x + 2 * y * y}
                    for x in grid
                    for y in grid
                ),
            ]
        )
        rows = [{**row, "slice": "train", **at} for row in rows]
    else:  # matching
        rows = [
            {"metric": m, "index": 1 if m == "eigenvalue" else None, "value": base, **at}
            for m in ("accuracy", "loss", "eigenvalue", "trace")
        ]
        rows += [
            {
                "metric": m,
                "value": base,
                "scope": "global",
                "diag_mode": "tensor_trace",
                "self_pairs": True,
                "slice": "train",
            }
            for m in ("H_N", "H_D")
        ]
    return table(rows, method=trial.protocol().method.name, seed=seed)


def whole(study, size, monkeypatch):
    """The study's table as it is written and read back, without a run."""
    the_plan = plan.make_plan(size, [study], [], Path("nowhere"))
    numbers = {trial: n for n, trial in enumerate(map(id, study.trials))}
    pieces = []
    for trial in study.trials:
        for place, seed in enumerate(size.seed_list(study.seeds)):
            about = {
                **trial.key(),
                "origin": "measured",
                "label": trial.name,
                "run": trial.name,
                "seed": seed,
                "trained_on": "digits",
                "trained_model": "small_cnn",
            }
            pieces += [
                answer(trial, ask, seed, numbers[id(trial)])
                .astype({"value": float})
                .rename(columns={"data": "on"})
                .assign(ask=ask.name, **about)
                for ask in study.questions_for(trial, place)
            ]
    monkeypatch.setattr(gather, "measured_rows", lambda *_: pieces)
    return gather.table_of(study, the_plan, {})


@pytest.mark.slow
def test_every_trial_is_a_valid_run_at_every_scale(tmp_path):
    texts = {"mnli", "sst2", "marc"}
    every = {t.protocol().data.name for s in OTHERS.values() for t in s.trials if t.train}
    lacking = {"small": {"cifar100", "cinic10", "imagenet200", *texts}, "real": every - texts}
    for size in SCALES.values():
        made = plan.make_plan(size, OTHERS.values(), [], tmp_path)
        assert {t.config.seed for t in made.tasks.values()} >= {0} and all(
            t.asks for t in made.tasks.values()
        )
        left = {
            OTHERS[name].trials[n].protocol().data.name
            for name, n in made.left_out
            if name in OTHERS
        }
        assert left == lacking.get(size.name, set())
    small = plan.make_plan(scale("small"), OTHERS.values(), [], tmp_path)
    assert len(small.tasks) < 250, "runs are shared: hours, not days"


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, s in OTHERS.items() if s.trials])
def test_what_is_asked_can_be_drawn(name, monkeypatch, tmp_path):
    study = OTHERS[name]
    made = whole(study, scale("smoke"), monkeypatch)
    file = tmp_path / "table.csv"
    file.write_text(files.csv_text(made))
    again = pd.read_csv(file, keep_default_na=False, na_values=[""], low_memory=False)
    again[gather.KEYS] = again[gather.KEYS].astype(object).fillna("").astype(str)
    assert isinstance(study.picture(again), Figure)
    if study.layout:
        assert len(study.layout(again))
    if study.pick:
        hits = made[(made["origin"] == "measured") & made["value"].notna()]
        assert set(study.pick) <= set(hits["metric"]) or name in (
            "fedtoga/table3",
            "fedtoga/table8",
        )


def test_every_reported_cell_that_can_be_run_is_a_trial():
    kept = {"table2_reference": "alpha=0.6;clients=100"}
    for study in OTHERS.values():
        keys = {tuple(t.key().values()) for t in study.trials}
        lost = {
            (r.plain, r.method, r.model, r.data)
            for r in reported.rows(study.paper)
            if r.id == study.id
            and r.metric
            and r.method
            and r.model != "mlp_iris"
            and r.plain == r.setting
            and kept.get(study.id, "") in r.setting
        } - keys
        assert not lost, study.name


def test_values_of_a_paper_reach_its_trials():
    """Those of a data set or an id win over those of the paper."""
    for (place, name), over in VALUES.items():
        paper, id, data = (
            place.split("-")[0].split("/")[0],
            place.partition("/")[2],
            place.partition("-")[2],
        )
        mine = [
            (s, t)
            for s in reported.studies().values()
            if s.paper == paper and id in ("", s.id)
            for t in s.trials
            if t.train
            and t.method.partition(":")[0] == name
            and data in ("", t.preset.split("-")[1])
        ]
        for study, t in mine:
            more = {
                k: v
                for where in (f"{paper}-{t.preset.split('-')[1]}", f"{paper}/{study.id}")
                for k, v in VALUES.get((where, name), {}).items()
            }
            assert dict(t.over) | over | more == dict(t.over), (place, name)
        assert mine, (place, name)


def test_servers_that_distil_do_so_as_long_as_the_papers_own():
    of = {(t.method, t.data): t.protocol().method.options for t in OTHERS["fedproj/table1"].trials}
    for pictured in ("cifar10", "cifar100"):
        for method in ("feddf", "fedet"):
            assert {k: of[method, pictured][k] for k in ("epochs", "batch_size", "lr")} == {
                k: of["fedproj", pictured][k] for k in ("epochs", "batch_size", "lr")
            }
    assert of["feddf", "cifar100"]["epochs"] == 3 and of["feddf", "cifar10"]["epochs"] == 1


def test_moon_has_its_head_where_the_paper_has_it_and_small_models_do_not(tmp_path):
    moon = next(t for t in OTHERS["fedalign/table2"].trials if t.method == "moon")
    assert moon.protocol().model.options["projection"] is True
    assert "projection" not in scale("small").config(moon, 0, tmp_path).model.options


def test_who_holds_what_is_asked_once():
    """A partition is the same for every seed: it is asked once."""
    assert [
        len(OTHERS["fedtoga/fig4"].questions_for(t, place))
        for t in OTHERS["fedtoga/fig4"].trials[:1]
        for place in range(3)
    ] == [1, 0, 0]


def test_rounds_to_the_best_of_a_method():
    rows = [
        {
            "method": m,
            "label": m,
            "setting": "s",
            "seed": 0,
            "ask": "curve",
            "metric": "accuracy",
            "round": t,
            "value": v,
        }
        for m, values in {"a": (1, 5, 4), "b": (5, 6, 7), "c": (0, 1, 2)}.items()
        for t, v in enumerate(values, 1)
    ]
    found = first_rounds(pd.DataFrame(rows), "a").set_index("method")["value"]
    assert (found["a"], found["b"]) == (2, 1) and math.isnan(found["c"])
    other = [{**r, "seed": 1} for r in rows if r["method"] != "a"]
    assert (
        set(first_rounds(pd.DataFrame(rows + other), "a")["seed"]) == {0}
        and first_rounds(pd.DataFrame(other), "a").empty
    )


def test_the_cost_of_an_accuracy_is_relative_to_fedtoga_of_the_same_seed():
    module = importlib.import_module("fldiag_papers.fedtoga.table3")
    rows = pd.DataFrame(
        [
            {"metric": "rounds_to_80", "method": m, "seed": s, "value": v, "index": 800}
            for s, pair in enumerate([(100, 300), (200, None)])
            for m, v in zip(("fedtoga", "fedsam"), pair, strict=True)
        ]
    )
    found = module.cost(rows, 80)
    assert dict(
        zip(zip(found["seed"], found["method"], strict=True), found["value"], strict=True)
    ) == {(0, "fedtoga"): 1, (0, "fedsam"): 3, (1, "fedtoga"): 1, (1, "fedsam"): 4}
    assert set(
        module.cost(rows[(rows["seed"] == 0) | (rows["method"] == "fedsam")], 80)["seed"]
    ) == {0}


def test_eighty_percent_that_nobody_has_decides_nothing():
    check = next(c for c in claims.claims() if c.id == "fedtoga-reached").check

    def made(toga, sam):
        return pd.DataFrame(
            [
                {"metric": "rounds_to_80", "origin": "measured", "label": n, "seed": 0, "value": v}
                for n, v in (("fedtoga", toga), ("fedsam", sam))
            ]
        )

    assert check(made(3.0, None)).votes == (True,) and check(made(None, 3.0)).votes == (False,)
    with pytest.raises(FldiagError, match="no run has 80 %"):
        check(made(None, None))


@pytest.mark.parametrize(
    ("late", "says"), [(3.0, "holds"), (1.0, "does not hold"), (None, "does not hold")]
)
def test_the_claim_on_rounds_counts_runs_that_never_get_there(late, says):
    rows = pd.DataFrame(
        [
            {
                "origin": "measured",
                "metric": "rounds_to_best_of_fedsam",
                "label": m,
                "seed": s,
                "value": v,
            }
            for s in range(3)
            for m, v in (("fedtoga", 2.0 if late else None), ("fedsam", late or 4.0))
        ]
    )
    claim = next(c for c in claims.claims() if c.id == "fedtoga-sooner")
    assert claim.check(rows).text.startswith(says)


@pytest.mark.parametrize(
    ("values", "says"),
    [((80, 80, 90), "holds"), ((81, 80, 90), "does not hold"), ((80, 81, 81), "undecided")],
)
def test_iris_numbers_are_those_of_the_last_round_under_their_learning_rate(
    values, says, monkeypatch
):
    study, names = OTHERS["fedproj/fig1"], ("fedavg", "feddf", "fedproj")
    rows = [
        {
            "metric": "accuracy",
            "run": f"one-standardised-lr{lr}-batch5",
            "method": m,
            "seed": s,
            "round": t,
            "moment": moment,
            "scope": "global",
            "value": (v if lr == "0.01" and t == 20 else 1) / 100,
        }
        for lr in ("0.01", "0.001")
        for s in range(3)
        for t in (1, 20)
        for moment in ("received", "aggregated")
        for m, v in zip(names, values, strict=True)
    ]
    monkeypatch.setattr(gather.questions, "answer", lambda *_: table(rows))
    the_plan = plan.make_plan(scale("smoke"), [study], [], Path("nowhere"))
    study = replace(study, alone=study.alone[:1])
    made = gather.table_of(study, the_plan, {})
    found = {
        (h["setting"][-5:], h["method"]): h["value"]
        for h in gather.measured(made, study, the_plan, set(the_plan.tasks))
    }
    assert found["=0.01", "fedproj"] == values[2] and found["0.001", "fedproj"] == 1
    assert set(made.loc[made["origin"] == "reported", "value"]) == {64, 93.33}
    claim = next(c for c in claims.claims() if c.id == "fedproj-iris")
    assert claim.check(made).text.startswith(says)


@pytest.mark.parametrize(
    ("method", "over", "relative"),
    [("fedavg", {}, 1), ("moon", {}, 3), ("fedsam", {}, 2), ("mixup", {}, 1)],
)
@pytest.mark.slow
def test_counted_forward_passes(method, over, relative, monkeypatch):
    made, _ = images((costs.BATCH * costs.STEPS,), shape=(3, 8, 8))
    monkeypatch.setattr(costs, "blank", lambda *_, **__: made)
    config = configs.build(
        Trial("fedalign-cifar10-lda0.5", method, {"model.name": "small_resnet", **over})
        .protocol()
        .model_dump()
    )
    found = costs.flops(config).set_index("metric")["value"]
    module = models.build("small_resnet", (3, 8, 8), 4, {}, seed=0)
    assert found["MFLOPs"] * 1e6 == pytest.approx(
        relative * multiply_adds(module.eval(), torch.zeros(1, 3, 8, 8)), rel=0.01
    )
    if method in costs.STORED:
        size = sum(p.numel() for p in module.parameters()) / 1e6
        assert found["params_M"] == pytest.approx(
            {"fedavg": 1, "moon": 3, "mixup": 1}[method] * size
        )


def small(method, **options):
    """Setup of a method on the small residual network with 8x8 images of three channels and four classes, and an image."""
    made, _ = images((costs.BATCH * costs.STEPS,), shape=(3, 8, 8))
    config = Trial(
        "fedalign-cifar10-lda0.5", method, {"model.name": "small_resnet", **options}
    ).protocol()
    return costs._federation(config, made, 1).setup, made.train_x[:1]


def test_blocks_that_are_dropped_count_with_their_probability():
    """By hand: the branch of block l has two 3x3 convolutions, of 16 channels at 8x8, 32 at 4x4 and 64 at 2x2 positions."""
    branches = [
        9 * 64 * (16 * 16 + 16 * 16),
        9 * 16 * (16 * 32 + 32 * 32),
        9 * 4 * (32 * 64 + 64 * 64),
    ]
    saved = costs._dropped(*small("stochdepth", **{"method.keep_last": 0.4}))
    assert saved == pytest.approx([-(0 * branches[0] + 0.3 * branches[1] + 0.6 * branches[2])] * 2)


def test_sub_networks_count_with_their_mean_over_what_gradaug_draws():
    setup, x = small("gradaug", **{"method.n": 2})
    part, seen = next(iter(setup.method)), {}

    def cost(width, side):
        kept = (*(channels(n, width) for n in (16, 32, 64)), side)
        if kept not in seen:
            seen[kept] = multiply_adds(setup.module.sub, resized(x, side), width)
        return seen[kept]

    drawn = [
        sum(cost(*pair) for pair in part.draw(generator))
        for generator in [torch.Generator().manual_seed(0)]
        for _ in range(4000)
    ]
    mean, pooled = costs._subnetworks(setup, x)
    assert abs(mean - np.mean(drawn)) < 4 * np.std(drawn) / len(drawn) ** 0.5 and pooled > mean


def test_profilers_count_pooling_and_leave_batch_norm_away():
    """The resnet56 of FedAlign's tables: 605,460 weights of convolutions and the classifier, 8,992 of batch-norm."""
    module = costs._federation(
        Trial("fedalign-cifar100-lda0.5", "fedavg").protocol(), costs.blank("cifar100", False), 1
    ).setup.module
    layers = [m for m in module.modules() if isinstance(m, costs.LAYERS)]
    assert sum(p.numel() for m in layers for p in m.parameters()) == 614_452 - 8_992
    other = models.build(
        "resnet18_imagenet", (3, 64, 64), 100, {}, seed=0
    )  # 11.22 is printed for 200 classes
    assert (
        sum(
            p.numel()
            for m in other.modules()
            if isinstance(m, costs.LAYERS)
            for p in m.parameters()
        )
        == 11_227_812 - 9_600
    )
    assert costs._count(module.eval(), torch.zeros(1, 3, 32, 32)).tolist() == [
        87_237_632,
        87_237_632 + 256 * 8 * 8,
    ]


@pytest.mark.parametrize(
    ("method", "up", "down", "kept"),
    [
        ("fedavg", 1, 1, 0),
        ("fedsam", 1, 1, 0),
        ("scaffold", 2, 2, 1),
        ("fedgamma", 2, 2, 1),
        ("fedcm", 1, 2, 0),
        ("feddyn", 1, 1, 1),
        ("fedsmoo", 2, 2, 2),
        ("fedlesam", 1, 1, 1),
        ("fedtoga", 1, 2, 1),
    ],
)
def test_what_a_client_sends_and_keeps(method, up, down, kept):
    config = Trial("fedtoga-cifar10-dir0.6", method, {"model.name": "small_cnn"}).protocol()
    found = costs.traffic(config).set_index("metric")["value"]
    assert [found[m] for m in ("uplink", "downlink", "client_state")] == pytest.approx(
        [up, down, kept], abs=1e-3
    )  # FedLESAM keeps a flag too


@pytest.mark.slow
def test_counts_are_of_the_papers_images_and_classes_at_every_scale(monkeypatch):
    """Without any data: the last layer has the paper's classes."""
    monkeypatch.delenv("FLDIAG_DATA", raising=False)
    (trial,) = [t for t in OTHERS["fedalign/table5_counts"].trials if t.name == "fedavg"]
    for name in SCALES:
        assert scale(name).config(trial).data.name == "cifar100"
    found = costs.flops(trial.protocol()).set_index("metric")["value"]
    assert found["params_M"] == pytest.approx(0.61, abs=0.01) and found["MFLOPs"] == pytest.approx(
        87.3, rel=0.02
    )
