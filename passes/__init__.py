"""The graph passes: capture, normal form, recognisers (one per file), gates and certificates, rewrite.

``pipeline.Pipeline`` runs them in order; ``catalogue`` lists the recognisers; ``_types`` is the vocabulary.
"""
