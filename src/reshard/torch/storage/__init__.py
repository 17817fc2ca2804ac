"""PyTorch models and state dicts: load them from checkpoints, and save them.

loading   fill a module or a state dict from a checkpoint
reader    read checkpoints of any format and sharding with `torch.distributed.checkpoint.load`
writer    write new checkpoints with its `save`, on all ranks
places    find the offsets of a save's tensors in new files
folder_save, address_save
          complete a checkpoint in a folder or in an object store
rank_upload
          upload a rank's files to an object store while it writes them
chunks    describe parts of tensors in PyTorch's terms
"""
