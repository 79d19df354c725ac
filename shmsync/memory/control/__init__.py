"""The control segment: its header, its reader table, and what is left of those whose owner died.

segment.py makes and finds one, reader_figures.py has the figures of a row that users see.
May be imported by memory, engine, workers, schemes, integrations and cli.
"""
