"""Models and state dicts of PyTorch, from checkpoints and into them.

loading   a module or a state dict, filled from a checkpoint
reader    a checkpoint of any format and cut, for `torch.distributed.checkpoint.load`
writer    a new checkpoint, for its `save`, by all ranks
places    where in new files each part of a save lies
folder_save, address_save
          how a save becomes a checkpoint, in a folder or in an object store
rank_upload
          what one rank sends to an object store while it writes
chunks    parts of tensors in the words of PyTorch
"""
