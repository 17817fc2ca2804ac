"""The search for a program of collectives between two shardings.

find_program   start here: a search by name, and its states as steps
problems       what is searched for, and how far it is at least
states         shardings over the prime axes of a mesh (`prime_axes`), and what they share
constructive   a good program at once: slice, rearrange once, gather
exact          the cheapest program by A*, over tables of all states (`state_table`)
axis_problems  the same over whole axes, of which there are few
mlir_basis     the four steps of MLIR's notes
legality       which steps are legal; `step_naming` says what they are called
step_joining   several steps taken at once
"""
