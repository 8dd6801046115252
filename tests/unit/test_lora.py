"""Adapters: what is trained, kept and found again; the numbers of the diagnostic against closed forms."""

import copy
import math
import pickle
from dataclasses import replace

import helpers
import kinds
import numpy as np
import pytest
import torch
from histories import history, moved, stored
from torch import nn

import fldiag
from fldiag import models
from fldiag.diagnostics.geometry import effective_rank
from fldiag.diagnostics.lora import layer_rows, procrustes, row_space
from fldiag.errors import FldiagError
from fldiag.models import lora
from fldiag.models.lora import adapters, with_adapters

EYE = torch.eye(6, dtype=torch.float64)
HALF = torch.tensor([0.5, 0.5])


def measured(a, b, p=HALF, scale=1.0):
    """(metric, index) -> value, of clients 3 and 7."""
    return {
        (r["metric"], r.get("index")): r["value"]
        for r in layer_rows(torch.stack(a), torch.stack(b), p, scale, [3, 7])
    }


def space(a):
    return row_space(a, torch.finfo(torch.float64).eps)


def column(*entries):
    """[6, r] with the unit vectors times these factors, each (vector, factor)."""
    return torch.stack([factor * EYE[i] for i, factor in entries], 1)


# --- closed forms


def test_opposite_factors_cancel_when_they_are_averaged_though_their_products_are_equal():
    a, b = EYE[:1], column((0, 2.0))
    found = measured([a, -a], [b, -b])
    assert found["aggregation_error", None] == pytest.approx(1, rel=1e-14) and found[
        "update_norm", None
    ] == pytest.approx(2, rel=1e-14)
    assert found["misalignment", None] == pytest.approx(0, abs=1e-7), "the row space has no sign"


@pytest.mark.parametrize("mixing", [torch.ones(1, 6, dtype=torch.float64) / 3, EYE[:1]])
def test_products_that_cancel_leave_nothing_to_relate_to(mixing):
    b = column((0, 0.1))
    found = measured([mixing, mixing], [b, -b])
    assert (
        found["update_norm", None] <= 1e-16
        and found["aggregation_error", None] is None
        and found["effective_rank", None] is None
    )


def test_clients_that_share_one_factor_lose_nothing():
    rng = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((2, 6), (2, 5, 2))
    )
    for same in (measured([a, a], [*b]), measured([a, 3 * a], [b[0], b[0]])):
        assert same["aggregation_error", None] <= 1e-14


@pytest.mark.parametrize("outputs, inputs", [(5, 6), (20, 17)])
def test_the_error_is_its_definition_with_weights_and_scale(outputs, inputs):
    """Also where the product is larger than its factors, and is not formed."""
    rng = torch.Generator().manual_seed(1)
    a, b = (
        torch.randn(2, *shape, generator=rng, dtype=torch.float64)
        for shape in ((3, inputs), (outputs, 3))
    )
    p, s = np.array([0.8, 0.2]), 4.0
    mean = sum(w * s * (y.numpy() @ x.numpy()) for w, x, y in zip(p, a, b, strict=True))
    sent = (
        s
        * sum(w * y.numpy() for w, y in zip(p, b, strict=True))
        @ sum(w * x.numpy() for w, x in zip(p, a, strict=True))
    )
    found = measured([*a], [*b], torch.from_numpy(p), s)
    assert found["aggregation_error", None] == pytest.approx(
        np.linalg.norm(mean - sent) / np.linalg.norm(mean), rel=1e-12
    )


def test_clients_that_use_different_directions():
    """U = diag(3, 1)/2."""
    found = measured([EYE[:1], EYE[1:2]], [column((0, 3.0)), column((1, 1.0))])
    assert found["effective_rank", None] == pytest.approx(
        math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)), rel=1e-12
    )
    assert found["misalignment", None] == pytest.approx(math.sqrt(2), rel=1e-12), (
        "rank 1 at right angles"
    )
    assert effective_rank(torch.tensor([5.0, 5.0, 5.0, 0.0])) == pytest.approx(3, rel=1e-6)
    a, b = torch.stack([EYE[:2], EYE[[0, 2]]]), torch.ones(2, 6, 2).double()
    *_, row = layer_rows(a, b, HALF, 1.0, [3, 7])  # one direction of two is common
    assert row["scaled"] == pytest.approx(math.sqrt(2) / 2, rel=1e-12)


