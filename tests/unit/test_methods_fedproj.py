"""FedProj: the projection against its quadratic programme and the released rule, the penalty against differences."""

import numpy as np
import pytest
import torch
from helpers import classification, close, config, play, trace
from scipy.optimize import minimize
from test_methods_distill_server import PUBLIC, STRONG, build, end, mean_of_clients
from torch.func import functional_call
from torch.nn import functional as F

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.parts import projection
from fldiag.parts.ensemble import Ensemble, mean
from fldiag.parts.projection import MemoryProjection, endless, project
from fldiag.seeding import torch_rng
from fldiag.training import train
from fldiag.training.setup import Setup

OFF = {"proj_rate": 0.0, "gamma_wd": 0.0}
WHOLE = {**STRONG, "memory_batch": 23, "eps": 0.0}  # every memory minibatch is the whole memory
rng = np.random.default_rng(0)
G, H = (
    torch.from_numpy(rng.normal(size=(40, 6)) * rng.uniform(0.01, 3, size=(40, 1)))
    for _ in range(2)
)


def inner(a, b):
    return (a * b).sum(-1)


# --- the rule


@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_T_PROJ_2_T_PROJ_3_no_conflict_is_left_and_agreement_is_untouched(eps):
    out, before, square = project(G, H, eps=eps), inner(G, H), inner(H, H)
    conflict = before < 0
    assert 5 < int(conflict.sum()) < 35
    assert torch.equal(out[~conflict], G[~conflict])
    left = inner(out, H)[conflict]
    # for eps = 0 zero, as a difference of inner products
    close(
        left,
        before[conflict] * eps / (square[conflict] + eps),
        terms=6,
        size=(G.norm(dim=1) * H.norm(dim=1)).max(),
    )


