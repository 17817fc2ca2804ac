"""Files of `torch.save`, read and written without PyTorch; formats of whole checkpoints use them.

`saved_files` reads a file: its nested value, with tensors where they lie; `nested_states` gives
their names. Both stand on `restricted_pickle`, which reads pickles without running them, and
`zip_records`. `pickle_writing` writes pickles. `archive` finds the one tensor in an archive of a
distributed checkpoint, `archive_writing` lays out new ones, `new_files` whole new files. Start with
`saved_files`.
"""
