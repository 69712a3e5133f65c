"""torch.compile backend."""
