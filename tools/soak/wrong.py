"""The one error of a campaign; here, so that a fuzzer can name it before it loads reshard."""


class Wrong(Exception):
    """A result that is not what it should be."""
