"""DeepSpeed: checkpoints that its ranks write, read, written and resumed from."""
