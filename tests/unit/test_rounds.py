"""The round loop: events, metrics, which checkpoints hold what, and runs that diverge."""

from dataclasses import replace

import pytest
import torch
from helpers import classification, config, final, images, seeded
from reference import vector
from torch.nn import functional as F

from fldiag import data, models
from fldiag.runs.run import Run
from fldiag.training import train


@pytest.mark.parametrize(("lr", "every"), [(1e6, 1), (0.01, 1), (0.01, 20)])
def test_divergence_is_an_outcome(lr, every, tmp_path):
    """In the first round, after a stored one, and between stored ones."""
    events = []
    settings = config(
        rounds=50, lr=lr, lr_decay=100.0, precision="fp32", checkpoint={"every": every}
    )
    run = train.train(settings, out=tmp_path, on_event=events.append)
    assert run.status == Run.open(tmp_path).status == "diverged"
    assert events[-1]["status"] == "diverged"
    last = run.metrics[run.metrics["metric"] == "diverged"]
    assert len(last) == 1
    assert run.done < int(last["round"].iloc[0]) < 50
    for r in run.rounds:
        assert all(bool(torch.isfinite(v).all()) for v in run.checkpoint(r).state.values())
    assert run.done in (0, *run.rounds)
    again = train.train(settings, out=tmp_path, resume=True)
    assert again.status == "diverged"


def test_events_tell_the_progress(tmp_path):
    events = []
    train.train(config(rounds=3), out=tmp_path, on_event=events.append)
    assert [e["event"] for e in events] == ["start", "round", "round", "round", "end"]
    assert [e["round"] for e in events] == [0, 1, 2, 3, 3]
    assert all({"accuracy", "loss", "seconds"} <= e.keys() for e in events[1:4])
    assert events[-1]["path"] == str(tmp_path)


@pytest.mark.parametrize(("every", "kept"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_checkpoints_every_so_many_rounds_and_after_the_last(every, kept, tmp_path):
    run = train.train(config(rounds=5, checkpoint={"every": every}), out=tmp_path)
    assert run.rounds == kept
    names = sorted(file.name for file in (tmp_path / "rounds").iterdir())
    assert names == [f"{r:04d}.safetensors" for r in kept]
    assert set(run.metrics["round"]) == {1, 2, 3, 4, 5}  # numbers of every round all the same


def test_whose_weights_a_checkpoint_holds(tmp_path):
    held = {}
    for clients in ("none", "auto", "sampled", "all"):
        chosen = config("scaffold", rounds=3, total=5, per_round=2, checkpoint={"clients": clients})
        held[clients] = train.train(chosen, out=tmp_path / clients).checkpoint()
    none, auto, some, everyone = held.values()
    sampled = seeded(0, 5, 2, 2, 8).sampled(2)
    assert none.clients is None and auto.client_ids == some.client_ids == sampled
    assert everyone.client_ids == [0, 1, 2, 3, 4]
    assert torch.equal(auto.clients, some.clients)
    assert torch.equal(everyone.clients[sampled], some.clients)
    before = vector(Run.open(tmp_path / "none").checkpoint(2).state)
    for stored in (auto, some, everyone):
        assert torch.equal(stored.received, before)
        # recording more clients trains nothing else
        assert torch.equal(vector(stored.state), vector(none.state))
    torch.testing.assert_close(some.clients.mean(0), vector(none.state), rtol=0, atol=1e-12)


def test_test_scores_are_those_of_the_stored_weights(tmp_path):
    run = train.train(config(rounds=2), out=tmp_path)
    dataset = data.load("iris")
    model = models.build("mlp", (4,), 3, {"hidden": (7, 5)}).double().eval()
    for r in run.rounds:
        model.load_state_dict(run.checkpoint(r).state)
        logits = model(dataset.normalise(dataset.test_x).double()).detach()
        frame = run.metrics.query("round == @r and slice == 'test'").set_index("metric")
        assert frame.loc["loss", "value"] == pytest.approx(
            float(F.cross_entropy(logits, dataset.test_y)), rel=1e-12
        )
        assert frame.loc["accuracy", "value"] == float(
            (logits.argmax(1) == dataset.test_y).double().mean()
        )
        assert (frame["n_examples"] == 30).all()


def test_the_official_test_set_is_never_trained_on():
    dataset, parts = classification((20, 13, 7))
    spoilt = replace(dataset, test_x=torch.full_like(dataset.test_x, 1e6))
    assert torch.equal(*(final(config(), (d, parts)) for d in (dataset, spoilt)))


def test_augmented_inputs_follow_the_client_and_the_round_not_the_executor():
    dataset, parts = images()
    data = replace(dataset, augment=("hflip",)), parts
    how = {"model": "small_cnn", "model_options": {}}
    looped, stacked, plain = (
        final(config("fedsol", stack=stack, **how).replace(data__augment=on), data)
        for stack, on in (("off", True), ("on", True), ("off", False))
    )
    torch.testing.assert_close(looped, stacked, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(looped, plain, rtol=1e-6)
