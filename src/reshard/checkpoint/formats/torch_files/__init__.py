"""Files of `torch.save`, read and written without PyTorch; formats of whole checkpoints use them.

`restricted_pickle` reads pickles without running them, `pickle_writing` writes such; `archive`
finds a tensor in a zip archive of `torch.save`, `archive_writing` lays out new ones. Start with
`archive`.
"""
