"""Whose memory it is, how the leaves lie in it, and whether its processes live.

Control segment, slab, manifest, reader table. Knows nothing of publishing or reading.
May be imported by engine, schemes, collectors, integrations and cli.
"""
