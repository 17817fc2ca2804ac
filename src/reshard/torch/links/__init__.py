"""Links: weights of one job into another, which were started apart.

`connect` is where to start (`link`). Processes meet at a store (`address`), where keys and values
are sealed by their secret (`sealed_store`), and admit one another (`admission`). A `WeightSync`
(`sync`) is prepared once and runs after every step: `trainer_sync` and `engine_sync` are its two
sides, which understand each other by `orders`. Engines hand on weights to each other (`relay`) as
`fan_out` says.
"""
