"""The commands, a module each: `inspect`, `plan`, `convert`, `verify`, `explain`, `recipe`, `calibrate`.

A module has the `click` command of its name. To add one, write such a module and list its command
in `reshard.cli.program`.
"""
