"""The trainer's side of a collector: its workers, their jobs, and the batches that they fill.

May be imported by collectors.
"""
