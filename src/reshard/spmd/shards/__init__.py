"""Operations on shards: storage of shards, their movement, and the execution of operations.

Start at `operation_call.py`, which executes every operation. `runner.py` stores the shards of this
process, `process_runner.py` one shard per process. `partial_sums.py` decides which contributions
stay pending, `shard_copies.py` and `chosen_program.py` how shards move. `error_translation.py`
translates errors of libraries into errors that name the operation and its operands.
"""
