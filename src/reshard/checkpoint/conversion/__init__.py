"""Conversions: asked for, planned, and run so that the target appears whole or not at all.

`request` is what a user asks for; `planning` makes a `conversion` of it, by `source_names` and
`placement`; `run` carries it out in a staging folder (`staging`, `journal`), alone or shared by
`processes`, and `uploading` sends it to a store meanwhile. Start with `planning`.
"""