def test_T_PROJ_4_it_is_the_nearest_gradient_without_conflict():
    for g, h, ours in zip(G[:12], H[:12], project(G, H)[:12], strict=True):
        found = minimize(
            lambda v, g=g: 0.5 * ((v - g.numpy()) ** 2).sum(),
            np.zeros(6),
            jac=lambda v, g=g: v - g.numpy(),
            constraints={
                "type": "ineq",
                "fun": lambda v, h=h: v @ h.numpy(),
                "jac": lambda v, h=h: h.numpy(),
            },
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        np.testing.assert_allclose(ours, found.x, atol=1e-6)
        multiplier = float(
            inner(ours - g, h) / inner(h, h)
        )  # KKT: g' = g + lambda h, lambda >= 0, lambda <g', h> = 0
        assert multiplier >= 0
        close(ours, g + multiplier * h, terms=6)
        close(
            multiplier * inner(ours, h),
            torch.zeros((), dtype=g.dtype),
            terms=6,
            size=multiplier * ours.norm() * h.norm(),
        )


def test_scale_small_norms_and_the_clamp():
    torch.testing.assert_close(project(G, 1e3 * H), project(G, H), rtol=1e-12, atol=1e-14)
    small = inner(H, H) <= 0.5
    assert 0 < int(small.sum()) < 40
    assert torch.equal(
        project(G, H, min_norm_sq=0.5), torch.where(small[:, None], G, project(G, H))
    )
    coefficient = (inner(G, H) / inner(H, H)).clamp(-0.3, 0)
    close(project(G, H, clamp=0.3), G - coefficient[:, None] * H, terms=6)


def test_minibatches_of_the_memory_run_through_it_again_and_again():
    stream = endless(7, 3, torch.Generator().manual_seed(0))
    for _ in range(3):
        epoch = torch.cat([next(stream), next(stream)])
        assert len(set(epoch.tolist())) == 6
        assert set(epoch.tolist()) < set(range(7))


# --- the method and its relatives


@pytest.mark.parametrize("stack", ["off", "on"])
def test_T_PROJ_1_without_projection_and_penalty_it_is_feddf_and_without_epochs_fedavg(stack):
    assert torch.equal(
        end("fedproj", {**OFF, **STRONG}, stack=stack), end("feddf", STRONG, stack=stack)
    )
    assert torch.equal(
        end("fedproj", {**OFF, "epochs": 0}, stack=stack), end("fedavg", stack=stack)
    )
    assert not torch.allclose(
        end("fedproj", {"epochs": 0}, stack=stack), end("fedavg", stack=stack), rtol=1e-6
    )


def test_T_PROJ_1_the_scale_of_the_memory_loss_is_of_no_consequence(monkeypatch):
    options = {**STRONG, "eps": 0.0}
    before, formula = end("fedproj", options), projection.divergence
    monkeypatch.setattr(projection, "divergence", lambda *args: 7.0 * formula(*args))
    assert float((end("fedproj", options) - before).abs().max()) <= 1e-11
    assert not torch.allclose(end("fedproj", {**options, "eps": 1.0}), before, rtol=1e-6)


@pytest.mark.parametrize("stack", ["off", "on"])
def test_T_PD_1_the_rate_runs_from_feddf_to_fedproj(stack):
    """With a rate between, each client of a round does the one or the other, with the same minibatches."""
    rows = {}
    for rate in (0.0, 0.5, 1.0):
        made = build("fedproj", {"gamma_wd": 0.0, "proj_rate": rate, **STRONG}, stack=stack)
        rows[rate] = [seen.rows for seen, _ in play(made, 2)] + [made.w]
    plain = build("feddf", STRONG, stack=stack)
    assert torch.equal(rows[0.0][1], play(plain, 2)[1][0].rows)
    assert torch.equal(rows[0.0][2], plain.w)
    assert torch.equal(rows[1.0][2], end("fedproj", {"gamma_wd": 0.0, **STRONG}, stack=stack))
    projects = [
        float(torch.rand((), generator=torch_rng(0, "projection", 1, k))) < 0.5 for k in range(3)
    ]
    assert len(set(projects)) == 2
    for k, on in enumerate(projects):
        gap = {r: float((rows[0.5][1][k] - rows[r][1][k]).abs().max()) for r in (0.0, 1.0)}
        assert gap[float(on)] <= 1e-12
        assert gap[float(not on)] > 1e-5


def memory_gradient(setup, w, x, z, tau=3.0, reverse=False):
    """Gradient of mean_x KL(softmax(z/tau) || softmax(f(x; w)/tau)) through the plain module, and the loss."""
    w = w.detach().clone().requires_grad_()
    logits = functional_call(setup.module, setup.network.layout.views(w), (x,))
    q, p = F.log_softmax(logits / tau, -1), F.log_softmax(z / tau, -1)
    p, q = (q, p) if reverse else (p, q)
    loss = (p.exp() * (p - q)).sum(-1).mean()
    return torch.autograd.grad(loss, w)[0], float(loss.detach())


def local_steps(options, **more):
    """Second-round steps of client 0 (w, raw gradient, projected gradient), its federation and the teacher's logits."""
    spies = []
    for raw in (True, False):
        made = build("fedproj", {**WHOLE, **options}, **more)
        [(seen, _)] = play(made)
        teacher = mean_of_clients(made, seen)
        spies.append(trace(made, raw=raw))
        play(made)
    raw, used = spies
    here = [i for i, ids in enumerate(raw.ids) if 0 in ids]
    return [(raw.w[i][0], raw.g[i][0], used.g[i][0]) for i in here], made.setup, teacher


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tau": 1.0},
        {"direction": "student_teacher"},
        {"official_trunc": True},
        {"memory_batch": 5},
    ],
)
def test_local_steps_take_the_gradient_that_the_definition_gives(options):
    steps, setup, teacher = local_steps(options)
    memory, reverse = setup.method.parts[0].memory(0, 1, 23), "direction" in options
    stream = endless(23, options.get("memory_batch", 23), torch_rng(0, "memory batches", 1, 0))
    x, z = PUBLIC, teacher
    if "official_trunc" in options:
        x, z = x.to(torch.int64).double(), z.to(torch.int64).double()
    assert len(steps) == 6
    met = 0
    for w, g, used in steps:
        batch = memory[next(stream)]
        h, _ = memory_gradient(setup, w, x[batch], z[batch], options.get("tau", 3.0), reverse)
        conflict = float(g @ h) < 0
        met += conflict
        expected = g - (g @ h) / (h @ h) * h if conflict else g
        assert float((used - expected).abs().max()) <= 1e-12
        assert conflict or torch.equal(used, g)
    assert met


