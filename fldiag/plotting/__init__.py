"""Pictures from tidy tables: looks, sizes, display names, files and the shapes that they share.

A diagnostic's ``draw(table)`` gives a matplotlib figure and ``style.save`` writes it. Nothing here opens a window, needs a
display or changes matplotlib's global settings.
"""
