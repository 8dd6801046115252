"""Pictures from tidy tables: ``style`` (colours, sizes, files), ``shapes`` (lines, cells, bars), ``words`` (display names),
``pages`` (html).

A diagnostic's ``draw(table)`` gives a matplotlib figure and ``style.save`` writes it. Nothing here opens a window, needs a
display or changes matplotlib's global settings.
"""
