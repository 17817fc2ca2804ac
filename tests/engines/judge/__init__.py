"""The judge: a recipe's shards compute what the whole model computes.

For a family, a tiny model of transformers with odd sizes. For each parallelism, its state dict is
cut as the recipe says, every rank's module of the same class is built from the config of that rank
and given the rank's shards, and all ranks run in lock step: what only they need to tell each other
is what that cut needs, the sum of a column-cut layer, rows of an output put side by side, the
rows of an embedding that another has. The logits must be the whole model's.

    family           what a family is: its tiny config, and which sizes of it are a rank's own
    families/        the families, several in a file
    shards           state dicts cut by a recipe, and put together again over storage and stages
    ranks            ranks in lock step, and what they exchange
    modules          what each layer of a rank's module does with its cut
    verdicts         a family judged at every parallelism
    names            checkpoints' names: every tensor matched; both names give the same shards
    plans            where a recipe and transformers' own plan differ
    records          the record of a verdict, and its replay without transformers

`python -m tests.engines.judge NAME...` judges families and writes their records (with
RESHARD_ENGINE=transformers, in the environment of that engine).
"""
