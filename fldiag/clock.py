"""Times in words."""

#: Seconds from which on the time that is left is said.
LONG = 60.0


def duration(seconds: float) -> str:
    """Such as 50 s, 12 min or 3.4 h.

    >>> duration(50), duration(720), duration(12_240)
    ('50 s', '12 min', '3.4 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
