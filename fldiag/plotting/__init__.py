"""Pictures from tidy tables: ``style`` (colours, sizes, display names, files) and ``shapes`` (lines, cells, bars).

A diagnostic's ``draw(table)`` gives a matplotlib figure and ``style.save`` writes it. Nothing here opens a window, needs a
display or changes matplotlib's global settings.
"""
