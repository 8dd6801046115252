"""
Do the clients' curvatures agree?
=================================

H_N and H_D of the clients of the last round, and how much of their sharp directions they share.
"""

import tempfile

import fldiag

config = fldiag.Config.load("digits", rounds=3, clients__per_round=5)
run = fldiag.train(config, out=tempfile.mkdtemp() + "/run")
figure = fldiag.draw(fldiag.diagnose(run, "matching", rounds="last"))
