"""FedProj: its memory, when it projects, and what is sent."""

import pytest
import torch
from helpers import classification, config, play
from test_methods_distill_server import PUBLIC, build, mean_of_clients

from fldiag.parts.projection import endless
from fldiag.training import train
from fldiag.training.setup import Setup


def test_minibatches_of_the_memory_run_through_it_again_and_again():
    stream = endless(7, 3, torch.Generator().manual_seed(0))
    for _ in range(3):
        epoch = torch.cat([next(stream), next(stream)])
        assert len(set(epoch.tolist())) == 6
        assert set(epoch.tolist()) < set(range(7))


def test_the_memory_is_drawn_anew_each_round_and_holds_the_teachers_logits():
    made = build("fedproj", {"memory_size": 9})
    part, memories = made.setup.method.parts[0], []
    assert made.state == {}
    for t in (1, 2, 3):
        [(seen, _)] = play(made)
        memories.append(part.memory(0, t, 23))
        assert torch.allclose(
            made.state["teacher"], mean_of_clients(made, seen)[memories[-1]], atol=1e-13
        )
    assert made.state["teacher"].shape == (9, 3)
    assert len({tuple(sorted(m.tolist())) for m in memories}) == 3
    assert all(len(set(m.tolist())) == 9 for m in memories)
    whole = build("fedproj", {"memory_size": -1}).setup.method.parts[0]
    assert sorted(whole.memory(0, 1, 23).tolist()) == list(range(23))


@pytest.mark.parametrize(
    ("options", "present"),
    [
        ({}, [1, 2, 3, 4]),
        ({"first_round": 2, "last_round": 3}, [2, 3]),
        ({"memory_size": 0}, []),
        ({"proj_rate": 0.0}, []),
    ],
)
def test_projection_is_on_in_the_rounds_asked_for(options, present):
    """The teacher's logits are sent in these rounds only; the first round of all has none."""
    made = build("fedproj", {"epochs": 0, **options})
    plain = build("fedavg")
    for t in range(5):
        assert ("teacher" in made.state) == (t in present)
        plain.w = made.w.clone()
        [(seen, _)], [(other, _)] = play(made), play(plain)
        assert torch.equal(seen.rows, other.rows) == (t not in present)


@pytest.mark.parametrize(("size", "precision", "item"), [(-1, "fp64", 8), (10, "fp32", 4)])
def test_bytes_count_the_logits_on_the_memory(size, precision, item, tmp_path):
    data, parts = classification()
    chosen = config("fedproj", {"memory_size": size}, precision=precision)
    run = train.train(
        chosen, out=tmp_path, setup=Setup(chosen, dataset=data, parts=parts, public=PUBLIC)
    )
    frame = run.metrics.set_index(["metric", "round"])["value"]
    vector = item * sum(v.numel() for v in run.checkpoint().state.values())
    assert frame["uplink", 1] == frame["uplink", 2] == vector
    assert frame["downlink", 1] == vector
    assert frame["downlink", 2] == vector + item * 3 * (23 if size < 0 else size)
