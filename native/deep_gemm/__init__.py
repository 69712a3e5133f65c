"""Adapter to DeepGEMM: one Python API on CUDA (DeepGEMM) and Ascend (DeepGEMM-Ascend), see ``differences``."""
