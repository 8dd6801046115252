"""What the tests of landscapes and profiles share."""

from fldiag.results.kept_units import ArrayStore


class Interrupted(ArrayStore):
    """Presses Ctrl-C after some points."""

    def __init__(self, path, after):
        super().__init__(path)
        self.after = after

    def offer(self, *what):
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt
