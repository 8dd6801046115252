"""
Loss along the sharpest directions
==================================

The plane is that of the two leading eigenvectors of the Hessian at the weights.
"""

import fldiag

table = fldiag.diagnose(
    "../../checkpoints/example/fedsol-digits.pt", "landscape", points=15, samples=300
)
figure = fldiag.draw(table)
