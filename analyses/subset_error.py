"""What curvature on a few thousand training images says of all of them: the final models of FedSOL's protocol on CIFAR-10.

    FLDIAG_DATA=FOLDER python analyses/subset_error.py [CHECKPOINT ...] [--part 5000] [--out figures/curvature]

The training images are shuffled (seed 0) and cut into parts. On each part the trace is exact, so their mean is the trace on all
images, and their deviation the error of a trace on one part. The largest eigenvalue of the first part comes with its eigenvector
v, and v' H v is measured on the other parts. Their mean has seen no image that v was fitted to; but for its error, lambda_1 on
all images is at least that. The largest eigenvalue of one part is too large on average, since it is the maximum over the
directions of a noisy matrix. subset_error.csv: every part's numbers and their means. With --images 3000 --part 500, as committed,
about a minute a model on one core; all images were not tried and take far longer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import fldiag
from fldiag import data
from fldiag.curvature.lanczos import lanczos
from fldiag.plotting import style, words
from fldiag.results.provenance import provenance
from fldiag.results.select import number, only
from fldiag.runs.open_problem import open_problem

EXAMPLES = Path("checkpoints/example")
MODELS = tuple(
    EXAMPLES / f"{name}-cifar10.pt" for name in ("fedavg", "fedprox", "fedntd", "fedsol")
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoints", nargs="*", type=Path, default=MODELS)
    parser.add_argument("--part", type=int, default=5000, help="images in a part")
    parser.add_argument("--images", type=int, default=50_000, help="of so many images in all")
    parser.add_argument("--out", type=Path, default=Path("figures/curvature"))
    args = parser.parse_args()
    train = data.take(data.load("cifar10", variant="fedsol"), "train")
    order = np.random.default_rng(0).permutation(train.n)[: args.images]
    parts = np.array_split(order, max(2, len(order) // args.part))
    found = pd.concat(
        [of_model(path, train, parts) for path in args.checkpoints], ignore_index=True
    )
    write(found, args.out, part=args.part, images=args.images)


def of_model(path: Path, train: data.Slice, parts: list[np.ndarray]) -> pd.DataFrame:
    """Rows of one model: what each part says, and what all say together."""
    name, rows, vector = path.name.split("-")[0], [], None
    for place, part in enumerate(parts):
        some = (train.dataset.normalise(train.x_raw[part]), train.y[part])
        surface = open_problem(fldiag.load(path, data=some))
        if vector is None:
            top = lanczos(surface.hessian(), surface.layout.size, 1, miss=0.0)
            vector = top.vectors[0].double()
            rows.append(
                {
                    "metric": "lambda_1",
                    "part": place,
                    "value": float(top.values[0]),
                    "residual": float(top.residuals[0]),
                }
            )
        else:
            rows.append(
                {"metric": "quotient", "part": place, "value": float(vector @ surface.hvp(vector))}
            )
        rows.append(
            {
                "metric": "trace",
                "part": place,
                "value": number(fldiag.diagnose(surface, "trace"), "trace", layer=None),
            }
        )
        print(f"{name}: part {place + 1} of {len(parts)}", flush=True)
    found = pd.DataFrame(rows).assign(n_examples=len(parts[0]))
    return pd.concat([found, means(found)], ignore_index=True).assign(model=name)


def means(found: pd.DataFrame) -> pd.DataFrame:
    """Means over the parts with the standard error that the deviation between the parts gives, which is also named."""
    rows = []
    for metric in ("quotient", "trace"):
        values = only(found, metric=metric)["value"].to_numpy(float)
        rows.append(
            {
                "metric": f"{metric}_mean",
                "value": values.mean(),
                "deviation": values.std(ddof=1),
                "stderr": values.std(ddof=1) / len(values) ** 0.5,
            }
        )
    return pd.DataFrame(rows)


def draw(found: pd.DataFrame) -> Figure:
    """What each part says, a column a model."""
    names, size = list(dict.fromkeys(found["model"])), int(found["n_examples"].max())
    with style.paper():
        fig, (left, right) = style.panels(2, 2.2, 0.3, across=2)
        for ax, alone, mean, label in (
            (left, "lambda_1", "quotient", "λ₁"),
            (right, "trace", "trace", "trace"),
        ):
            for place, name in enumerate(names):
                mine, look = only(found, model=name), style.looks(names)[name]
                every = only(mine, metric=mean)["value"].astype(float)
                ax.plot(
                    place + np.linspace(-0.15, 0.15, len(every)),
                    every,
                    ".",
                    color=look.color,
                    alpha=0.5,
                    markersize=4,
                )
                if alone != mean:
                    ax.plot(place, number(mine, alone), marker="^", color=look.color, linestyle="")
            ax.set_xticks(range(len(names)), list(map(words.method, names)))
            ax.set(ylabel=label, ylim=(0, None))
            ax.grid(True, axis="y")
        handles = [
            Line2D([], [], color="0.3", linestyle="", marker=marker, markersize=4)
            for marker in "^."
        ]
        style.legend(
            fig,
            handles,
            [
                f"largest eigenvalue of one part ({size:,} images)",
                "another part: v' H v of that eigenvector, and the trace",
            ],
            loc="outside lower center",
            ncols=2,
        )
    return fig


def write(found: pd.DataFrame, out: Path, **options: int) -> None:
    columns = ["model", "metric", "part", "value", "stderr", "deviation", "residual", "n_examples"]
    about = {**provenance(**options), "what": __doc__.split("\n")[0]}
    out.mkdir(parents=True, exist_ok=True)
    file = out / "subset_error.csv"
    found.reindex(columns=columns).to_csv(file, index=False, float_format="%.6g")
    (out / "subset_error.json").write_text(json.dumps(about, indent=1), "utf-8")
    style.save(draw(found), out / "subset_error.png")
    print(
        only(found, part=None)
        .drop(columns=["part", "n_examples", "residual"])
        .to_string(index=False)
    )
    print(out / "subset_error.png")


if __name__ == "__main__":
    main()
