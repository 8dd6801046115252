"""What a federation leaves on disk, and how it is read: checkpoint files, run folders with their journal, ``History``.

``schema`` is a checkpoint, ``tensor_files`` its file, ``foreign`` files of other programs; ``run`` is a run's folder, ``index``
and ``journal`` what it says of itself, ``owner`` who may write it, ``recording`` how a loop that is not fldiag's writes one.
``history`` reads the rounds of a run for diagnostics, ``pool`` its examples; ``open_problem`` makes a ``Problem`` of a file.
"""
