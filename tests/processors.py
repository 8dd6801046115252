"""Runs the numeric tests again as each lesser processor that this one can play: ``python tests/processors.py [pytest arguments]``.

Instruction sets differ in how many numbers they add side by side, so sums round differently, and so do the random numbers
and exponentials of float32. A tolerance that fits one processor alone fails here.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent
#: Folders and files whose tests depend on how a processor rounds: this file and the nightly workflow run them as other ones, too.
NUMERIC = {
    "curvature",
    "diagnostics",
    "golden",
    "methods",
    "parity",
    "training",
    "conformance/test_methods.py",
    *(
        f"unit/test_{name}.py"
        for name in (
            # curvature and surfaces
            "account",
            "drift",
            "geometry",
            "landscape",
            "losses",
            "matching",
            "models",
            "problem",
            "paths",
            "rounding",
            "sharpness",
            # training
            "rounds",
            "step",
        )
    ),
}
#: By PyTorch's names, from the least to the greatest: what holds PyTorch, oneDNN, MKL and OpenBLAS (NumPy, SciPy) to each.
PROCESSORS = {
    "DEFAULT": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "AVX512": {},
}


def numeric(path: Path) -> bool:
    if not path.is_relative_to(ROOT):
        return False
    inside = path.relative_to(ROOT)
    return inside.as_posix() in NUMERIC or inside.parts[0] in NUMERIC


def files() -> list[str]:
    """What has numeric tests; importing the others would take longer than many a test."""
    paths = sorted(ROOT.rglob("test_*.py"))
    return [str(p) for p in paths if numeric(p) or "mark.numeric" in p.read_text("utf-8")]


def lesser(capability: str) -> list[str]:
    """The processors that one of this capability can play; none where PyTorch knows another family of processors."""
    names = list(PROCESSORS)
    return names[: names.index(capability)] if capability in names else []


def main(arguments: list[str]) -> int:
    import torch  # a second or two, which conftest.py does not need

    own = torch.backends.cpu.get_cpu_capability()
    failed = []
    print(
        f"This processor computes with {own}; it can play: {', '.join(lesser(own)) or 'no other'}.",
        flush=True,
    )
    for name in lesser(own):
        print(f"As {name}:", flush=True)
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "numeric and not slow", *files(), *arguments],
            env={**os.environ, **PROCESSORS[name]},
        )
        print(
            f"As {name}: {'passed' if done.returncode == 0 else 'failed'} in {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if done.returncode:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
