"""The commands of `reshard`, each in its own module.

inspect, plan, convert, verify  checkpoints
diff, apply                     the changes between two checkpoints, and their application
explain                         two shardings, and the change from the first to the second
recipe                          recipes: their contents, and their effect on a checkpoint
calibrate                       the links of a machine

To add a command, write a module with the `click` command and list it in `reshard.cli.program`.
"""