def test_T_PROJ_5_to_first_order_a_step_does_not_raise_the_loss_on_the_memory():
    steps, setup, z = local_steps({})
    highest = 0.0
    for w, g, used in steps:
        _, before = memory_gradient(setup, w, PUBLIC, z)
        for eta in (1e-2, 1e-3, 1e-4):
            rise = [memory_gradient(setup, w - eta * v, PUBLIC, z)[1] - before for v in (used, g)]
            assert rise[0] <= 0.02 * eta**2
        highest = max(highest, rise[1] / eta**2)
    assert highest > 1  # the local gradient itself does raise it


# --- the penalty of the server


@pytest.mark.parametrize("reference", ["avg", "prev_global", "clients"])
@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_distillation_descends_its_objective(reference, direction):
    """Two full-batch gradient steps against central differences of tau^2 KL + gamma penalty."""
    options = {
        "gamma_wd": 0.3,
        "reference": reference,
        "direction": direction,
        "optimizer": "sgd",
        "lr": 0.05,
        "epochs": 2,
        "batch_size": 100,
        "tau": 2.0,
        "proj_rate": 0.0,
    }
    made = build("fedproj", options)
    [(seen, _)] = play(made)
    z, average = mean_of_clients(made, seen), seen.mean(seen.rows, seen.p)
    anchors = {"avg": average[None], "prev_global": seen.w_g[None], "clients": seen.rows}[reference]

    def objective(w):
        distance = (w - anchors).square().sum(-1).mean()
        return 4 * memory_gradient(made.setup, w, PUBLIC, z, 2.0, direction == "student_teacher")[
            1
        ] + 0.3 * float(distance)

    w = average
    for _ in range(2):
        steps = torch.eye(len(w), dtype=w.dtype) * 1e-5
        w = w - 0.05 * torch.tensor([(objective(w + e) - objective(w - e)) / 2e-5 for e in steps])
    assert float((made.w - w).abs().max()) <= 1e-9


def test_T_PROJ_6_the_penalty_around_the_average_is_flat_at_the_first_step():
    once = {"proj_rate": 0.0, "optimizer": "sgd", "lr": 0.05, "batch_size": 100}
    plain = end("feddf", {k: v for k, v in once.items() if k != "proj_rate"}, rounds=1)
    for reference in ("avg", "prev_global", "clients"):
        same = torch.equal(
            end("fedproj", {**once, "gamma_wd": 5.0, "reference": reference}, rounds=1), plain
        )
        assert same == (reference == "avg")
    twice = [
        end("fedproj", {**once, "epochs": 2, "gamma_wd": gamma}, rounds=1) for gamma in (0.0, 0.5)
    ]
    assert (
        float((twice[0] - twice[1]).abs().max()) > 1e-6
    )  # the reference is a copy, not the student itself


# --- what is sent, and when


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


def test_rounds_that_end_before_they_begin_are_refused():
    build("fedproj", {"first_round": 3, "last_round": 3})
    with pytest.raises(FldiagError, match="last_round = 2 comes before first_round = 3"):
        build("fedproj", {"first_round": 3, "last_round": 2})


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


def test_stopped_and_resumed_it_ends_in_the_same_bits(tmp_path):
    data, parts = classification()
    chosen = config("fedproj", {**STRONG, "memory_size": 11, "proj_rate": 0.7}, rounds=3)

    def go(out, **more):
        return train.train(
            chosen,
            out=tmp_path / out,
            setup=Setup(chosen, dataset=data, parts=parts, public=PUBLIC),
            **more,
        )

    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go("cut", on_event=stop)
    cut, whole = go("cut", resume=True), go("whole")
    assert all(
        torch.equal(v, whole.checkpoint().state[k]) for k, v in cut.checkpoint().state.items()
    )
    assert cut.metrics["value"].equals(whole.metrics["value"])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5)])
def test_a_stack_projects_as_its_clients_one_by_one(precision, tolerance):
    a, b = (
        build("fedproj", {**STRONG, "optimizer": "sgd"}, precision=precision, stack=s)
        for s in ("off", "on")
    )
    for (one, _), (other, _) in zip(play(a, 3), play(b, 3), strict=True):
        assert float((one.rows - other.rows).abs().max()) <= tolerance
    assert float((a.state["teacher"] - b.state["teacher"]).abs().max()) <= 10 * tolerance


def test_defaults():
    memory, distillation = registry.method.get("fedproj").build().parts
    assert isinstance(memory, MemoryProjection)
    assert memory.teacher is distillation.teacher  # computed once a round
    assert isinstance(memory.teacher, Ensemble)
    assert memory.teacher.combine is mean
