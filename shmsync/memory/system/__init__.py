"""Processes and system calls: who lives, which limits hold, and the end of this process.

May be imported by memory, engine, workers, schemes, collectors, integrations and cli.
"""
