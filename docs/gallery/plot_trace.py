"""
Which layer is sharp
====================

The trace of the Hessian by layer. In this network it is exact: no random vectors are involved.
"""

import fldiag

table = fldiag.diagnose("../../checkpoints/example/fedavg-digits.pt", "trace", per="layer")
figure = fldiag.draw(table)
print(table[["layer", "value", "estimator"]].to_string(index=False))
