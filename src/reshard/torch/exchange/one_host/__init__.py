"""Memory that ranks of one host share: what one packs there, another unpacks from where it lies.

`shared_memory` is where to start. `doors` finds out who can share memory, `segments` is what they
share, and `device_memory` is that of CUDA devices.
"""
