"""Links: weights of one job into another, which were started apart.

`connect` is where to start (`link`). Processes meet at a store (`address`), where keys and values
are sealed by their secret (`sealed_store`), and admit one another (`admission`). A `WeightSync`
(`sync`) is prepared once and runs after every step.
"""
