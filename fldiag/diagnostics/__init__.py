"""The catalogue of diagnostics: one file (or one folder, where it is long) is one diagnostic, whole."""
