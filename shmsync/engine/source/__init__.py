"""What users pass as weights: modules, TensorDicts and mappings, as named tensors that were checked.

A source is read by collect() in sources.py; the other files check it, name its tensors, or compare it with a manifest.
May be imported by engine, schemes, collectors and integrations.
"""
