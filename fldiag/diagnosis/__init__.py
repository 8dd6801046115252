"""Asking a diagnostic: of files, runs and modules, with the cache, and writing what it says.

The command line, the report, the papers' figures and ``fldiag.diagnose`` all ask here.
"""
