"""Checksums, the proof of what a worker holds, and traces of what the processes do.

request.py asks all workers, compare.py compares in one process.
May be imported by engine, schemes, collectors, integrations and metrics.
"""
