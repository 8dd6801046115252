"""One self-contained HTML file that compares runs: it collects tables, computes nothing heavy, and needs no network."""
