"""How long 20 checks take, as a build server types them: ``python analyses/speed/checks.py``.

Twenty calls of ``fldiag check``, one after the other and each a process of its own, on runs of the digits (small MLP, three seeds
a side): ten of methods (accuracy and loss), and ten of two given models (accuracy, loss and the worst tenth of clients). Aim:
60 s. Training takes about 10 s more.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fldiag
from fldiag.results.machine import machine

AIM, TIMES = 60.0, 10
METHODS = ["a", "b", "--fail-if", "accuracy < baseline - 1pt", "--fail-if", "loss > baseline + 5%"]
MODELS = ["a/0", "b/0", *METHODS[2:], "--fail-if", "worst_decile < baseline - 5pt"]


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            for seed in range(3):
                config = fldiag.Config.load(
                    "digits",
                    rounds=5,
                    seed=seed,
                    model__name="mlp",
                    train__epochs=1,
                    method__name={"a": "fedavg", "b": "fedprox"}[name],
                )
                fldiag.train(config, out=Path(folder) / name / str(seed))
        total = 0.0
        for what, words in (("methods", METHODS), ("two given models", MODELS)):
            began = time.perf_counter()
            for _ in range(TIMES):
                done = subprocess.run(
                    [sys.executable, "-m", "fldiag.cli", "check", *words],
                    cwd=folder,
                    capture_output=True,
                    encoding="utf-8",
                )
                assert done.returncode in (0, 3), done.stderr
            seconds = time.perf_counter() - began
            total += seconds
            print(f"{TIMES} checks of {what}: {seconds:.1f} s")
    print(
        f"{2 * TIMES} checks: {total:.1f} s (aim: {AIM:g} s, {'met' if total <= AIM else 'MISSED'}); {machine()}"
    )


if __name__ == "__main__":
    main()
