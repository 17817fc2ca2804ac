"""Programs of collectives between ranks: their choice (`methods`) and their execution.

`phases` derives a rank's part in each step, and the memory of its shards in between. `run` executes
a program for a redistribution, by the exchange of messages. A refit runs the same phases.
"""
