"""Processes and system calls: which processes are alive, what a refused call means, and the end of this process.

May be imported by memory, engine, workers, schemes, collectors, integrations and cli.
"""
