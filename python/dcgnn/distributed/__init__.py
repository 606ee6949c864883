"""One graph on several processes, by torch.distributed."""
