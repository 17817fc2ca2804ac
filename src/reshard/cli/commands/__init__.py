"""The commands of `reshard`, a module each.

`inspect`, `plan`, `convert` and `verify` are about checkpoints, `explain` about two shardings,
`recipe` and its subcommands about recipes, `calibrate` about the links of a machine. A module has the `click` command of its name. To add one, write such a module and list its command
in `reshard.cli.program`.
"""
