"""The protocol: the table of operations and the codecs of client and service. Does no I/O."""
