"""The five papers' figures and tables, trained, diagnosed and drawn again, and both toys: a package beside fldiag.

``study`` says what a figure is (and how to write one), ``scales`` how small it is made, ``plan`` which runs several of them
share, ``workers`` trains and diagnoses a run, ``make`` draws and writes, ``ledger`` puts the numbers beside the papers'. A
folder is a paper: its printed numbers (``reported.csv``), its statements (``claims.py``), and a file for each study.
"""
