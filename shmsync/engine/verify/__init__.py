"""Traces of what the processes do.

May be imported by engine, schemes, collectors, integrations and metrics.
"""
