"""Refits: a model fills another model, between the ranks of a running job.

`refit` is where to start. It compares both models (`matching`, with the `members` of fused
tensors), chooses how each tensor moves (`methods`), plans each rank's part (`planning`, which
creates a `plan`) and runs it (`batches`). `options` validates arguments. `transforms` create
targets with other elements, such as quantized targets. `replicas` compares the parts of a tensor
that several ranks have, by digests. `moves` present the plan in readable form.
"""
