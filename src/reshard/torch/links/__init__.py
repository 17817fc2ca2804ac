"""Links: send the weights of a trainer to engines that run as separate jobs.

    link               `connect`, and a process's end of a link
    address            the address of a link's store, and who may use it
    sealed_store       the store, whose keys and values are authenticated by the secret
    handshake          admission: the ranks of a side, and proof of the secret
    heartbeat          detect processes that end
    tcp_user_timeout   detect hosts that become unreachable
    messages           orders, outcomes and options as JSON
    sync               `WeightSync`: prepared once, run after every step
    trainer_sync       its trainer side
    engine_sync        its engine side
    relay_tree         engines that forward weights to each other
    verl_engine        verl's interface

Start at `link`.
"""
