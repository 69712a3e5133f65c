"""``ascend-deep coverage``: every model family of transformers that has experts, compiled and compared with eager.

``families`` lists them, ``build`` makes a tiny random model of one, ``measure`` compiles it in one way and says what
was fused, ``run`` does that for many in processes that may crash, ``table`` writes ``docs/coverage.md`` and the
baseline ``docs/coverage.json``, ``check`` compares with the baseline, and ``command`` is the command line.
"""
