"""DeepSpeed's checkpoints: ZeRO of all stages, experts, pipelines, and universal ones.

`files` says which files there are, `partitions` where a parameter lies in flat buffers; `reader`
opens, `arrangements/` writes. Nothing imports DeepSpeed.
"""
