"""Runs the numeric tests again as each lesser processor that this one can play: ``python tests/processors.py [pytest arguments]``.

Instruction sets differ in how many numbers they add side by side, so sums round differently, and so do the random numbers
and exponentials of float32. A tolerance that fits one processor alone fails here.
"""

import os
import subprocess
import sys
import time

import torch

#: By PyTorch's names, from the least to the greatest: what holds PyTorch, oneDNN, MKL and OpenBLAS (NumPy, SciPy) to each.
PROCESSORS = {
    "DEFAULT": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
                "OPENBLAS_CORETYPE": "Nehalem"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
             "OPENBLAS_CORETYPE": "Haswell"},
    "AVX512": {}}


def lesser(capability: str) -> list[str]:
    """The processors that one of this capability can play; none where PyTorch knows another family of processors."""
    names = list(PROCESSORS)
    return names[: names.index(capability)] if capability in names else []


def main(arguments: list[str]) -> int:
    own = torch.backends.cpu.get_cpu_capability()
    failed = []
    print(f"This processor computes with {own}; it can play: {', '.join(lesser(own)) or 'no other'}.", flush=True)
    for name in lesser(own):
        print(f"As {name}:", flush=True)
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "pytest", "-m", "numeric and not slow", *arguments],
                              env={**os.environ, **PROCESSORS[name]})
        print(f"As {name}: {'passed' if done.returncode == 0 else 'failed'} in {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
