"""The array API standard's own suite on `reshard.spmd`: `make array-api SUITE=folder`.

The suite (github.com/data-apis/array-api-tests, with data-apis/array-api in its folder `array-api`)
is given as a folder, and is no part of this repository. It imports one module as the namespace
under test:

    reshard.spmd                      arrays that are whole
    array_api_suite.numpy_shards      arrays that it makes are sharded, with NumPy's shards
    array_api_suite.torch_shards      the same with PyTorch's

`reasons` has a list for each: the tests that fail, under the reason why they may.
"""
