"""The gallery: the picture of every diagnostic, drawn at every build beside the call that draws it."""

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import fldiag
from fldiag import registry

DOCS = Path(__file__).resolve().parents[1]
OUT = DOCS / "made"
FEDSOL = "checkpoints/example/fedsol-digits.pt"
#: Subjects and options of the diagnostics that need others than a short run of FedAvg.
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "landscape": (["checkpoints/example/fedavg-digits.pt", FEDSOL], {"samples": 300}),
    "paths": (FEDSOL, {"samples": 300}),
    "sharpness": (FEDSOL, {"samples": 300}),
    "spectrum": (FEDSOL, {"density": True, "samples": 300}),
    "lora": ("runs/adapters", {}),
    "drift": ("runs/steps", {}),
    "partition": ("runs/fedavg", {}),
}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "steps": {"metrics__steps": True, "metrics__proximal": "kl"},
    "adapters": {"model__name": "mlp", "model__lora_rank": 4},
}


def write(_: Any = None) -> None:
    """The page and its pictures, in a folder that is made anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    text = "# Gallery\n\nThe runs are `digits` with six rounds and five clients a round.\n"
    with tempfile.TemporaryDirectory() as folder:
        for name, options in RUNS.items():
            config = fldiag.Config.load("digits", rounds=6, clients__per_round=5, **options)
            fldiag.train(config, out=f"{folder}/{name}")
        for name in registry.built_in("diagnostics"):
            if name == "doctor":  # it has a table and no picture
                continue
            target, options = CALLS.get(name, ("runs/fedavg", {}))
            places = [
                p.replace("runs", folder) if p.startswith("runs") else str(DOCS.parent / p)
                for p in ([target] if isinstance(target, str) else target)
            ]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # small runs: that they are small is no news here
                table = fldiag.diagnose(places if len(places) > 1 else places[0], name, **options)
            figure = fldiag.draw(table)
            figure.savefig(OUT / f"{name}.png", dpi=110)
            call = "".join(f", {key}={value!r}" for key, value in options.items())
            text += f"\n## {name}\n\n{registry.catalogue('diagnostics')[name]}\n\n"
            text += f"```python\nfldiag.draw(fldiag.diagnose({target!r}, {name!r}{call}))\n```\n\n"
            text += f"![{name}]({name}.png)\n"
    (OUT / "gallery.md").write_text(text, "utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
