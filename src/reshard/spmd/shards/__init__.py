"""Operations on shards: where shards are stored, how they move, and how operations execute.

Start at `operation_call.py`, which executes every operation. `runner.py` stores the shards of this
process, `process_runner.py` one shard per process. `partial_sums.py` decides which contributions
stay pending, `shard_copies.py` and `chosen_program.py` how shards move. `refusals.py` translates
errors of libraries into errors that name the operation and its operands.
"""
