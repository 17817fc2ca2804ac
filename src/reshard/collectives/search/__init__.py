"""The search for a program of collectives between two shardings.

find_program   start here: a search by name, whose states become steps
states         shardings over the prime axes of meshes, and the problem of a search
transitions    legal steps between states, their names and costs, and joining them
constructive   a good program at once: slice, rearrange once, gather
exact          the cheapest program by A*, over tables of all states
mlir_basis     the four basic steps of MLIR's notes
"""
