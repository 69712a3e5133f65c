"""Expert parallelism over torch.distributed: the engine that runs everywhere (gloo, NCCL, HCCL) and defines the ops."""
