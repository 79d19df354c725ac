"""The memory that weights lie in: sealed memfds, and how much room and which nodes there are for them.

A slab has no name, so it disappears with its last mapping.
May be imported by memory, engine, schemes, collectors and cli.
"""
