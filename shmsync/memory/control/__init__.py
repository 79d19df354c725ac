"""The control segment: its header, the figures of its readers, and what dead publishers leave.

segment.py makes and finds one. The reader table is native (native/src/reader_table.cpp).
May be imported by memory, engine, workers, schemes, integrations and cli.
"""
