"""
What local training takes away
==============================

Four rounds of FedAvg on the digits; accuracy of the received, the trained and the aggregated models.
"""

import tempfile

import fldiag

config = fldiag.Config.load("digits", rounds=4)
run = fldiag.train(config, out=tempfile.mkdtemp() + "/run")
figure = fldiag.draw(fldiag.diagnose(run, "forgetting"))
