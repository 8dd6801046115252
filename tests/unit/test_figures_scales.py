"""What a scale makes of a paper's protocol, and what it says about it."""

import pytest

from fldiag.errors import FldiagError
from fldiag_papers import reported, scales
from fldiag_papers.paper_tables import trials
from fldiag_papers.reported import FEDERATION, MARKS, rows
from fldiag_papers.scales import LeftOut, questions, reduction, scale
from fldiag_papers.study import Trial, diagnostic, final

FEDSOL = Trial("fedsol-cifar10-lda0.1", "fedsol", {"method.rho": 2.0})


def test_a_trial_is_the_papers_protocol_with_its_overrides():
    made = FEDSOL.protocol()
    assert (made.method.name, made.method.options["rho"], made.rounds, made.clients.total) == (
        "fedsol",
        2.0,
        300,
        100,
    )
    assert scale("paper").config(FEDSOL, 3) == made.replace(seed=3)
    assert Trial("fedsol-cifar10-lda0.1", "strategy:A3").protocol().method.options["id"] == "A3"
    assert FEDSOL.key() == {
        "setting": "",
        "method": "fedsol",
        "model": "fedavg_cifar",
        "data": "cifar10",
    }


def test_paper_bf16_is_the_papers_protocol_in_every_setting_but_the_precision():
    made = scale("paper-bf16").config(FEDSOL, 3)
    assert made == scale("paper").config(FEDSOL, 3).replace(train__precision="bf16")
    assert reduction([(FEDSOL.protocol(), made)]) == "trained in bf16 instead of fp32"
    assert scale("paper-bf16").options(diagnostic("spectrum")) == scale("paper").options(
        diagnostic("spectrum")
    )
    counted = Trial("fedsol-cifar10-lda0.1", train=False)  # what is counted has no precision
    assert (
        scale("paper-bf16").config(counted)
        == scale("paper").config(counted)
        == counted.protocol().replace(seed=0)
    )


def test_small_keeps_what_is_compared_and_shrinks_the_rest(tmp_path):
    made = scale("small").config(FEDSOL, 1, tmp_path)
    assert (made.data.name, made.model.name, made.seed) == ("mnist-2000", "small_cnn", 1)
    assert (
        made.clients.total,
        made.clients.per_round,
        made.rounds,
        made.train.epochs,
        made.train.batch_size,
    ) == (20, 5, 12, 2, 20)
    theirs = FEDSOL.protocol()
    assert (
        made.method == theirs.method
        and made.train.lr == theirs.train.lr
        and made.partition.alpha == theirs.partition.alpha
    )
    assert made.hash == scale("small").config(FEDSOL, 1, tmp_path / "elsewhere").hash, (
        "where data lie decides nothing"
    )


def test_settings_of_a_sweep_stay_apart_when_reduced():
    def of(**over):
        return scale("small").config(
            Trial(
                "fedalign-cifar100-lda0.5",
                "fedavg",
                {k.replace("__", "."): v for k, v in over.items()},
            )
        )

    assert [of(train__epochs=e).train.epochs for e in (10, 20, 30)] == [1, 2, 3]
    assert [of(clients__total=n, clients__per_round=n).clients.total for n in (16, 32, 64)] == [
        8,
        16,
        32,
    ]
    assert of(rounds=25).rounds < of(rounds=100).rounds


@pytest.mark.parametrize("data", ["svhn", "cinic10", "pathmnist", "tissuemnist"])
def test_data_that_a_scale_has_not_are_left_out(data):
    with pytest.raises(LeftOut, match=f"{data} is not part of the scale small"):
        scale("small").config(Trial(f"fedsol-{data}-lda0.1", "fedavg"))


def test_smoke_is_digits_for_everything_and_shares_runs():
    hashes = {
        scale("smoke").config(Trial(f"fedsol-{d}-lda0.1", "fedavg")).hash
        for d in ("cifar10", "svhn", "mnist")
    }
    assert len(hashes) == 1


def test_what_is_not_trained_is_not_reduced():
    trial = Trial("fedsol-cifar10-lda0.1", over={"clients.total": 10}, train=False)
    assert scale("small").config(trial) == trial.protocol()
    made = scale("smoke").config(trial)
    assert (made.data.name, made.clients.total, made.partition.min_size) == ("digits", 10, 10)


def test_projection_starts_within_a_shortened_run():
    trial = Trial("fedproj-cifar10-lda0.3")
    made = scale("small").config(trial)
    assert (
        trial.protocol().method.options["first_round"] == 10
        and made.method.options["first_round"] == 1 < made.rounds
    )
    assert made.data.public == "holdout:500" and made.method.options["memory_size"] == 500


