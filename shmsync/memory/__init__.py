"""The memory of an arena: which process owns it, how the leaves lie in it, and whether its processes live.

Control segment, slab, manifest, reader table (docs/glossary.md has the words). Publishing and reading are in engine/.
May be imported by engine, workers, schemes, collectors, integrations and cli.
"""
