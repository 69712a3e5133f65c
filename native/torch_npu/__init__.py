"""Adapter to torch_npu's own MoE, GEMM and indexer ops. Written from public documentation; never run on an NPU.

``rows`` holds the limits of the vendor ops as data, ``checks`` applies them to a call before it is emitted, and one
file per op family composes vendor calls into our ops. ``soc`` says which processor and CANN release the call is for.
"""
