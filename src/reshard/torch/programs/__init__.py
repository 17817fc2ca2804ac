"""Programs of collectives between ranks: which is taken (`methods`), and how it runs.

`phases` says what one rank does in each step and where its shards lie in between; `run` carries a
program out for a redistribution, by the exchange of messages. A refit runs the same phases.
"""