def test_misalignment_knows_spaces_not_their_bases():
    mixing = torch.tensor([[2.0, 1.0], [-3.0, 0.5]], dtype=torch.float64)
    assert procrustes(space(EYE[:2]), space(mixing @ EYE[:2])) <= 1e-7
    assert procrustes(space(EYE[:2]), space(EYE[[0, 2]])) == pytest.approx(math.sqrt(2), rel=1e-12)
    assert procrustes(space(EYE[:2]), space(EYE[2:4])) == pytest.approx(2, rel=1e-12)
    tilted = torch.stack([EYE[0], math.cos(0.3) * EYE[1] + math.sin(0.3) * EYE[2]])
    assert procrustes(space(EYE[:2]), space(tilted)) == pytest.approx(
        math.sqrt(2 - 2 * math.cos(0.3)), rel=1e-9
    )
    assert space(torch.stack([EYE[0], 2 * EYE[0]])).shape == (6, 1), "dependent rows span a line"
    assert (
        procrustes(space(EYE[:1]), space(0 * EYE[:1])) == 1
        and procrustes(space(0 * EYE[:1]), space(0 * EYE[:1])) == 0
    )


def test_nothing_is_said_while_all_b_are_zero():
    found = measured([EYE[:1], EYE[1:2]], [torch.zeros(6, 1), torch.zeros(6, 1)])
    assert found and set(found.values()) == {None}
    one = measured([EYE[:1], EYE[1:2]], [column((0, 1.0)), torch.zeros(6, 1)])
    assert one["aggregation_error", None] == pytest.approx(math.sqrt(0.5), rel=1e-12)


def test_the_picture_shows_the_six_layers_that_lose_most():
    (legend,) = kinds.adapters().legends
    assert {t.get_text() for t in legend.get_texts()} == {f"layer{i}.query" for i in range(2, 8)}


# --- the model


@pytest.mark.parametrize(
    "name, shape, on",
    [
        ("bert_tiny", (6,), "attention"),
        ("bert_tiny", (6,), "all"),
        ("sl_vit", (3, 8, 8), "all"),
        ("mlp", (6,), ""),
    ],
)
def test_an_adapted_model_begins_as_its_base_and_holds_the_adapters_alone(name, shape, on):
    options = {"vocabulary": 50} if name == "bert_tiny" else {}
    plain, made = (
        models.build(name, shape, 3, {**options, **more}, seed=4)
        for more in ({}, {"lora_rank": 2, "lora_alpha": 6.0, **({"lora_on": on} if on else {})})
    )
    x = helpers.inputs(plain, 5, *shape)
    with torch.no_grad():
        base = lora.frozen_weights(made)
        assert not base.keys() & {n for n, _ in (*made.named_parameters(), *made.named_buffers())}
        head = "head" if name == "sl_vit" else "classifier"
        assert {
            n.rpartition(".")[2] for n, _ in made.named_parameters() if not n.startswith(head)
        } == {"A", "B"}
        getattr(made, head).load_state_dict(getattr(plain, head).state_dict())
        lora.load_frozen(
            made, {n: dict(plain.named_parameters())[n.replace(".base.", ".")] for n in base}
        )
        torch.testing.assert_close(made(x), plain(x), rtol=0, atol=0)
        for p in made.parameters():
            p += 0.1 * torch.randn(p.shape)
        assert {f.scale for f in adapters(made).values()} == {3.0}
        double = made.double()
        x = x if x.dtype == torch.int64 else x.double()
        weights, trained = dict(plain.double().named_parameters()), dict(double.named_parameters())
        for layer, f in adapters(double).items():
            weights[f"{layer}.weight"] += f.scale * trained.pop(f.b) @ trained.pop(f.a)
        for n, p in trained.items():
            weights[n].copy_(p)
        torch.testing.assert_close(plain(x), double(x))
        assert all(t.dtype == torch.float64 for t in lora.frozen_weights(double).values())


def test_frozen_weights_go_where_their_module_goes():
    made = models.build("mlp", (6,), 3, {"lora_rank": 2})
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        other.double()
        assert {t.dtype for t in lora.frozen_weights(other).values()} == {torch.float64}
    assert {t.dtype for t in lora.frozen_weights(made).values()} == {torch.float32}


