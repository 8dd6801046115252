"""Pictures from tidy result tables: one kind of picture a module, one style for all of them.

Every module has ``draw(table, ...) -> matplotlib.figure.Figure``; ``style.save`` writes it. Nothing here opens
a window, needs a display or changes matplotlib's global settings.
"""
