"""Refits: a model fills another one, between the ranks of a running job.

`refit` is where to start. It compares both models (`matching`, with the `members` of fused
tensors), chooses how each tensor moves (`methods`), plans each rank's part (`planning`, which
makes a `plan`) and runs it (`batches`). `options` checks what is given. `transforms` make targets
of other elements, such as quantised ones; `verification` compares both ends by digests, `replicas`
what several ranks have alike. `moves` are the plan as people read it.
"""
