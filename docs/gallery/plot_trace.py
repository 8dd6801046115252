"""
Which layer is sharp
====================

The trace of the Hessian by layer. In this network it is exact: no random vectors are involved.
"""

import fldiag
from fldiag.diagnostics import spectrum

table = fldiag.diagnose("../../checkpoints/example/fedavg-digits.pt", "spectrum", trace=True)
table = table[table["metric"] == "trace"]
figure = spectrum.draw_layers(table)
print(table[["layer", "value", "estimator"]].to_string(index=False))
