"""Links: send the weights of a trainer to engines that run as separate jobs.

    link               `connect`, and a process's end of a link
    sealed_store       the store: address, server, and what the secret authenticates
    handshake          admission: the ranks of a side, and proof of the secret
    heartbeat          detect processes that end, and hosts that become unreachable
    messages           orders, outcomes and options as JSON
    sync               `WeightSync`: prepared once, run after every step
    trainer_sync       its trainer side
    engine_sync        its engine side
    relay_tree         engines that forward weights to each other
    verl_engine        verl's interface

Start at `link`.
"""
