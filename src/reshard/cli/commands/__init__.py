"""The commands of `reshard`, a module each.

inspect, plan, convert, verify  checkpoints
diff, apply                     what changed between two, and a checkpoint with that
explain                         two shardings, and what it takes to get from one to the other
recipe                          recipes: what is in them, and what they make of a checkpoint
calibrate                       the links of a machine

To add one, write a module with the `click` command and list it in `reshard.cli.program`.
"""
