"""Files of `torch.save`, read and written without PyTorch.

`reading` returns the nested value of a file, with tensors that stay in the file; `nested_states`
flattens it into names. `building` plans new files. Below them are `pickles`, `zip_archives` and
`values`. Start with `reading`.
"""