def test_the_sentence_of_the_reduction_is_read_from_the_configs():
    theirs, ours = FEDSOL.protocol(), scale("smoke").config(FEDSOL)
    text = reduction([(theirs, ours)])
    for part in (
        "digits-500 instead of cifar10",
        "10 instead of 100 clients",
        "4 instead of 300 rounds",
        "model small_cnn instead of fedavg_cifar",
    ):
        assert part in text
    assert reduction([(theirs, theirs.replace(seed=7))]) == ""
    assert "train.lr 0.5 instead of 0.01" in reduction([(theirs, theirs.replace(train__lr=0.5))])


def test_options_of_a_study_go_before_those_of_the_scale():
    assert scale("small").options(diagnostic("drift", samples=7))["samples"] == 7
    assert scale("small").options(diagnostic("drift"))["samples"] == 500


def test_seeds():
    assert scale("small").seed_list(3) == [0, 1, 2] and scale("small").seed_list(1) == [0]
    assert scale("smoke").seed_list(3) == [0] and scale("paper").seed_list(1) == [0, 1, 2]


def test_unknown_scale():
    with pytest.raises(FldiagError, match="unknown scale 'tiny'"):
        scales.scale("tiny")


@pytest.mark.parametrize(
    ("paper", "id", "count"),
    [
        ("fedsol", "table2", 8 * 18),
        ("fedsol", "table3", 36),
        ("fedtoga", "table2_reference", 40),
        ("fedproj", "table1", 54),
        ("fedalign", "table4", 30),
        ("fedalign", "table1", 6),
    ],
)
def test_every_cell_of_a_table_is_a_trial_of_its_own(paper, id, count):
    made = trials(paper, id)
    assert len(made) == count == len({(t.setting, t.method, t.model, t.data) for t in made})
    configs = {t.protocol().hash for t in made}
    assert len(configs) == count, "two cells would be one run"


def test_a_trial_of_a_row_says_what_the_row_says():
    row = next(
        r
        for r in rows("fedalign")
        if r.id == "table4" and r.settings["clients"] == "64" and r.settings["ratio"] == "0.25"
    )
    made = next(
        t
        for t in trials("fedalign", "table4")
        if t.setting == row.setting and t.method == row.method
    ).protocol()
    assert (made.clients.total, made.clients.per_round, made.rounds) == (
        64,
        16,
        int(row.settings["rounds"]),
    )
    made = next(
        t for t in trials("fedsol", "table3") if t.model == "vgg11" and t.data == "svhn"
    ).protocol()
    assert (made.model.name, made.data.name) == ("vgg11", "svhn")
    made = next(
        t for t in trials("fedsol", "table5") if "part=body" in t.setting and "rho=0.5" in t.setting
    ).protocol()
    assert (made.method.options["part"], made.method.options["rho"]) == ("body", 0.5)


def test_the_keys_of_settings_are_those_of_the_reported_numbers():
    from tests.unit import test_reported as told

    assert (set(FEDERATION), set(MARKS)) == (told.FEDERATION, told.MARKS)


def test_figures_are_called_by_their_names(monkeypatch):
    from fldiag_papers.study import Study

    known = {
        n: Study("T", "S", "C", None, paper=n.split("/")[0], id=n.split("/")[1])
        for n in ("fedsol/fig6", "fedsol/table1", "fedalign/table1")
    }
    monkeypatch.setattr(reported, "studies", lambda: known)

    def names(*ids):
        return [s.name for s in reported.select(list(ids))]

    assert (
        names() == [*known]
        and names("fedsol") == ["fedsol/fig6", "fedsol/table1"]
        and names("fig6", "fedsol/fig6") == ["fedsol/fig6"]
    )
    for id, says in (
        ("table1", "fedsol/table1, fedalign/table1"),
        ("fig7", "unknown figure 'fig7'"),
        ("fedsol/fig11", "concept"),
    ):
        with pytest.raises(FldiagError, match=says) as error:
            names(id)
        assert error.value.usage


def test_a_caption_says_what_was_asked_with_which_options():
    asks = [
        diagnostic("landscape", seeds=1, points=9),
        diagnostic("landscape", seeds=1),
        diagnostic("spectrum"),
        final(),
    ]
    said = questions(scale("small"), asks, 3)
    assert (
        "landscape (points 31, samples 500, first 1 of the seeds)" in said
        and "spectrum (samples 500)" in said
    )
    assert "landscape (samples 500, first 1 of the seeds)" in said, (
        "what a study gives itself is in its own words"
    )
    assert "final" not in said and questions(scale("small"), [final()], 1) == ""
