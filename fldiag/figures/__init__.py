"""The papers' figures and tables, trained, diagnosed and drawn again: ``fldiag figures``.

``study`` says what a figure is (and how to write one), ``scales`` how small it is made, ``plan`` which runs several of
them share, ``work`` trains and diagnoses a run, ``make`` draws and writes, ``ledger`` puts the numbers beside the papers'.
"""
