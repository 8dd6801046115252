"""The five papers' figures and tables, trained, asked and drawn again: a package beside fldiag.

``study`` has what a study needs, ``shapes`` the few shapes of pictures, ``reported`` the papers' own numbers (``PAPER.csv``),
``costs`` what is counted. A paper's module has its studies and its statements.
"""
