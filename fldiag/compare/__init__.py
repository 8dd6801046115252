"""Is one side better than another, and is a run still as good as its baseline?

``sides`` says what is compared, ``evidence`` how sure each number's difference is, ``conditions`` is their small language, and
``compare`` decides.
"""
