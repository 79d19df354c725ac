"""The memory that weights lie in: sealed memfds, their free room, and the pool of those in use again.

A slab has no name, so it disappears with its last mapping.
May be imported by memory, engine, schemes, collectors and cli.
"""
