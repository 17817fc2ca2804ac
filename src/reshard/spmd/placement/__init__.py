"""What moves once values have their shardings, and which of them wait to be combined.

`placement` lists the movements; `pending_values` says which sums of contributions are combined
later than where they arise, by `largest_closure`.
"""
