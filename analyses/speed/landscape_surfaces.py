"""Surfaces whose every point is known: around trained networks, and synthetic ones with features of a known width."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

import fldiag
from fldiag import config, registry
from fldiag.landscape import directions
from fldiag.landscape.evaluator import Evaluator
from fldiag.landscape.grid import axis
from fldiag.models.mlp import mlp
from fldiag.models.vit import SLViT
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.runs.open_problem import open_problem

POINTS, ROUNDS = 41, 5
#: Examples of a surface, where they are not 100.
EXAMPLES = {"small_resnet": 32, "vit": 32}
SPANS = (0.5, 1.0, 5.0, 20.0)
#: Cells of the grid that a synthetic feature spans. Narrower ones than ``COUNTED`` can lie between any points.
WIDTHS, COUNTED = (1.0, 2.0, 3.0, 4.0, 6.0, 10.0), 3.0


@registry.model("benchmark_tanh")
def tanh(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two hidden layers of 48 with tanh."""
    layers = list(mlp(shape, classes, hidden=(48, 48)))
    return nn.Sequential(*(nn.Tanh() if isinstance(m, nn.ReLU) else m for m in layers))


@registry.model("benchmark_vit")
def vit(shape: tuple[int, ...], classes: int) -> nn.Module:
    """SL-ViT of two blocks of width 32, for 8x8 images."""
    return SLViT(
        (shape[0], shape[1], shape[2]),
        classes,
        patch=2,
        dim=32,
        depth=2,
        heads=2,
        per_head=16,
        hidden=32,
    )


#: Name -> options of its training on the digits.
NETWORKS = {
    "logistic": ["model.name=mlp", "model.hidden=[]"],
    "mlp": ["model.name=mlp"],
    "small_cnn": ["model.name=small_cnn"],
    "small_resnet": ["model.name=small_resnet"],
    "tanh_mlp": ["model.name=benchmark_tanh"],
    "vit": ["model.name=benchmark_vit", "train.lr=0.02"],
}


@dataclass(frozen=True)
class Known:
    """A surface over ``axis`` x ``axis`` (rows are y) with all its losses; ``cells``: the width of a synthetic feature."""

    name: str
    group: str
    axis: np.ndarray
    losses: np.ndarray
    cells: float | None = None


def of_network(name: str, seed: int, cache: Path | None = None) -> list[Known]:
    """Eight surfaces: four spans along the top two eigenvectors and along two random directions.

    ``cache``: a folder that keeps the losses, so that another rule can be tried on them in seconds.
    """
    kept = None if cache is None else cache / f"{name}-{seed}.npy"
    if kept is not None and kept.is_file():
        losses = np.load(kept)
    else:
        losses = _losses(name, seed)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            np.save(kept, losses)
    looks = [(kind, span) for kind in ("eigen", "random") for span in SPANS]
    return [
        Known(f"{name}, {kind}, span {span:g}, seed {seed}", name, axis(POINTS, span), one)
        for (kind, span), one in zip(looks, losses, strict=True)
    ]


def _losses(name: str, seed: int) -> np.ndarray:
    settings = [
        *NETWORKS[name],
        f"rounds={ROUNDS}",
        "train.epochs=2",
        "partition.alpha=1.0",
        f"seed={seed}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = fldiag.train(config.load("digits", settings), out=Path(folder) / "run")
        p = open_problem(run, samples=EXAMPLES.get(name, 100))
    pairs = eigenpairs(p, 2, seed=seed)
    drawn = directions.random(p, seed=seed)
    found = []
    for d1, d2 in ((pairs.vectors[0], pairs.vectors[1]), (drawn.d1, drawn.d2)):
        for span in SPANS:
            places, evaluate = axis(POINTS, span), Evaluator(p, [d1, d2])
            found.append([[evaluate(float(x), float(y))[0] for x in places] for y in places])
    return np.array(found)


# -- synthetic surfaces: x and y in grid cells, the feature on a bowl

Plane = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _turned(rng: np.random.Generator) -> Plane:
    """A coordinate in a random direction through a random place of the middle half of the grid."""
    angle, (a, b) = rng.uniform(0, math.pi), rng.uniform(-POINTS / 4, POINTS / 4, 2)
    return lambda x, y: math.cos(angle) * (x - a) + math.sin(angle) * (y - b)


def _cliff(width: float, rng: np.random.Generator) -> Plane:
    """A step that rises from 10 to 90 % over ``width`` cells."""
    t, height = _turned(rng), rng.uniform(0.3, 1.5)
    return lambda x, y: height / (1 + np.exp(-2 * math.log(9) * t(x, y) / width))


def _hole(width: float, rng: np.random.Generator) -> Plane:
    """A Gaussian pit, ``width`` cells wide at half its depth."""
    (a, b), depth = rng.uniform(-0.4 * POINTS, 0.4 * POINTS, 2), rng.uniform(0.3, 1.5)
    return lambda x, y: -depth * np.exp(-4 * math.log(2) * ((x - a) ** 2 + (y - b) ** 2) / width**2)


def _kink(width: float, rng: np.random.Generator) -> Plane:
    """A straight ridge with a sharp edge, ``width`` cells wide at half its height, and a crease."""
    t, s, height, slope = _turned(rng), _turned(rng), rng.uniform(0.3, 1.5), rng.uniform(0, 1.5)
    return lambda x, y: (
        height * np.maximum(1 - np.abs(t(x, y)) / width, 0) + slope * np.abs(s(x, y)) / POINTS
    )


def _wave(width: float, rng: np.random.Generator) -> Plane:
    """Straight waves, a crest ``width`` cells wide."""
    t, height = _turned(rng), rng.uniform(0.05, 0.5)
    return lambda x, y: height * np.sin(math.pi * t(x, y) / width)


def _corner(width: float, rng: np.random.Generator) -> Plane:
    """Exploding corners: times ten every ``width`` cells."""
    sides = rng.choice([-1.0, 1.0], 2)
    start = rng.uniform(0.4, 0.9) * POINTS / math.sqrt(2)

    def height(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(
            np.minimum(
                10.0
                ** ((np.maximum(x * sides[0], 0) + np.maximum(y * sides[1], 0) - start) / width),
                1e12,
            )
        )

    return height


FEATURES: dict[str, Callable[[float, np.random.Generator], Plane]] = {
    "cliff": _cliff,
    "hole": _hole,
    "kink": _kink,
    "wave": _wave,
    "corner": _corner,
}


def synthetic(seed: int, copies: int) -> Iterator[Known]:
    """``copies`` of every feature and width, each on a bowl of its own."""
    places = axis(POINTS, 1.0)
    x, y = np.meshgrid(places * (POINTS // 2), places * (POINTS // 2))
    for number, (name, feature) in enumerate(FEATURES.items()):
        for width in WIDTHS:
            for copy in range(copies):
                rng = np.random.default_rng([seed, number, round(10 * width), copy])
                a, b, c = *rng.uniform(0.05, 1, 2), rng.uniform(-0.3, 0.3)
                u, v = x / (POINTS // 2), y / (POINTS // 2)
                bowl = 1 + a * u**2 + b * v**2 + c * u * v
                yield Known(
                    f"{name}, {width:g} cells, seed {seed}.{copy}",
                    name,
                    places,
                    bowl + feature(width, rng)(x, y),
                    width,
                )
