"""Operations on shards: who has them, how they move, and how an operation is carried out.

Start at `operation_call.py`, which carries out every operation. `runner.py` has the shards of this
process, `process_runner.py` one shard a process; `pending_sums.py` decides which contributions
wait, `shard_copies.py` and `chosen_program.py` how shards move; `refusals.py` has the errors of
libraries, with the operation and its operands.
"""