def test_the_recorder_keeps_what_is_trained(tmp_path):
    """As with adapters of another package: the loop's own modules and state_dicts hold the frozen weights, too."""
    data, parts = helpers.classification((20, 13))
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    ends = [copy.deepcopy(net) for _ in parts]
    for k, end in enumerate(ends):
        nn.init.constant_(end[2].weight, 0.1 * (k + 1))
    with fldiag.Recorder(
        tmp_path / "run", net, data=(data.train_x, data.train_y), clients=parts, trainable=True
    ) as rec:
        rec.round(received=net.state_dict(), clients=dict(enumerate(ends)), aggregated=ends[0])
    run = fldiag.load(
        tmp_path / "run", model=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    )
    assert {*run.checkpoint().state} == {
        "2.weight",
        "2.bias",
    } and run.checkpoint().clients.shape == (2, 18)
    loss = fldiag.diagnose(run, "spectrum", k=1).query("metric == 'loss'")["value"].item()
    assert loss == pytest.approx(
        float(nn.functional.cross_entropy(ends[0](data.train_x), data.train_y).detach()), rel=1e-5
    )
    problem = fldiag.Problem(
        ends[0], nn.functional.cross_entropy, (data.train_x, data.train_y), trainable=True
    )
    tables = [fldiag.diagnose(target, "spectrum", k=1, trace=True) for target in (run, problem)]
    for name in ("trace", "diagonal_norm"):
        ours, theirs = (t[t["metric"] == name]["value"].iloc[0] for t in tables)
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_rank_that_is_none_is_refused():
    with pytest.raises(FldiagError, match="rank 9 for a layer of 6 inputs"):
        models.build("mlp", (6,), 3, {"lora_rank": 9})


# --- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = helpers.config(
        "fedavg", rounds=3, seed=5, model_options={"hidden": (7, 5), "lora_rank": 2}
    )
    return fldiag.train(config, out=tmp_path_factory.mktemp("lora") / "run")


def test_a_run_holds_its_base_once_and_adapters_in_every_round(run):
    state = run.checkpoint().state
    assert {*state} == {f"fc{i}.{part}" for i in (1, 2) for part in "AB"} | {
        "classifier.weight",
        "classifier.bias",
    }
    assert run.checkpoint().clients.shape[1] == sum(t.numel() for t in state.values())
    assert "base.safetensors" in run.files
    start, end = (
        fldiag.diagnose(run.checkpoint(r), "spectrum", seed=0)["value"].iloc[0] for r in (1, 3)
    )
    assert start != end


def test_adapters_without_their_base_are_not_guessed(run, tmp_path):
    alone = tmp_path / "mailed.safetensors"
    alone.write_bytes((run.path / "rounds" / "0003.safetensors").read_bytes())
    assert len(fldiag.diagnose(fldiag.load(alone), "spectrum")), (
        "the seed makes the same base again"
    )
    manifest = {**run.checkpoint().manifest, "seed": 6}
    other = fldiag.load(alone)
    other = type(other)(alone, other.state, manifest, other.received, other.clients)
    with pytest.raises(
        FldiagError, match=r"holds adapters, and the frozen weights beneath them .* are not here"
    ):
        fldiag.diagnose(other, "spectrum")
    inside = replace(run.checkpoint(3), manifest=manifest)
    a, b = (
        fldiag.diagnose(c, "spectrum", k=1)["value"].iloc[-1] for c in (inside, run.checkpoint())
    )
    assert a == pytest.approx(b), "the run's own file has it"


def test_the_diagnostic_of_a_run_and_its_picture(run):
    table = fldiag.diagnose(run, "lora")
    assert {*table["layer"].dropna()} == {"fc1", "fc2"} and {*table["round"]} == {1, 2, 3}
    errors = table[table["metric"] == "aggregation_error"]["value"]
    assert (errors > 0).all() and len(fldiag.draw(table).axes) == 3
    with pytest.raises(FldiagError, match="its model has no low-rank adapters"):
        fldiag.diagnose(
            fldiag.train(helpers.config(rounds=1), out=run.path.parent / "plain"), "lora"
        )


def test_a_client_that_diverged_is_left_out_and_said():
    data, parts = helpers.classification((20, 13, 9))
    net = with_adapters(
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), 2, 4.0, ("0",), "2"
    )
    w, clients = moved(net)
    lost = [*clients[:2], clients[2] * math.nan]
    three, two = (
        fldiag.diagnose(history(net, data, parts, stored(w, some, clients[0])), "lora")
        for some in (lost, clients[:2])
    )
    assert three[three["metric"] == "missing"]["client"].tolist() == [2]
    errors = [t[t["metric"] == "aggregation_error"]["value"].item() for t in (three, two)]
    assert errors[0] == pytest.approx(errors[1])
