__version__ = "0.1.0"

#: The official release whose behaviour we follow; services switch features by it.
PARITY_VERSION = "0.36.0"
