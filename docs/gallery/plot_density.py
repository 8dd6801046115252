"""
The whole spectrum
==================

Most eigenvalues are near zero; a few, about as many as there are classes, are much larger.
"""

import fldiag

table = fldiag.diagnose(
    "../../checkpoints/example/fedavg-digits.pt", "spectrum", density=True, samples=300
)
figure = fldiag.draw(table)
