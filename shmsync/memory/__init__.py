"""Whose memory it is, how the leaves lie in it, and whether its processes live.

Control segment, slab, manifest, reader table (docs/glossary.md has the words). Knows no publishing and no reading.
May be imported by engine, workers, schemes, collectors, integrations and cli.
"""
