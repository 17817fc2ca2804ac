"""The runs that are recorded, and compared live."""

from __future__ import annotations

from engines.deepspeed.parallel_training import ParallelCase
from engines.deepspeed.training import Case

FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}

SAVED = (
    Case(1, 2),
    Case(1, 2, "bf16", "groups", config=FP32_ACCUMULATION),
    Case(1, 2, "bf16", "plain", "sgd"),
    Case(1, 3, "bf16", "groups", zero={"elastic_checkpoint": True}),
    Case(1, 2, "fp16", "tied", zero={"round_robin_gradients": True}),
    Case(2, 4, "bf16", "frozen"),
    Case(2, 3, "fp32", "groups"),
    Case(2, 2, "bf16", zero={"parameter_alignment": True}),
    Case(3, 1, "fp32", "groups"),
    Case(3, 2),
    Case(3, 3, "fp16", "frozen", zero={"sub_group_size": 40}),
    Case(3, 4, "bf16", "tied"),
    Case(0, 2, "fp32"),
    Case(0, 1, "bf16"),
    Case(0, 2, "fp16", "groups"),
)

PARALLEL = (
    ParallelCase(1, 4, "bf16", "experts"),
    ParallelCase(2, 2, "fp32", "experts"),
    ParallelCase(1, 4, "bf16", "pipeline"),
    ParallelCase(1, 2, "fp32", "pipelinetied"),
    ParallelCase(0, 2, "fp32", "experts"),
    ParallelCase(1, 4, "bf16", "slices"),
    ParallelCase(3, 2, "fp32", "slices"),
    ParallelCase(0, 2, "fp32", "slices"),
    ParallelCase(1, 4, "bf16", "autotp"),
    ParallelCase(3, 2, "fp32", "autotp"),
)
