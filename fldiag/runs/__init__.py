"""What a federation leaves on disk, and how it is read.

``run`` is a run's folder, ``checkpoint`` files of weights (also other programs'). ``history`` reads
the rounds of a run for diagnostics, with all its examples; ``open_problem`` makes a ``Problem`` of a file.
"""
