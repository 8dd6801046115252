"""FedProj's text client (M 1.32) against a spelling of its own: Adam, local step decay and projection, in float64."""

import math

import torch
from helpers import Recorded, config, play
from torch.nn import functional as F

from fldiag import models
from fldiag.data import Dataset
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

LR, TAU, EPS, EPOCHS, CLASSES = 1e-3, 3.0, 1e-8, 2, 3
BATCHES = [[[0, 1, 2, 3], [4, 5, 6]], [[0, 1, 2], [3, 4]]]  # of one epoch, of two clients
generator = torch.Generator().manual_seed(0)
PRIVATE, LABELS = (
    torch.randint(4, 30, (12, 7), generator=generator),
    torch.tensor([0] * 7 + [1, 2, 1, 2, 1]),
)
PUBLIC = torch.randint(4, 30, (9, 7), generator=generator)


NET = models.build("bert_tiny", (7,), CLASSES, {"vocabulary": 30, "places": 7}).double()


def model(w):
    torch.nn.utils.vector_to_parameters(w.clone(), NET.parameters())
    return NET


def gradient(net, loss):
    """All parameters' gradients as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*net.parameters()])])


def client(w, mine, labels, batches, teacher):
    """The specification, a line a rule: weights at the end, the largest gradient, and how many steps were in conflict."""
    w, m, s, conflicts, largest = w.clone(), torch.zeros_like(w), torch.zeros_like(w), 0, 0.0
    for t in range(EPOCHS * len(batches)):
        rate = (
            LR if t // len(batches) < EPOCHS // 2 else 0.1 * LR
        )  # StepLR after E // 2 local epochs
        batch, net = batches[t % len(batches)], model(w)
        g = gradient(net, F.cross_entropy(net(mine[batch]), labels[batch]))
        if teacher is not None:
            student = net(PUBLIC).reshape(-1, CLASSES)
            divergence = F.kl_div(
                F.log_softmax(student / TAU, 1),
                F.softmax(teacher.reshape(-1, CLASSES) / TAU, 1),
                reduction="batchmean",
            )
            h = gradient(net, divergence)
            if torch.dot(g, h) < 0:
                conflicts, g = conflicts + 1, g - torch.dot(g, h) / (torch.dot(h, h) + EPS) * h
        m, s, largest = (
            0.9 * m + 0.1 * g,
            0.999 * s + 0.001 * g * g,
            max(largest, float(g.abs().max())),
        )
        w = w - rate * (m / (1 - 0.9 ** (t + 1))) / ((s / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8)
    return w.detach(), largest, conflicts


def test_the_text_client_steps_as_the_specification_says():
    data = Dataset("tokens", PRIVATE, LABELS, PRIVATE[:3], LABELS[:3], CLASSES)
    parts, positions = (
        [torch.arange(7).numpy(), torch.arange(7, 12).numpy()],
        [{k: b * EPOCHS for k, b in enumerate(BATCHES)}] * 2,
    )
    chosen = config(
        "fedproj",
        {"epochs": 0, "tau": TAU, "memory_batch": len(PUBLIC)},
        total=2,
        model="bert_tiny",
        model_options={"vocabulary": 30, "places": 7},
        epochs=EPOCHS,
        local_decay=0.1,
        optimizer="adam",
        lr=LR,
        momentum=0.0,
        lr_decay=1.0,
        weight_decay=0.0,
    )
    made = Federation(
        Setup(
            chosen,
            dataset=data,
            parts=parts,
            schedule=Recorded([[0, 1]] * 2, positions),
            public=PUBLIC,
        )
    )
    w, teacher, met, steps = made.w, None, 0, 0
    for _ in range(2):
        [(seen, _)] = play(made)
        ends = [
            client(w, PRIVATE[p], LABELS[p], b, teacher)
            for p, b in zip(parts, BATCHES, strict=True)
        ]
        for ours, (theirs, largest, conflicts) in zip(seen.rows, ends, strict=True):
            met, steps = met + conflicts, steps + EPOCHS * 2
            # Adam divides by a root of squared gradients, at least 1e-8: so far may it enlarge the rounding of a gradient
            rounding = 4 * torch.finfo(torch.float64).eps * math.sqrt(len(w)) * largest
            assert (
                float((ours - theirs).abs().max()) <= EPOCHS * 2 * LR * rounding / 1e-8 < LR / 100
            )
        teacher = torch.stack([model(row)(PUBLIC).detach() for row, *_ in ends]).mean(0)
        w = (7 * ends[0][0] + 5 * ends[1][0]) / 12
    assert 0 < met < steps / 2, "some steps of the second round are projected and some are not"
