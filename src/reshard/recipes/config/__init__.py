"""Numbers and conditions of a model's config.json in recipes.

    expressions     arithmetic over its keys
    variables       expressions in braces in a rule's text, and their numbers in their place
    conditions      when a rule counts

Start at `expressions`.
"""
